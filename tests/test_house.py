"""The house: what `make test` skips, `.ci/run` must not; the README's command is the one that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.config import load_config
from tests.needs import find, missing, need

ROOT = Path(__file__).resolve().parents[1]

SKIPPING = {
    "by need": "from tests.needs import need\ndef test_it(): need('no-such-program')\n",
    "by mark": "import pytest\n@pytest.mark.skipif(True, reason='not today')\ndef test_it(): pass\n",
    "in a fixture": "import pytest\n@pytest.fixture\ndef f(): pytest.skip('x')\ndef test_it(f): pass\n",
    "as a module": "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n",
}


def run_pytest(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own on `folder`, with our conftest as a plugin."""
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\n")
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-c", str(ini), str(folder)]
    environment = {**os.environ, "TOCSIN_CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", SKIPPING)
def test_ci_fails_on_any_skip(tmp_path: Path, how: str) -> None:
    """A package was missing on the build machine, 40 tests were skipped, and the build was green."""
    (tmp_path / "test_skipping.py").write_text("def test_other(): pass\n" + SKIPPING[how])
    relaxed = run_pytest(tmp_path, ci="")
    assert relaxed.returncode in {0, 5}, relaxed.stdout
    assert "1 skipped" in relaxed.stdout
    strict = run_pytest(tmp_path, ci="1")
    assert strict.returncode not in {0, 5}, strict.stdout
    assert "TOCSIN_CI=1" in strict.stdout


def test_ci_lets_an_expected_failure_be(tmp_path: Path) -> None:
    """pytest reports an xfail as skipped too; it was run, and it did what was written down."""
    (tmp_path / "test_known.py").write_text("import pytest\n@pytest.mark.xfail\ndef test_it(): assert 0\n")
    assert run_pytest(tmp_path, ci="1").returncode == 0


def test_a_missing_tool_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """'skipped: nft' helps nobody who does not know that Debian packs it as nftables."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.needs.EXTRA_PATH", ())
    monkeypatch.setenv("TOCSIN_CI", "")
    assert missing("nft") == "needs nft: apt-get install nftables"
    assert missing("alertmanager") == "needs alertmanager: apt-get install prometheus-alertmanager"
    with pytest.raises(pytest.skip.Exception, match="needs gcc: apt-get install gcc libc6-dev; needs ip: apt-get"):
        need("gcc", "ip")
    monkeypatch.setenv("TOCSIN_CI", "1")
    with pytest.raises(pytest.fail.Exception, match="nothing may be skipped"):
        need("gcc")


def test_sbin_is_searched_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ordinary user's PATH on Debian has no /usr/sbin, where iptables is."""
    tool = tmp_path / "iptables"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("tests.needs.EXTRA_PATH", (str(tmp_path),))
    assert find("iptables") == str(tool)


def test_ci_runs_the_readme_s_own_test_command() -> None:
    """The README promised one command and CI ran another: the promised one had been broken for weeks."""
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^ *(make \w+)  +# .*\btests\b", readme, flags=re.MULTILINE)
    assert commands == ["make test"], "README.md must show its test command once, as `make test   # ... tests`"
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(rf"^step .* {re.escape(commands[0])}$", script, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("story", "python", "told"),
    [
        ("too old", "#!/bin/sh\nexit 1\n", "is older than Python 3.11"),
        ("Debian without python3-venv", '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n', "install python3-venv"),
    ],
)
def test_setup_says_what_python_lacks(tmp_path: Path, story: str, python: str, told: str) -> None:
    """On a fresh machine the first command ended in a traceback of venv, and that was the end of the trial."""
    need("make")
    interpreter = tmp_path / "python"
    interpreter.write_text(python)
    interpreter.chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = [find("make") or "", "setup", f"PYTHON={interpreter}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0, story
    assert told in done.stderr, story
    assert not (tmp_path / ".venv").exists()


def test_run_writes_a_configuration_that_needs_no_root(tmp_path: Path) -> None:
    """`make run` as an ordinary user ended at /var/lib/tocsin: permission denied."""
    need("make")
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    target = tmp_path / ".tocsin" / "tocsin.yaml"
    subprocess.run([find("make") or "", str(target)], cwd=tmp_path, capture_output=True, check=True)
    config = load_config(target, {})
    assert config.state_dir == tmp_path / ".tocsin"
    assert config.socket == tmp_path / ".tocsin" / "tocsin.sock"
