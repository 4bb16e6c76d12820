"""A stand-in for the Kubernetes API: compare-and-set, uids, selectors, eviction, grace, watches, RBAC.

What it answers was looked at on Kubernetes 1.36; the same tests run against a real API server (`make test-k8s`). It
has no controller and no kubelet, as that one has none: tests play them (tests/kube/kubelet.py).
"""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

Object = dict[str, Any]
Key = tuple[str, str, str, str]  # group, plural, namespace, name

# Kinds of no namespace, and kinds that a PUT may overwrite whatever they were.
CLUSTER_WIDE = {"namespaces", "nodes", "clusterroles", "clusterrolebindings", "subjectaccessreviews"}
UNCONDITIONAL = {"pods", "nodes", "namespaces", "events", "serviceaccounts"}
SUBRESOURCES = {"status", "eviction", "binding", "scale"}
SLOW_EVICTION_S = 1.0  # of a Pending pod under a wrong uid; the real one takes 10.3 s
BOOKMARK_EVERY_S = 5.0
SERVED = {"": "v1", "coordination.k8s.io": "v1", "policy": "v1", "rbac.authorization.k8s.io": "v1", "apps": "v1",
          "authorization.k8s.io": "v1"}


class No(Exception):  # noqa: N818  (it says what the server says)
    """An answer that is not 200."""

    def __init__(self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
                       "reason": reason, "code": code} | ({"details": dict(details)} if details else {})


def now_text(later_s: float = 0.0) -> str:
    """Now, as the API writes it."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def merged(old: Any, change: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def chooses_labels(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a label selector chooses these labels."""
    depth, parts, part = 0, list[str](), ""
    for char in selector:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    return all(_chooses(one.strip(), labels) for one in [*parts, part] if one.strip())


def _chooses(part: str, labels: Mapping[str, str]) -> bool:
    for word, wanted in ((" notin ", False), (" in ", True)):
        if word in part:
            key, _, rest = part.partition(word)
            values = {value.strip() for value in rest.strip().strip("()").split(",")}
            return (labels.get(key.strip()) in values) is wanted
    for sign, same in (("!=", False), ("==", True), ("=", True)):
        if sign in part:
            key, _, value = part.partition(sign)
            return (labels.get(key.strip()) == value.strip()) is same
    return part[1:].strip() not in labels if part.startswith("!") else part in labels


def chooses_fields(selector: str, thing: Object) -> bool:
    """Whether a field selector chooses it."""
    for part in filter(None, selector.split(",")):
        key, sign, value = part.partition("!=") if "!=" in part else part.replace("==", "=").partition("=")
        found: Any = thing
        for name in key.split("."):
            found = found.get(name, "") if isinstance(found, dict) else ""
        if (str(found) == value) is (sign == "!="):
            return False
    return True


class StandIn:
    """The objects, their history, and the server. `url` once started; `fail_next` makes the next requests fail."""

    def __init__(self) -> None:
        self.things: dict[Key, Object] = {}
        self.history: list[tuple[int, str, Key, Object]] = []
        self.version, self.compacted = 1, 0
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.asked: list[tuple[str, str, Mapping[str, str], Any]] = []
        self.faults: list[Callable[[str, str], None]] = []  # (method, path): may raise No, or sleep
        self.stopping = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        with self.changed:
            for name in ("default", "kube-system"):
                self.create("", "namespaces", "", {"metadata": {"name": name}})

    # --- the server ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> StandIn:
        owner = self

        class Handler(_Handler):
            api = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def url(self) -> str:
        """Its address."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def compact(self) -> None:
        """Forget the history: a watch from before now gets 410."""
        with self.changed:
            self.compacted = self.version
            self.history.clear()
            self.changed.notify_all()

    def fail_next(self, code: int, reason: str, message: str, times: int = 1, of: str = "") -> None:
        """Answer the next requests with an error: those of a method and path that begin with `of`."""
        left = [times]

        def fail(method: str, path: str) -> None:
            if left[0] > 0 and f"{method} {path}".startswith(of):
                left[0] -= 1
                raise No(code, reason, message)

        self.faults.append(fail)

    # --- what it does -------------------------------------------------------------------------------------------------

    def act(self, method: str, path: str, params: Mapping[str, str], body: Any, form: str = "") -> Object:
        """One request that is no watch. Raises No."""
        group, plural, namespace, name, sub = route(path)
        with self.changed:
            if plural == "subjectaccessreviews":
                return {**body, "status": {"allowed": self.allows(body["spec"])}}
            key = (group, plural, namespace, name)
            if method == "POST" and sub == "eviction":
                return self.evict(key, body)
            if method == "POST" and sub == "binding":
                return self.write(key, merged(self.the(key), {"spec": {"nodeName": body["target"]["name"]}}))
            if method == "POST":
                return self.create(group, plural, namespace, body)
            if method == "GET" and name:
                return copy.deepcopy(self.the(key))
            if method == "GET":
                return self.list(group, plural, namespace, params)
            if method == "PUT":
                return self.put(key, body, sub, params)
            if method == "PATCH":
                return self.patch(key, body, sub, params, "strategic" in form)
            if method == "DELETE" and name:
                return self.delete(key, {**params, **_options(body)})
        raise No(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def the(self, key: Key) -> Object:
        """The object of a key."""
        if key not in self.things:
            raise No(404, "NotFound", f'{key[1]} "{key[3]}" not found', {"name": key[3], "kind": key[1]})
        return self.things[key]

    def record(self, kind: str, key: Key, thing: Object) -> Object:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, key, copy.deepcopy(thing)))
        self.changed.notify_all()
        return thing

    def create(self, group: str, plural: str, namespace: str, body: Object) -> Object:
        """POST."""
        if plural not in CLUSTER_WIDE and ("", "namespaces", "", namespace) not in self.things:
            raise No(404, "NotFound", f'namespaces "{namespace}" not found')
        thing = copy.deepcopy(body)
        meta = thing.setdefault("metadata", {})
        if not meta.get("name"):
            if not meta.get("generateName"):
                raise No(422, "Invalid", "name or generateName is required")
            meta["name"] = f"{meta['generateName']}{uuid.uuid4().hex[:5]}"
        if meta.get("resourceVersion"):
            raise No(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        key = (group, plural, namespace, meta["name"])
        if key in self.things:
            raise No(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists', {"name": meta["name"]})
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now_text()}
        if plural not in CLUSTER_WIDE:
            meta["namespace"] = namespace
        if plural == "pods":
            thing.setdefault("spec", {}).setdefault("terminationGracePeriodSeconds", 30)
            thing["status"] = {"phase": "Pending"}
        if plural == "poddisruptionbudgets":
            meta["generation"] = 1
            thing["status"] = {"observedGeneration": 0, "disruptionsAllowed": 0, "currentHealthy": 0,
                               "desiredHealthy": 0, "expectedPods": 0}
        self.things[key] = self.record("ADDED", key, thing)
        return copy.deepcopy(thing)

    def write(self, key: Key, thing: Object) -> Object:
        """Store a changed object; one that is to go and has nothing left to wait for goes."""
        meta = thing["metadata"]
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and meta.get("deletionGracePeriodSeconds") == 0:
            del self.things[key]
            return copy.deepcopy(self.record("DELETED", key, thing))
        self.things[key] = self.record("MODIFIED", key, thing)
        return copy.deepcopy(thing)

    def put(self, key: Key, body: Object, sub: str, params: Mapping[str, str]) -> Object:
        """PUT: compare and set."""
        old, given = self.the(key), str(body["metadata"].get("resourceVersion") or "")
        if not given and key[1] not in UNCONDITIONAL:
            raise No(422, "Invalid", f'{key[1]} "{key[3]}" is invalid: metadata.resourceVersion: Invalid value: 0: must'
                     " be specified for an update", {"causes": [{"field": "metadata.resourceVersion"}]})  # fmt: skip
        self.compare(key, old, given, str(body["metadata"].get("uid") or ""))
        return self.write(key, self.updated(old, body, sub, params))

    def patch(self, key: Key, body: Object, sub: str, params: Mapping[str, str], strategic: bool = False) -> Object:
        """PATCH: accepted without a resourceVersion, compared with one. Strategic: conditions are merged by type."""
        old, meta = self.the(key), body.get("metadata") or {}
        self.compare(key, old, str(meta.get("resourceVersion") or ""), "")
        if strategic:
            by_type = {one["type"]: one for one in (old.get("status") or {}).get("conditions") or ()}
            for one in (body.get("status") or {}).get("conditions") or ():
                by_type[one["type"]] = {**by_type.get(one["type"], {}), **one}
            body = merged(body, {"status": {"conditions": list(by_type.values())}})
        return self.write(key, self.updated(old, merged(old, body), sub, params))

    def compare(self, key: Key, old: Object, version: str, uid: str) -> None:
        if uid and uid != old["metadata"]["uid"]:
            raise No(409, "Conflict", f"Precondition failed: UID in precondition: {uid}, UID in object meta:"
                     f" {old['metadata']['uid']}")  # fmt: skip
        if version and version != old["metadata"]["resourceVersion"]:
            raise No(409, "Conflict", f'Operation cannot be fulfilled on {key[1]} "{key[3]}": the object has been'
                     " modified; please apply your changes to the latest version and try again")  # fmt: skip

    def updated(self, old: Object, new: Object, sub: str, params: Mapping[str, str]) -> Object:
        """What of a new form counts: the status only by its subresource, and what the server itself owns never."""
        if sub == "status":
            thing = {**copy.deepcopy(old), "status": copy.deepcopy(new.get("status") or {})}
        else:
            thing = copy.deepcopy(new)
            if "status" in old:
                thing["status"] = copy.deepcopy(old["status"])
        for name in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"):
            thing["metadata"].pop(name, None)
            if name in old["metadata"]:
                thing["metadata"][name] = old["metadata"][name]
        if (old.get("spec") or {}).get("unschedulable") != (thing.get("spec") or {}).get("unschedulable"):
            owner = {"manager": params.get("fieldManager", "somebody"), "operation": "Update", "fieldsType": "FieldsV1",
                     "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}
            thing["metadata"]["managedFields"] = [owner]
        return thing

    def list(self, group: str, plural: str, namespace: str, params: Mapping[str, str]) -> Object:
        """GET of a kind."""
        wanted = params.get("resourceVersion", "")
        if wanted.isdigit() and int(wanted) > self.version:
            raise too_large(wanted, self.version)
        items = [copy.deepcopy(thing) for key, thing in sorted(self.things.items())
                 if self.chosen(key, thing, group, plural, namespace, params)]
        return {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}, "items": items}

    def chosen(self, key: Key, thing: Object, group: str, plural: str, namespace: str,
               params: Mapping[str, str]) -> bool:
        """Whether a list or watch tells of it."""
        return (key[:2] == (group, plural) and namespace in ("", key[2])
                and chooses_labels(params.get("labelSelector", ""), thing["metadata"].get("labels") or {})
                and chooses_fields(params.get("fieldSelector", ""), thing))  # fmt: skip

    def delete(self, key: Key, options: Mapping[str, Any]) -> Object:
        """DELETE: a pod that runs on a node is only told to go, and stays until its kubelet says it has."""
        thing = self.the(key)
        self.compare(key, thing, str(options.get("resourceVersion") or ""), str(options.get("uid") or ""))
        meta, spec = thing["metadata"], thing.get("spec") or {}
        grace_s = 0
        if key[1] == "pods" and spec.get("nodeName") and thing["status"].get("phase") not in ("Succeeded", "Failed"):
            given = options.get("gracePeriodSeconds")
            grace_s = int(spec["terminationGracePeriodSeconds"] if given is None else given)
            if meta.get("deletionTimestamp") and grace_s >= int(meta["deletionGracePeriodSeconds"]):
                return copy.deepcopy(thing)
        if grace_s == 0 and not meta.get("finalizers"):
            del self.things[key]
            return copy.deepcopy(self.record("DELETED", key, thing))
        meta |= {"deletionTimestamp": now_text(grace_s), "deletionGracePeriodSeconds": grace_s}
        return self.write(key, thing)

    def evict(self, key: Key, body: Object) -> Object:
        """POST eviction: the disruption budget speaks before the uid is looked at."""
        pod, options = self.the(key), body.get("deleteOptions") or {}
        uid = str((options.get("preconditions") or {}).get("uid") or "")
        counts = pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
        if not counts and uid and uid != pod["metadata"]["uid"]:
            self.changed.wait(SLOW_EVICTION_S)  # it tries again and again before it says so
        if counts:
            self.ask_budgets(key, pod)
        self.delete(key, _options(options))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def ask_budgets(self, key: Key, pod: Object) -> None:
        labels, kind = pod["metadata"].get("labels") or {}, ("policy", "poddisruptionbudgets", key[2])
        budgets = [(name, thing) for name, thing in self.things.items()
                   if name[:3] == kind and chooses_labels(_match(thing), labels)]  # fmt: skip
        if len(budgets) > 1:
            raise No(500, "InternalError", "This pod has more than one PodDisruptionBudget, which the eviction"
                     " subresource does not support.")  # fmt: skip
        for name, budget in budgets:
            status = budget["status"]
            if not _is_ready(pod) and status["currentHealthy"] >= status["desiredHealthy"] > 0:
                return  # it is none of the healthy ones
            told = "Cannot evict pod as it would violate the pod's disruption budget."
            if status["observedGeneration"] < budget["metadata"]["generation"]:
                cause = {"reason": "DisruptionBudget", "message": f"The disruption budget {name[3]} is still being"
                         " processed by the server."}
                raise No(429, "TooManyRequests", told, {"causes": [cause], "retryAfterSeconds": 10})
            if status["disruptionsAllowed"] <= 0:
                cause = {"reason": "DisruptionBudget", "message": f"The disruption budget {name[3]} needs"
                         f" {status['desiredHealthy']} healthy pods and has {status['currentHealthy']} currently"}
                raise No(429, "TooManyRequests", told, {"causes": [cause]})
            changed = {**budget, "status": {**status, "disruptionsAllowed": status["disruptionsAllowed"] - 1}}
            self.write(name, changed)

    # --- watches ------------------------------------------------------------------------------------------------------

    def watch(self, path: str, params: Mapping[str, str]) -> Iterator[Object]:
        """Events since a resourceVersion, until the time that was asked for is over. Raises No."""
        group, plural, namespace, _, _ = route(path)
        since, ends = params.get("resourceVersion", ""), time.monotonic() + float(params.get("timeoutSeconds", 1800))
        with self.lock:
            at = int(since) if since.isdigit() else self.version
            if at > self.version:
                raise too_large(since, self.version)
            shown = {key for key, thing in self.things.items()
                     if self.chosen(key, thing, group, plural, namespace, params)}  # fmt: skip
        return self.events((group, plural, namespace), params, at, shown, ends)

    def events(self, where: tuple[str, str, str], params: Mapping[str, str], at: int, shown: set[Key],
               ends: float) -> Iterator[Object]:
        """The events themselves. `shown`: what a selector chose before; chosen no more, it is DELETED for the asker."""
        group, plural, namespace = where
        bookmark_at = time.monotonic() + BOOKMARK_EVERY_S
        while not self.stopping.is_set():
            with self.changed:
                if at < self.compacted:
                    old = f"too old resource version: {at} ({self.compacted})"
                    yield {"type": "ERROR", "object": No(410, "Expired", old).status}
                    return
                news = [event for event in self.history if event[0] > at]
                if not news:
                    if time.monotonic() >= ends:
                        return
                    self.changed.wait(min(0.25, max(0.0, ends - time.monotonic())))
                now_at = self.version
            for version, kind, key, thing in news:
                at = max(at, version)
                chosen = self.chosen(key, thing, group, plural, namespace, params)
                if chosen:
                    shown.add(key)
                    yield {"type": kind, "object": thing}
                elif key in shown and key[:2] == (group, plural):
                    shown.discard(key)
                    yield {"type": "DELETED", "object": thing}
            if params.get("allowWatchBookmarks") and time.monotonic() >= bookmark_at:
                bookmark_at = time.monotonic() + BOOKMARK_EVERY_S
                at = max(at, now_at) if not news else at
                yield {"type": "BOOKMARK", "object": {"kind": plural, "metadata": {"resourceVersion": str(at)}}}

    # --- who may do what ----------------------------------------------------------------------------------------------

    def allows(self, spec: Mapping[str, Any]) -> bool:
        """RBAC: a role that allows it, bound to this user or one of its groups. An admin of the test's may all."""
        who, asked = {("User", spec.get("user", "")), *(("Group", one) for one in spec.get("groups") or ())}, \
            spec.get("resourceAttributes") or {}
        if ("Group", "system:masters") in who:
            return True
        for (group, plural, namespace, _), binding in self.things.items():
            if group != "rbac.authorization.k8s.io" or plural not in ("rolebindings", "clusterrolebindings"):
                continue
            if plural == "rolebindings" and namespace != asked.get("namespace"):
                continue
            if not any(_subject(one, namespace) in who for one in binding.get("subjects") or ()):
                continue
            ref = binding["roleRef"]
            wide = ref["kind"] == "ClusterRole"
            role = self.things.get((group, "clusterroles" if wide else "roles", "" if wide else namespace, ref["name"]))
            if role and any(_rule_allows(rule, asked) for rule in role.get("rules") or ()):
                return True
        return False


def _subject(one: Mapping[str, Any], namespace: str) -> tuple[str, str]:
    if one["kind"] == "ServiceAccount":
        return "User", f"system:serviceaccount:{one.get('namespace') or namespace}:{one['name']}"
    return str(one["kind"]), str(one["name"])


def _rule_allows(rule: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    resource = asked.get("resource", "") + (f"/{asked['subresource']}" if asked.get("subresource") else "")

    def has(name: str, value: str) -> bool:
        return bool({"*", value}.intersection(rule.get(name) or ()))

    named = not rule.get("resourceNames") or asked.get("name") in rule["resourceNames"]
    return has("verbs", asked.get("verb", "")) and has("apiGroups", asked.get("group", "")) \
        and has("resources", resource) and named


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def _match(budget: Object) -> str:
    labels = ((budget.get("spec") or {}).get("selector") or {}).get("matchLabels") or {}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _options(body: Any) -> dict[str, Any]:
    """DeleteOptions of a body, as query parameters would give them."""
    options = body if isinstance(body, dict) else {}
    found = {key: options[key] for key in ("gracePeriodSeconds",) if options.get(key) is not None}
    return found | {k: v for k, v in (options.get("preconditions") or {}).items() if v}


def too_large(wanted: str, version: int) -> No:
    """A resourceVersion of the future."""
    told = f"Too large resource version: {wanted}, current: {version}"
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    return No(504, "Timeout", told, {"causes": [cause], "retryAfterSeconds": 1})


def route(path: str) -> tuple[str, str, str, str, str]:
    """group, plural, namespace, name, subresource of a path. Raises No."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    group = "" if parts[:1] == ["api"] else parts[1] if parts[:1] == ["apis"] and len(parts) > 2 else "?"
    rest = parts[2:] if group == "" else parts[3:]
    version = parts[1] if group == "" and len(parts) > 1 else parts[2] if len(parts) > 2 else ""
    if SERVED.get(group) != version or not rest:
        raise No(404, "NotFound", "the server could not find the requested resource")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in SUBRESOURCES:
        namespace, rest = rest[1], rest[2:]
    plural, name, sub = (*rest, "", "")[:3]
    return group, plural, namespace, name, sub


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle is no fault here."""


class _Handler(BaseHTTPRequestHandler):
    api: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        params = dict(parse_qsl(parts.query))
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else None
            self.api.asked.append((self.command, parts.path, params, body))
            for fault in list(self.api.faults):
                fault(self.command, parts.path)
            if params.get("watch") == "true" and self.command == "GET":
                self._stream(self.api.watch(parts.path, params))
                return
            form = self.headers.get("Content-Type") or ""
            told = self.api.act(self.command, parts.path, params, body, form)
            code = 201 if self.command == "POST" else 200
        except No as no:
            code, told = no.code, no.status
        answer = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _stream(self, events: Iterator[Object]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for event in events:
                self.wfile.write(json.dumps(event).encode() + b"\n")
        except OSError:
            return  # nobody listens any more
