"""The pods of this node, and which of them are engines, as the Kubernetes API tells.

A pod is an engine by its own word (annotation `tocsin.dev/engine`), by the command line of a container, by what its
labels or its image are called, or, where it was given a GPU, by the page on its well-known port. The API is asked
once and then watched; where it is silent, what it told last holds.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from agent.engines import KINDS
from agent.model import Batch, FoundEngine, PodFacts
from agent.sources.discovery import WELL_KNOWN, Named, engine_of, kind_of_page, options_of, version_at
from agent.threads import begin
from drills.cluster import Cluster, ClusterError, Object, has_condition, labels_of, labels_or, pods_path, uid_of

KIND = "tocsin.dev/engine"  # annotation: an engine's kind, "auto", or "false": it is none
PORT = "tocsin.dev/port"  # annotation: where it listens
SCHEME = "tocsin.dev/scheme"  # annotation: "https"
WORKER = "leaderworkerset.sigs.k8s.io/worker-index"  # label: of an engine over several pods only 0 answers
AGAIN_S = 15.0  # after a failure
VERSION_AGAIN_S = 30.0  # where an engine that is Ready did not say it
GPUS = re.compile(r"(?:nvidia\.com|amd\.com)/(?:gpu|mig-.*)")
LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/component", "app", "engine", "inference-engine")
# What people call them: as a label's value, or within the name of an image.
CALLED: Mapping[str, str] = {
    "vllm": "vllm", "vllm-openai": "vllm", "sglang": "sglang", "text-generation-inference": "tgi", "tgi": "tgi",
    "llama.cpp": "llamacpp", "llama-server": "llamacpp", "lmdeploy": "lmdeploy", "tritonserver": "triton",
    "triton": "triton", "trtllm-serve": "trtllm-serve",
}  # fmt: skip
# What their makers' images start where the pod names no command: its args are this one's.
ENTRYPOINTS: Mapping[str, tuple[str, ...]] = {
    "vllm-openai": ("vllm", "serve"), "text-generation-inference": ("text-generation-launcher",)}
SHELLS = ("sh", "bash", "ash", "dash")
# A value of the container's environment: `$(VAR)` is the kubelet's, `$VAR` and `${VAR}` a shell's. It is not looked up:
# it may be a secret's.
UNKNOWN = re.compile(r"\$[({\w@*]")
# Options that have a value for certain: after any other a variable may be an option as well.
VALUED = re.compile(r"""-(tp|pp|dp|np|ngl|c|m|q|p|O)|--(?!enable|disable|no-|use-|skip-|allow-|log-requests)[\w-]*(
    seqs|requests|size|len|length|tokens|port|host|hostname|dtype|utilization|fraction|model|name|path|dir|id|config
    |parser|tokenizer|template|revision|seed|space|backend|num-shard|quantization|quantize|parallel|blocks-override
    |mode|level|policy|role|rank|factor|scaling|key|token)""", re.VERBOSE)
# Of a script: what is quoted, a comment, the end of a line.
OUTSIDE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<![^\s;&|()])#[^\n]*|\n""", re.DOTALL)
# More options than one, or perhaps none.
MANY = re.compile(r"\$\{?[@*]|\[[@*]|\$[({]?\w*(?:ARGS|OPT|FLAGS|EXTRA)|\$\{\w+:?\+|\$\{[^}]*$", re.IGNORECASE)
DEFAULT_PORTS: Mapping[str, int] = {"sglang": 30000, "llamacpp": 8080, "lmdeploy": 23333, "triton": 8002, "tgi": 80}


class PodEngine(NamedTuple):
    """The engine that a pod is. `kind` None: only its page can tell."""

    kind: str | None
    port: int
    is_tls: bool
    how: str


def options_in(pod: Mapping[str, Any], port: int) -> dict[str, str]:
    """The options of the engine at this port, as discovery.options_of; {} where the pod does not show them all.

    Without a secret. A value of the container's environment stays as it is written there (`$(SEATS)`). Pure.
    """
    containers = (pod.get("spec") or {}).get("containers") or ()
    lines = [(named, argv) for argv in map(_argv, containers) if (named := _named(argv)) is not None]
    own = [argv for named, argv in lines if named.port == port] or [argv for _, argv in lines]
    return {} if len(own) != 1 or _hides_more(own[0]) else options_of(own[0])


def _argv(container: Mapping[str, Any]) -> list[str]:
    """A container's command line: its image's where that is known, and what its shell starts."""
    command, args = container.get("command") or (), container.get("args") or ()
    words = [*(command or ENTRYPOINTS.get(_image(container), ())), *args]
    words = [re.sub(r"\$\(([\w.-]+)\)", r"${\1}", word) for word in words]  # so that a shell's words do not end there
    script = next((after for word, after in pairwise(words[:4]) if re.fullmatch(r"-[a-z]*c", word)), None)
    shell = bool(words) and words[0].rpartition("/")[2] in SHELLS and script is not None
    return [re.sub(r"\$\{([\w.-]+)\}", r"$(\1)", word) for word in (_in_shell(script or "") if shell else words)]


def _in_shell(script: str) -> list[str]:
    """The one command of a script that starts an engine; [] where none or several do, or it runs others."""
    if "<<" in script:
        return []
    flat = re.sub(r"(?<=\s)[0-9]?>{1,2}&?\s*[^\s;|&]+", " ", OUTSIDE.sub(_unquoted, script))  # where it writes to
    lexer = shlex.shlex(flat, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:
        return []
    found = []
    for is_mark, part in groupby(words, key=lambda word: not word.strip(";&|()<>")):
        own = [] if is_mark else list(part)
        while own and (own[0] == "exec" or re.match(r"\w+=", own[0])):
            del own[0]
        found += [own] * (_named(own) is not None)
    runs_others = any("`" in word or word.endswith("$") for own in found for word in own)  # $(nvidia-smi -L | wc -l)
    return found[0] if len(found) == 1 and not runs_others else []


def _unquoted(part: re.Match[str]) -> str:
    """What stands for a line's end, a comment, and a line that goes on; what is quoted stays."""
    return {"\n": ";", "\\\n": " ", "#": ""}.get(part[0] if part[0][0] != "#" else "#", part[0])


def _named(argv: Sequence[str]) -> Named | None:
    """As engine_of; its port is 0 where a variable says it."""
    return engine_of([re.sub(r"\$[({]?[\w.-]+[)}]?", "0", word) for word in argv])


def _hides_more(argv: Sequence[str]) -> bool:
    """Whether a variable stands in it that may be several options, or one with its value."""
    return any(MANY.search(word) or (UNKNOWN.search(word) and not re.match(r"--?[\w.-]+=", word)
                                     and not VALUED.fullmatch(before.replace("_", "-")) and before != "serve")
               for before, word in pairwise(argv))


def engine_in(pod: Mapping[str, Any]) -> PodEngine | None:
    """What a pod's own words say of the engine in it; None where they speak of none. Pure."""
    told, containers = labels_or(pod, "annotations"), (pod.get("spec") or {}).get("containers") or ()
    wish, port = told.get(KIND, "").strip().lower(), told.get(PORT, "")
    labels = labels_of(pod)
    if wish == "false" or labels.get(LABELS[0]) == "tocsin" or labels.get(WORKER, "0") != "0":
        return None
    named = int(port) if re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536 else None
    is_tls = told.get(SCHEME) == "https"
    if wish:
        own = wish if wish in KINDS else "auto"
        return PodEngine(own, named or _port(containers, own), is_tls, f"its annotation {KIND}")
    for one in containers:
        argv = [*(one.get("command") or ()), *(one.get("args") or ())]
        line = engine_of(argv)
        if line is not None:
            return PodEngine(line.kind, named or line.port, is_tls or line.is_tls, "its command line")
    kind, how = _called(pod, containers)
    if kind is not None and named is None and not _serves(containers):
        return None  # a worker of several that make one engine: another pod answers for it
    if kind is not None:
        return PodEngine(kind, named or _port(containers, kind), is_tls, how)
    if named is not None:
        return PodEngine("auto", named, is_tls, f"its annotation {PORT}")
    known = [number for _, number in _ports(containers) if number in WELL_KNOWN]
    if known and gives_gpus(pod):
        return PodEngine(None, known[0], is_tls, f"the page on its port {known[0]}")
    return None


def _called(pod: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    labels = labels_of(pod)
    for label in LABELS:
        kind = CALLED.get(labels.get(label, "").lower())
        if kind is not None:
            return kind, f"its label {label}"
    for one in containers:
        kind = CALLED.get(_image(one))
        if kind is not None:
            return kind, "its image"
    return None, ""


def _image(container: Mapping[str, Any]) -> str:
    """What its image is called, without registry, tag and digest."""
    return re.sub(r"[@:][^/]*$", "", str(container.get("image", ""))).rpartition("/")[2].lower()


def _ports(containers: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [(str(port.get("name", "")), int(port["containerPort"])) for one in containers
            for port in one.get("ports") or () if port.get("protocol", "TCP") == "TCP"]


def _serves(containers: Sequence[Mapping[str, Any]]) -> bool:
    return bool(_ports(containers)) or any((one.get("readinessProbe") or {}).get("httpGet") for one in containers)


def _port(containers: Sequence[Mapping[str, Any]], kind: str) -> int:
    """Where its readiness is asked, the port called http, its first one, else the kind's usual one."""
    ports = _ports(containers)
    for one in containers:
        asked = ((one.get("readinessProbe") or {}).get("httpGet") or {}).get("port")
        number = str(dict(ports).get(str(asked), asked))
        if number.isdigit():
            return int(number)
    return dict(ports).get("http") or next((number for _, number in ports), DEFAULT_PORTS.get(kind, 8000))


def _gpus(container: Mapping[str, Any]) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return any(GPUS.fullmatch(name) for name in limits)


def gives_gpus(pod: Mapping[str, Any]) -> bool:
    """Whether one of its containers asks for a GPU."""
    return any(_gpus(one) for one in (pod.get("spec") or {}).get("containers") or ())


def workload_of(pod: Mapping[str, Any]) -> str:
    """`namespace/name` of what brings a pod back, through a rollout too; of the pod itself where nothing does."""
    meta, hash_ = pod["metadata"], labels_of(pod).get("pod-template-hash", "")
    owner = next((one for one in meta.get("ownerReferences") or () if one.get("controller")), None)
    if owner is None or owner.get("kind") == "Node":
        return f"{meta['namespace']}/{meta['name']}"
    name = str(owner["name"])
    return f"{meta['namespace']}/{name.removesuffix(f'-{hash_}') if hash_ else name}"


def facts_of(pod: Mapping[str, Any]) -> PodFacts:
    """A pod as the agent keeps it."""
    meta = pod["metadata"]
    return PodFacts(str(meta["namespace"]), str(meta["name"]), uid_of(pod),
                    str((pod.get("status") or {}).get("phase", "")), bool(meta.get("deletionTimestamp")))


def kept(pod: Object) -> Object:
    """What of a pod is looked at: a hundred whole ones are megabytes."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    of_container = ("command", "args", "image", "ports", "readinessProbe", "resources")
    return {
        "metadata": {name: meta[name] for name in ("namespace", "name", "uid", "labels", "deletionTimestamp",
                                                   "ownerReferences") if name in meta}
        | {"annotations": {key: value for key, value in labels_or(pod, "annotations").items()
                           if key.startswith("tocsin.dev/")}},
        "spec": {"containers": [{name: one[name] for name in of_container if name in one}
                                for one in spec.get("containers") or ()]},
        "status": {name: status[name] for name in ("phase", "podIP", "conditions") if name in status}
        | {"containerStatuses": [{"containerID": one.get("containerID")}
                                 for one in status.get("containerStatuses") or ()]},
    }


class PodsSource:
    """Fulfils agent.model.Source. `Batch.pods` and `Batch.found` are None until the API has told once."""

    name = "pods"

    def __init__(self, node: str, *, again_s: float = AGAIN_S) -> None:
        self.note = ""
        self._node, self._again_s = node, again_s
        self._seen: Mapping[str, Object] | None = None
        self._error: str | None = None
        self._asked: dict[tuple[str, int], str | None] = {}  # (uid, port) -> kind, None: no engine
        self._versions: dict[str, tuple[Any, str | None, float]] = {}  # uid -> its containers, version, when asked
        self._options: dict[str, tuple[Object, dict[str, str]]] = {}  # uid -> the pod as it was read, its options
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self, now: float) -> Batch:
        """What is known now. Asks the API nothing: that goes on in a thread of its own."""
        start = time.monotonic()
        if self._thread is None:
            self._thread = begin(self._follow, "pods")
        seen = self._seen
        if seen is None:
            return Batch(self.name, now, 0.0, error=self._error)
        found = tuple(self._engines(seen))
        self.note = f"{len(seen)} pods of this node, {len(found)} of them engines"
        return Batch(self.name, now, time.monotonic() - start, error=self._error, found=found,
                     pods=tuple(facts_of(pod) for pod in seen.values()))

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()

    def _follow(self) -> None:
        fields = f"spec.nodeName={self._node}"
        while not self._stop.is_set():
            try:
                with Cluster() as cluster:
                    for seen in cluster.follow(pods_path(None), self._stop, fields=fields, again_s=self._again_s,
                                               keep=kept, failed=self._failed):
                        self._seen, self._error = dict(seen), None
            except ClusterError as error:
                self._failed(error)
                self._stop.wait(self._again_s)

    def _failed(self, error: ClusterError) -> None:
        if error.code not in (410, 504):  # these only ask for a new list
            self._error = f"{error}; is overlays/discovery applied?" if error.code == 403 else str(error)

    def _engines(self, seen: Mapping[str, Object]) -> Iterator[FoundEngine]:
        self._asked = {key: kind for key, kind in self._asked.items() if key[0] in seen}
        self._versions = {uid: told for uid, told in self._versions.items() if uid in seen}
        self._options = {uid: told for uid, told in self._options.items() if uid in seen}
        for uid, pod in sorted(seen.items(), key=lambda item: str(item[1]["metadata"]["name"])):
            status = pod.get("status") or {}
            ip, engine = status.get("podIP"), engine_in(pod)
            if engine is None or not ip or status.get("phase") != "Running":
                continue
            address = f"{f'[{ip}]' if ':' in ip else ip}:{engine.port}"
            url = f"{'https' if engine.is_tls else 'http'}://{address}"
            kind = engine.kind if engine.kind is not None else self._kind_at(uid, pod, engine.port, url)
            if kind is not None:
                how = f"{engine.how} (pod {pod['metadata']['namespace']}/{pod['metadata']['name']})"
                options = self._options_of(uid, pod, engine.port)
                version = self._version(uid, pod, kind, url) if options else None
                yield FoundEngine(address, url, kind, how, 0, pod=uid, workload=workload_of(pod), options=options,
                                  version=version)

    def _options_of(self, uid: str, pod: Object, port: int) -> dict[str, str]:
        """Worked out when the API tells of the pod anew: a script takes 0.4 ms, at each read."""
        before, options = self._options.get(uid, (None, {}))
        if before is not pod:
            options = options_in(pod, port)
            self._options[uid] = pod, options
        return options

    def _version(self, uid: str, pod: Object, kind: str, url: str) -> str | None:
        """As discovery's: asked once its containers have begun and it is Ready, and again where it did not answer."""
        runs = [one["containerID"] for one in (pod.get("status") or {}).get("containerStatuses") or ()]
        before, version, asked_at = self._versions.get(uid, (None, None, -VERSION_AGAIN_S))
        now = time.monotonic()
        if before != runs or (version is None and now - asked_at >= VERSION_AGAIN_S):
            if not has_condition(pod, "Ready"):
                return None
            version = version_at(url) if kind in ("vllm", "auto") else ""
            self._versions[uid] = (runs, version, now)
        return version

    def _kind_at(self, uid: str, pod: Object, port: int, url: str) -> str | None:
        """Which engine's page stands there. Asked once a pod, when it is Ready."""
        if (uid, port) not in self._asked:
            if not has_condition(pod, "Ready"):
                return None
            self._asked[uid, port] = kind_of_page(f"{url}/metrics")
        return self._asked[uid, port]
