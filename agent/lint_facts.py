"""What `tocsin lint` asks the world: the agent or the engines, /proc, the model's folder, the evidence file.

Nothing is changed, and no engine is asked for work. What cannot be had is left out: agent.lint says what would tell.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from agent.budget import number_of
from agent.client import AgentError, NotPermitted, NotRunning, ask
from agent.config import Config, address_of, target_name
from agent.daemon import is_same
from agent.exposition import PageError, Reader
from agent.lint_case import Facts, is_hidden
from agent.oneshot import doctor
from agent.silences import is_like
from agent.sources.discovery import Process, address_in, engine_of, is_here, options_of, processes, version_at
from agent.sources.fetch import Fetcher, FetchError, is_local

PROC = Path("/proc")
ROUNDS = 5  # reads of an engine at an address, a second apart
ASK_S, MOST_BYTES = 3.0, 8 << 20
CONFIG_BYTES, INDEX_BYTES = 1 << 20, 64 << 20  # the index of a mixture of many experts has 10 MB
LISTS = {"*.safetensors": "model.safetensors.index.json", "*.bin": "pytorch_model.bin.index.json"}
OF_TRAINERS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin"})  # beside weights, and none
MODEL_OPTIONS = ("model", "model-path", "model-id")  # of vLLM, SGLang, TGI
HUBS = ("root/.cache/huggingface/hub", "home/*/.cache/huggingface/hub", "data", "data/hub")  # /data is TGI's
CANARIES, EVIDENCE = "canaries.jsonl", "evidence.yaml"  # in the state folder
Profile = Literal["latency", "throughput"]


class Unusable(Exception):  # noqa: N818  (it says what is)
    """The evidence file cannot be used; the text says where and why."""


class Looked(NamedTuple):
    """What was found: facts of each engine with what heads them, and what could not be looked at."""

    engines: Sequence[tuple[Mapping[str, Any], Facts]]
    errors: Sequence[str]


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What no machine can see, of one engine. Shares are 0 to 1, scores are points of 100 of your own evaluation."""

    streamed: float | None = None  # share of the requests
    outlier_ratio: float | None = None  # largest max ÷ mean of a layer's activations
    score_before: float | None = None
    score_after: float | None = None


class Meant(NamedTuple):
    """What a number of the evidence file may be, and what to write for one that is not."""

    is_one: Callable[[float], bool]
    said: str
    instead: Callable[[float], str]


_SCORE = Meant(lambda points: 1 < points <= 100, "points of 100, over 1",
               lambda points: f"{points * 100:g}" if 0 < points <= 1 else "71.2 for 71.2 of 100 points")
MEANT: Mapping[str, Meant] = {
    "streamed": Meant(lambda share: 0 <= share <= 1, "a share from 0 to 1",
                      lambda share: f"{share / 100:g} for {share:g} %" if 1 < share <= 100 else "0.97 for 97 %"),
    "outlier_ratio": Meant(lambda ratio: 1 <= ratio < math.inf, "a largest number ÷ the mean, 1 or more",
                           lambda _: "38 where the largest activation is 38 times the mean"),
    "score_before": _SCORE, "score_after": _SCORE}


def evidence_in(path: Path, *, must: bool) -> dict[str, Evidence]:
    """Engine (with * and ?) -> its evidence. `must`: the file has to be there. Raises Unusable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, PermissionError) as fault:
        if not must:
            return {}
        raise Unusable(f"{path}: {fault.strerror}; name a file that can be read") from fault
    except (OSError, UnicodeError) as fault:
        raise Unusable(f"{path}: {fault}") from fault
    try:
        found = msgspec.convert(yaml.safe_load(text) or {}, dict[str, Evidence])
    except (yaml.YAMLError, msgspec.ValidationError) as fault:
        raise Unusable(f"{path}: {fault}; an engine's name, or \"*\", then {', '.join(Evidence.__struct_fields__)}"
                       ) from fault
    for engine, told in found.items():
        for key, value in msgspec.structs.asdict(told).items():
            if value is not None and not MEANT[key].is_one(value):
                raise Unusable(f"{path}: {engine}: {key}: {value:g} is not {MEANT[key].said}; write"
                               f" {MEANT[key].instead(value)}")
    return found


def look(config: Config, urls: Sequence[str], *, profile: Profile | None = None,
         evidence: Path | None = None, drills: Sequence[Mapping[str, Any]] | None = None) -> Looked:
    """Facts of the engines at these addresses, or of those that the agent here watches, or that run here.

    Raises Unusable, agent.strict.Unfit where an address is none, and agent.client.AgentError.
    """
    now = time.time()
    on_file = evidence_in(evidence or config.state_dir / EVIDENCE, must=evidence is not None)
    checked: Mapping[str, Any] | None = None
    if urls:
        told = doctor(config, urls, rounds=ROUNDS)
        remembered = _remembered(config)
        told["targets"] = [one | {"configs": one["configs"] or _of_address(remembered, one["url"])}
                           for one in told["targets"]]
    else:
        try:
            told, checked = ask(config.socket, "/doctor"), ask(config.socket, "/check")
        except (NotRunning, NotPermitted):
            told = doctor(config, [], rounds=ROUNDS)
    found, errors, here, ran = [], [], processes(PROC), canaries(config.state_dir / CANARIES)
    for target in told["targets"]:
        if target["error"] or not target["engines"]:
            errors.append(f"{target['target']}: {target['error'] or 'it tells no engine'}")
            continue
        of = _target(target, here, config, profile)
        for engine in target["engines"]:
            facts = replace(
                of, engine=engine, numbers=target["facts"].get(engine) or {}, now=now, url=target["url"] or "",
                evidence=_of_engine(on_file, engine),
                canaries=of_url(ran, target["url"] or ""),
                binds=next((row for row in target["binds"] if row["engine"] == engine), None))
            if checked is not None:
                facts = replace(_watched(facts, target, told, checked["signals"], config), drills=drills)
            found.append((_head(target, engine), facts))
    return Looked(found, errors)


def _remembered(config: Config) -> Sequence[Mapping[str, Any]]:
    """The targets of the agent here, with what it remembers; none where it does not answer."""
    try:
        targets: Sequence[Mapping[str, Any]] = ask(config.socket, "/doctor")["targets"]
    except (NotRunning, AgentError):
        return []
    return targets


def _of_address(targets: Sequence[Mapping[str, Any]], url: str | None) -> Sequence[Mapping[str, Any]]:
    """The last command line and version that is remembered of what is at an address."""
    return next((one["configs"][-1:] for one in targets if url and one["url"] and is_same(one["url"], url)), [])


def _head(target: Mapping[str, Any], engine: str) -> dict[str, Any]:
    version = target["configs"][-1]["version"] if target["configs"] else version_at(target["url"] or "")
    return {"engine": engine, "url": target["url"], "kind": target["kind"], "model": target["model"],
            "version": version or None}


def _target(target: Mapping[str, Any], here: Sequence[Process], config: Config, profile: Profile | None) -> Facts:
    """What all engines of a target share."""
    url = target["url"] or ""
    process = _process(url, here)
    options = target["configs"][-1]["options"] if target["configs"] else None if process is None else options_of(
        process.argv)
    served = _json(f"{url}/v1/models")
    models = served.get("data") if isinstance(served, dict) else None
    model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    named = [(options or {}).get(name) for name in MODEL_OPTIONS]
    roots = [Path("/")] if process is None else [Path(f"/proc/{process.pid}/root"), Path("/")]
    folder = folder_of([*named, model.get("root")], roots)
    context = str(model.get("max_model_len") or (options or {}).get("max-model-len") or "")
    lost = [found["name"] for found in target["found"] if found["required"] and found["how"] is None
            and found["code"] != "not_supported"]
    its = next((one for one in config.engines if url == one.url or target_name(one) == target["target"]), None)
    pods = re.fullmatch(r"([^/]+/[^/]+)#\d+", target["target"])
    return Facts(target["target"], target["kind"], profile or (None if its is None else its.profile), options,
                 cache_labels(_text(f"{url}/metrics")), _config_of(folder), _weights_in(folder),
                 number_of(context), lost=lost, served=target["model"] or "",
                 configured="" if its is None else target_name(its), pods_of=pods[1] if pods else "")


def _watched(facts: Facts, target: Mapping[str, Any], told: Mapping[str, Any], signals: Sequence[Mapping[str, Any]],
             config: Config) -> Facts:
    """With what the agent sees and remembers: the rows of `check` of this engine, or of what all share; its changes."""
    own = {facts.engine, target["target"], *(gpu["uuid"] for gpu in told["gpus"])}
    users = [row for row in signals if str(row["rule"]).startswith(("user-", "outside-"))]
    is_its = address_of_its(target, told["targets"], config)
    its = {str(row["subject"]) for row in users if is_its(str(row["subject"]))}
    configs = target["configs"]
    return replace(
        facts, strangers=sorted({str(row["subject"]) for row in users} - its),
        signals=[row for row in signals if row["subject"] in own | its or str(row["rule"]).startswith("business-")],
        changes=changes(configs) if configs else None, watched_since=configs[0]["at"] if configs else None)


def _of_engine(on_file: Mapping[str, Evidence], engine: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for pattern in sorted(on_file, key=lambda pattern: "*" not in pattern):  # what names it comes last
        if is_like(engine, pattern):
            told |= {key: value for key, value in msgspec.structs.asdict(on_file[pattern]).items() if value is not None}
    return told


def changes(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each change of options or version: {"at", "what": in words}. A version that nobody could read is no other."""
    found: list[dict[str, Any]] = []
    version = ""
    for before, after in pairwise(configs):
        version = before["version"] or version
        is_other = bool(version and after["version"]) and after["version"] != version
        said = [f"version {version} → {after['version']}"] * is_other
        for name in sorted(before["options"].keys() | after["options"].keys()):
            old, new = before["options"].get(name), after["options"].get(name)
            if old != new and not any(is_hidden(value) for value in (old, new)):
                words = ["absent" if value is None else value or "given" for value in (old, new)]
                said.append(f"--{name} {words[0]} → {words[1]}")
        if said:
            found.append({"at": after["at"], "what": ", ".join(said)})
    return found


class Ran(msgspec.Struct, frozen=True):
    """A canary, between the engines at these addresses. `at`: its end, unix s."""

    at: float
    verdict: str
    started: float | None = None
    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


def canaries(path: Path) -> list[Ran]:
    """What `tocsin canary` wrote down; a torn line is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=Ran))
    return found


def note_canary(folder: Path, ran: Ran) -> str | None:
    """Write down how a canary ended, for lint; why it could not be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / CANARIES).open("ab") as out:
            out.write(msgspec.json.encode(ran) + b"\n")
    except OSError as fault:
        return f"{folder / CANARIES}: {fault.strerror}"
    return None


# --- an engine's own word --------------------------------------------------------------------------------------------


def cache_labels(page: str) -> dict[str, str]:
    """The labels of vllm:cache_config_info."""
    try:
        told = Reader({"vllm:cache_config_info"}).read(page.encode()).series
    except PageError:
        return {}
    return dict(told[0].labels) if told else {}


def _text(url: str) -> str:
    fetcher = Fetcher(url, {"User-Agent": "tocsin"}, connect_s=ASK_S, total_s=ASK_S, limit_bytes=MOST_BYTES)
    try:
        answer = fetcher.get()
        return answer.body.decode("utf-8", "replace") if answer.status == 200 else ""
    except (FetchError, ValueError):
        return ""
    finally:
        fetcher.close()


def _json(url: str) -> Any:
    try:
        return json.loads(_text(url))
    except ValueError:
        return None


def _process(url: str, here: Sequence[Process]) -> Process | None:
    """The process here that serves an address of this machine, or of a container's network on it; None where two may.

    By its command line, and by the address of its network namespace, which anybody may read.
    """
    host, _, port = address_of(url).rpartition(":")
    named = [one for one in here if port.isdigit() and (line := engine_of(one.argv)) is not None
             and line.port == int(port)]
    if is_local(host.strip("[]")):
        own = [one for one in named if is_here(PROC, one.pid)] or named  # or a container's, published at its own port
    else:
        own = [one for one in named if address_in(PROC / str(one.pid)) == host]
    return own[0] if len({one.argv for one in own}) == 1 else None


# --- the model's folder ----------------------------------------------------------------------------------------------


def folder_of(names: Iterable[object], roots: Sequence[Path]) -> Path | None:
    """The folder of a model: a path, or a name of the Hugging Face hub, in its cache; None: it cannot be read."""
    for name in names:
        for root in roots if isinstance(name, str) else ():
            with suppress(OSError):
                for folder in _places(root, str(name)):
                    if (folder / "config.json").is_file():
                        return folder
    return None


def _places(root: Path, name: str) -> Sequence[Path]:
    """Where it may lie under a root, the newest snapshot first. Raises OSError."""
    if name.startswith("/"):
        return [root / name[1:]]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return []
    inside = f"models--{name.replace('/', '--')}/snapshots/*"
    found = [folder for hub in HUBS for folder in root.glob(f"{hub}/{inside}")]
    return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)


def _config_of(folder: Path | None) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        with (folder / "config.json").open("rb") as file:
            told = json.loads(file.read(CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _weights_in(folder: Path | None) -> float | None:
    """Bytes of the weights' files; None where there are none. What is there twice, as Mistral has it, counts once."""
    if folder is None:
        return None
    try:
        for ending in ("*.safetensors", "*.bin"):
            files = [path for path in folder.glob(ending) if path.name not in OF_TRAINERS]
            listed = _listed(folder / LISTS[ending])
            own = [path for path in files if path.name in listed] or [
                path for path in files if not path.name.startswith("consolidated")] or files
            size = sum(path.stat().st_size for path in own)
            if size:
                return float(size)
    except OSError:
        pass
    return None


def _listed(index: Path) -> frozenset[str]:
    """The files that a checkpoint's index names; none where it has no index."""
    try:
        with index.open("rb") as file:
            told = json.loads(file.read(INDEX_BYTES))
    except (OSError, ValueError):
        return frozenset()
    names = told.get("weight_map") if isinstance(told, dict) else None
    return frozenset(map(str, names.values())) if isinstance(names, dict) else frozenset()


# --- whose canary it is ----------------------------------------------------------------------------------------------


def of_url(ran: Iterable[Ran], url: str) -> list[dict[str, Any]]:
    """The canaries that named this engine: {"started", "at", "verdict", "side" that it was on}."""
    return [{"started": one.at if one.started is None else one.started, "at": one.at, "verdict": one.verdict,
             "side": side} for one in ran for side, urls in (("old", one.old), ("new", one.new))
            if url and any(is_same(url, named) for named in urls)]


def address_of_its(target: Mapping[str, Any], targets: Sequence[Mapping[str, Any]], config: Config,
                   ) -> Callable[[str], bool]:
    """Whether what is measured at an address is of this target.

    Its own is; another's own is not; one that users use is where all here serve this model, or the canary names it.
    """
    models = {one["model"] for one in targets} if config.probe.canary.model is None else {config.probe.canary.model}
    foreign = [one["url"] for one in targets if one is not target and one["url"]]

    def is_its(address: str) -> bool:
        if target["url"] and is_same(address, target["url"]):
            return True
        return models == {target["model"]} and not any(is_same(address, url) for url in foreign)

    return is_its
