"""The Kubernetes API, as far as Tocsin needs it: the one module that speaks to it, through lightkube. Knows no drill.

lightkube (configuration, TLS, tokens that are rotated) is loaded when a Cluster is made, never before. Objects are
plain JSON as the API gives them: what a model of another version does not know is not lost when it is written back.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]

ANSWER_S = 30.0  # an eviction of a Pending pod takes 10 s
CONNECT_S = 5.0
WATCH_S = 20.0  # then the server ends a watch, and it is asked for anew; a dead connection is seen soon after
AGAIN_S = 1.0  # after a watch that failed
PAGE = 500  # objects a list answer
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
OPT_IN = "tocsin.dev/drills"  # label "true" of a namespace or a node: drills may run there
CORDONED = "tocsin.dev/cordoned-by"  # annotation of a node: the run
SOURCE = "tocsin"
# What the node controller itself puts on a node and takes off again.
_CONTROLLERS_TAINTS = "node.kubernetes.io/"
MERGE = {"Content-Type": "application/merge-patch+json"}
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}


class ClusterError(Exception):
    """The API said no (`code`: its HTTP status), or nothing at all (0)."""

    def __init__(self, message: str, code: int = 0, status: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code, self.status = code, status or {}


@dataclass(frozen=True, slots=True)
class Denied:
    """Why an eviction was not done. `retry_after_s`: before it may be asked for again; never 0."""

    kind: str  # blocked_by_pdb, throttled, processing, misconfigured, other
    why: str
    retry_after_s: float | None = None  # None: not at all


BLOCKED_AGAIN_S = 5.0  # a budget that allows nothing names no time


def denied(code: int, status: Mapping[str, Any]) -> Denied:
    """What the API means by its no to an eviction: 429 says three different things. Pure."""
    details = status.get("details") or {}
    causes = [cause for cause in details.get("causes") or () if cause.get("reason") == "DisruptionBudget"]
    said = str(status.get("message") or f"HTTP {code}")
    told = "; ".join(str(cause.get("message", "")) for cause in causes) or said
    after_s = _seconds(details.get("retryAfterSeconds"))
    if code == HTTPStatus.TOO_MANY_REQUESTS and (causes or "disruption budget" in said.lower()):  # older ones: no cause
        if after_s > 0:
            return Denied("processing", told, after_s)
        return Denied("blocked_by_pdb", told, BLOCKED_AGAIN_S)
    if code == HTTPStatus.TOO_MANY_REQUESTS:
        return Denied("throttled", told, max(after_s, 1.0))
    if code == HTTPStatus.INTERNAL_SERVER_ERROR and "PodDisruptionBudget" in said:  # else the server itself has failed
        return Denied("misconfigured", told)
    return Denied("other", told)


def _seconds(value: object) -> float:
    """Of a number, or of a header that is one; 0 for anything else."""
    return float(str(value)) if re.fullmatch(r"[0-9]{1,6}", str(value)) else 0.0


def configured() -> bool:
    """Whether this process runs in a cluster, or was given one by KUBECONFIG."""
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and (ACCOUNT / "token").exists()
    return in_cluster or bool(os.environ.get("KUBECONFIG"))


class Cluster:
    """A connection to the API; threads may share it. Every method raises ClusterError."""

    def __init__(self, *, answer_s: float = ANSWER_S) -> None:
        if not configured():
            raise ClusterError("no Kubernetes here: run it in a pod with a ServiceAccount, or set KUBECONFIG")
        try:
            import httpx2
            from lightkube.config.client_adapter import ConnectionParams
            from lightkube.config.kubeconfig import KubeConfig
            from lightkube.core.generic_client import BasicRequest, GenericSyncClient

            timeout = httpx2.Timeout(answer_s, connect=CONNECT_S)
            config = KubeConfig.from_env()
            self._client = GenericSyncClient(ConnectionParams(timeout=timeout), config)
            self._request, self._silent, self._timeout = BasicRequest, httpx2.HTTPError, httpx2.Timeout
        except Exception as error:  # of a library, about a file: whatever it is, there is no cluster
            raise ClusterError(f"the Kubernetes configuration cannot be used: {error}") from error
        self.namespace: str = str(self._client.namespace)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- any object ---------------------------------------------------------------------------------------------------

    def _send(self, method: str, path: str, params: Mapping[str, str] | None, body: Any,
              headers: Mapping[str, str] | None, answer_s: float | None, stream: bool = False) -> Any:
        timeout = None if answer_s is None else self._timeout(answer_s, connect=min(answer_s, CONNECT_S))
        asked = self._request(method, path, params=dict(params or {}), data=body, timeout=timeout,
                              headers=None if headers is None else dict(headers))
        try:
            answer = self._client.send(self._client.build_adapter_request(asked), stream=stream)
            if answer.status_code >= HTTPStatus.BAD_REQUEST:
                with_body = answer.read()
                answer.close()
                raise _error(answer.status_code, with_body, answer.headers.get("Retry-After"))
        except self._silent as error:
            raise ClusterError(f"the Kubernetes API gives no answer: {type(error).__name__}: {error}") from error
        return answer

    def ask(self, method: str, path: str, params: Mapping[str, str] | None = None, body: Any = None, *,
            headers: Mapping[str, str] | None = None, answer_s: float | None = None) -> Object:
        """One request; `path` as from `path_of`. The answer's JSON."""
        answer = self._send(method, path, params, body, headers, answer_s)
        try:
            told = answer.json()
        except ValueError:
            raise ClusterError(f"{method} {path}: the answer is no JSON", answer.status_code) from None
        return told if isinstance(told, dict) else {}

    def get(self, path: str, *, answer_s: float | None = None) -> Object | None:
        """An object; None where there is none."""
        try:
            return self.ask("GET", path, answer_s=answer_s)
        except ClusterError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    def all(self, path: str, *, labels: str = "", fields: str = "") -> tuple[list[Object], str]:
        """All objects that both selectors choose, and the resourceVersion from which a watch goes on."""
        found: list[Object] = []
        params = {"limit": str(PAGE), **_selectors(labels, fields)}
        while True:
            try:
                told = self.ask("GET", path, params)
            except ClusterError as error:
                if error.code != HTTPStatus.GONE or "continue" not in params:
                    raise
                # What the first pages told was compacted away meanwhile: once more, and all of it at once.
                found, params = [], _selectors(labels, fields)
                continue
            found += told.get("items") or ()
            meta = told.get("metadata") or {}
            if not meta.get("continue"):
                return found, str(meta.get("resourceVersion", ""))
            params["continue"] = str(meta["continue"])

    def watch(self, path: str, since: str, *, labels: str = "", fields: str = "",
              for_s: float = WATCH_S) -> Iterator[tuple[str, Object]]:
        """What happens to these objects after `since`, for a while. Code 410 and 504: list anew."""
        params = {"watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true",
                  "timeoutSeconds": str(max(1, int(for_s))), **_selectors(labels, fields)}
        answer = self._send("GET", path, params, None, None, for_s + CONNECT_S, stream=True)
        try:
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(int(event["object"].get("code") or 0), json.dumps(event["object"]).encode())
                yield str(event["type"]), event["object"]
        except self._silent as error:
            raise ClusterError(f"the watch broke off: {type(error).__name__}: {error}") from error
        except (ValueError, LookupError, TypeError) as error:  # cut in the middle of a line
            raise ClusterError(f"the watch tells nonsense: {error}") from error
        finally:
            answer.close()

    def follow(self, path: str, stop: threading.Event, *, labels: str = "", fields: str = "",
               again_s: float = AGAIN_S, for_s: float = WATCH_S, keep: Callable[[Object], Object] = dict,
               failed: Callable[[ClusterError], None] | None = None) -> Iterator[Mapping[str, Object]]:
        """These objects by uid, each time that one of them changed, until stopped, which takes `for_s` at most.

        Raises nothing: it tries again, and says each failure to `failed`. `keep`: what to keep of an object in memory.
        """
        while not stop.is_set():
            try:
                items, since = self.all(path, labels=labels, fields=fields)
                seen = {uid_of(item): keep(item) for item in items}
                del items
                yield seen
                while not stop.is_set():
                    begun, from_here = time.monotonic(), since
                    for kind, thing in self.watch(path, since, labels=labels, fields=fields, for_s=for_s):
                        since = str(thing["metadata"]["resourceVersion"])
                        if kind != "BOOKMARK":
                            seen = {uid: one for uid, one in seen.items() if uid != uid_of(thing)}
                            seen |= {} if kind == "DELETED" else {uid_of(thing): keep(thing)}
                            yield seen
                        if stop.is_set():
                            return
                    if since == from_here and time.monotonic() - begun < min(again_s, for_s / 2):
                        # Some servers say nothing instead of 410, at once: it would be asked again and again.
                        stop.wait(again_s)
                        break
            except ClusterError as error:  # 410: compacted; 504: too new; 0: the connection. The list tells all.
                if failed is not None:
                    failed(error)
                stop.wait(again_s)

    # --- pods ---------------------------------------------------------------------------------------------------------

    def pod(self, namespace: str, name: str, *, answer_s: float | None = None) -> Object | None:
        """A pod; None where there is none."""
        return self.get(pods_path(namespace, name), answer_s=answer_s)

    def pods(self, namespace: str | None, *, labels: str = "", fields: str = "") -> list[Object]:
        """The pods of a namespace, or of all."""
        return self.all(pods_path(namespace), labels=labels, fields=fields)[0]

    def delete_pod(self, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> Object:
        """Delete a pod, with its normal grace, if it still is the one with this uid (else code 409). As it is now."""
        params = {"uid": uid} | ({} if grace_s is None else {"gracePeriodSeconds": str(grace_s)})
        return self.ask("DELETE", pods_path(namespace, name), params)

    def evict_pod(self, namespace: str, name: str, uid: str) -> None:
        """Evict a pod, if it still is the one with this uid. `denied` tells what a no means."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace},
                    "deleteOptions": {"preconditions": {"uid": uid}}}
        self.ask("POST", f"{pods_path(namespace, name)}/eviction", body=eviction)

    def opted_in(self, namespace: str) -> bool:
        """Whether a namespace's owner lets drills run in it."""
        found = self.get(path_of("", "v1", "namespaces", None, namespace))
        return found is not None and labels_of(found).get(OPT_IN) == "true"

    # --- leases -------------------------------------------------------------------------------------------------------

    def lease(self, namespace: str, name: str) -> Object | None:
        """A Lease; None where there is none."""
        return self.get(_lease_path(namespace, name))

    def create_lease(self, lease: Object) -> Object:
        """Make a Lease; code 409 where there is one. As it is now."""
        return self.ask("POST", _lease_path(lease["metadata"]["namespace"]), body=lease)

    def put_lease(self, lease: Object) -> Object:
        """Write a Lease as it was read, changed; code 409 where somebody wrote it meanwhile. As it is now.

        Always a PUT with the resourceVersion read: a PATCH without one takes another's lock silently.
        """
        meta = lease["metadata"]
        if not meta.get("resourceVersion"):
            raise ClusterError("a Lease is written only with the resourceVersion that was read")
        return self.ask("PUT", _lease_path(meta["namespace"], meta["name"]), body=lease)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def node(self, name: str) -> Object | None:
        """A node; None where there is none."""
        return self.get(path_of("", "v1", "nodes", None, name))

    def nodes(self, *, labels: str = "") -> list[Object]:
        """The nodes."""
        return self.all(path_of("", "v1", "nodes"), labels=labels)[0]

    def cordon(self, name: str, run: str) -> Mapping[str, Any]:
        """Let nothing new come to a node, and say on it who did; what `uncordon` needs, for the ledger.

        One that is cordoned already is somebody else's: it is left alone, now and later.
        """
        while True:
            node = self.node(name)
            if node is None:
                raise ClusterError(f"there is no node {name}", HTTPStatus.NOT_FOUND)
            facts = {"node": name, "uid": uid_of(node), "run": run, "was_schedulable": is_schedulable(node),
                     "taints": own_taints(node)}
            if not facts["was_schedulable"]:
                return facts
            change = {"metadata": {"annotations": {CORDONED: run}}, "spec": {"unschedulable": True}}
            if self._patched(node, change):
                return facts

    def uncordon(self, facts: Mapping[str, Any]) -> str:
        """Undo what `cordon` did, if all of it is as it was left; "" for done, else why it was left alone."""
        while True:
            node = self.node(str(facts["node"]))
            why = why_left_cordoned(facts, node)
            if why or node is None or labels_or(node, "annotations").get(CORDONED) != facts["run"]:
                return why
            change = {"metadata": {"annotations": {CORDONED: None}}, "spec": {"unschedulable": None}}
            if self._patched(node, change):
                return ""

    def _patched(self, node: Object, change: Object) -> bool:
        """Change a node, unless somebody else has since it was read: False."""
        meta = {**change["metadata"], "resourceVersion": node["metadata"]["resourceVersion"]}
        try:
            self.ask("PATCH", path_of("", "v1", "nodes", None, node["metadata"]["name"]), {"fieldManager": SOURCE},
                     {**change, "metadata": meta}, headers=MERGE)
        except ClusterError as error:
            if error.code == HTTPStatus.CONFLICT:
                return False
            raise
        return True

    # --- what others see ----------------------------------------------------------------------------------------------

    def event(self, about: Mapping[str, Any], reason: str, message: str, *, now: float, warning: bool = False) -> None:
        """A Kubernetes Event. `about`: {"kind", "name", "uid", and "namespace" where it has one}."""
        event = _event(about, reason, message, now, warning)
        event["metadata"]["generateName"] = f"tocsin-{about['name']}."
        self.ask("POST", path_of("", "v1", "events", event["metadata"]["namespace"]), body=event)

    def count_event(self, name: str, about: Mapping[str, Any], reason: str, message: str, *, now: float,
                    warning: bool = False) -> Object:
        """The same under a name of its own: where that Event is there already, it is counted. As it is now."""
        event = _event(about, reason, message, now, warning)
        event["metadata"]["name"] = name
        path = path_of("", "v1", "events", event["metadata"]["namespace"])
        try:
            return self.ask("POST", path, body=event)
        except ClusterError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
        old = self.get(f"{path}/{quote(name, safe='')}") or {}
        change = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"],
                  "message": event["message"]}
        return self.ask("PATCH", f"{path}/{quote(name, safe='')}", body=change, headers=MERGE)

    def put_condition(self, node: str, kind: str, told: Mapping[str, str], *, now: float) -> Object:
        """Write one condition of a node, and touch no other. `told`: status, reason, message. As it is now."""
        found = self.node(node)
        if found is None:
            raise ClusterError(f"there is no node {node}", HTTPStatus.NOT_FOUND)
        conditions = (found.get("status") or {}).get("conditions") or ()
        old: Object = next((one for one in conditions if one.get("type") == kind), {})
        same = old.get("status") == told["status"] and old.get("lastTransitionTime")
        mine = {"type": kind, **told, "lastHeartbeatTime": text_of(now),
                "lastTransitionTime": old["lastTransitionTime"] if same else text_of(now)}
        # Conditions are merged by their type: others' are neither read back nor written.
        self.ask("PATCH", f"{path_of('', 'v1', 'nodes', None, node)}/status", {"fieldManager": SOURCE},
                 {"status": {"conditions": [mine]}}, headers=STRATEGIC)
        return mine

    def events_of(self, namespace: str, uid: str) -> list[Object]:
        """The Events about one object."""
        return self.all(path_of("", "v1", "events", namespace), fields=f"involvedObject.uid={uid}")[0]

    def may(self, user: str, verb: str, resource: str, *, group: str = "", namespace: str | None = None,
            name: str = "", groups: Sequence[str] = ()) -> bool:
        """Whether somebody may do something, as the API's authorizer says. `resource`: "pods", "pods/eviction" …"""
        plural, _, sub = resource.partition("/")
        wanted = {"verb": verb, "group": group, "resource": plural, "subresource": sub, "name": name,
                  "namespace": namespace or ""}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "metadata": {},
                  "spec": {"user": user, "groups": list(groups), "resourceAttributes": wanted}}
        path = path_of("authorization.k8s.io", "v1", "subjectaccessreviews")
        return bool(self.ask("POST", path, body=review)["status"]["allowed"])


# ---- pure ----


def path_of(group: str, version: str, plural: str, namespace: str | None = None, name: str = "") -> str:
    """The path of a kind of objects, or of one of them."""
    parts = ["apis", group, version] if group else ["api", version]
    parts += ["namespaces", quote(namespace, safe="")] if namespace is not None else []
    return "/".join([*parts, plural, *([quote(name, safe="")] if name else ())])


def pods_path(namespace: str | None, name: str = "") -> str:
    """The path of pods, or of one."""
    return path_of("", "v1", "pods", namespace, name)


def _lease_path(namespace: str, name: str = "") -> str:
    return path_of("coordination.k8s.io", "v1", "leases", namespace, name)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _error(code: int, body: bytes, retry_after: str | None = None) -> ClusterError:
    """`retry_after`: of its header; whoever throttles before the API's own code gives no other."""
    try:
        status = json.loads(body)
        message = str(status["message"])
    except (ValueError, LookupError, TypeError):
        status, message = {}, " ".join(body.decode(errors="replace")[:200].split())
    details = status.get("details")
    told = {} if retry_after is None else {"retryAfterSeconds": retry_after}
    status = {**status, "details": {**told, **(details if isinstance(details, dict) else {})}}
    return ClusterError(f"the Kubernetes API says {code}: {message}", code, status)


def uid_of(thing: Mapping[str, Any]) -> str:
    """Which object it is, whatever its name."""
    return str(thing["metadata"]["uid"])


def labels_or(thing: Mapping[str, Any], what: str) -> Mapping[str, str]:
    """Labels or annotations."""
    found: Mapping[str, str] = thing["metadata"].get(what) or {}
    return found


def labels_of(thing: Mapping[str, Any]) -> Mapping[str, str]:
    """Its labels."""
    return labels_or(thing, "labels")


def _event(about: Mapping[str, Any], reason: str, message: str, now: float, warning: bool) -> Object:
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": {"namespace": str(about.get("namespace") or "default")},
        "involvedObject": {"apiVersion": "v1", **about}, "reason": reason, "message": message[:1024],
        "type": "Warning" if warning else "Normal", "source": {"component": SOURCE}, "count": 1,
        "firstTimestamp": text_of(now), "lastTimestamp": text_of(now),
    }


def has_condition(thing: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition of its status is True."""
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == kind and one.get("status") == "True" for one in conditions)


def is_schedulable(node: Mapping[str, Any]) -> bool:
    """Whether nobody has cordoned a node."""
    return not (node.get("spec") or {}).get("unschedulable")


def own_taints(node: Mapping[str, Any]) -> list[str]:
    """The taints that people put on it."""
    found = (node.get("spec") or {}).get("taints") or ()
    return sorted(f"{one.get('key')}={one.get('value', '')}:{one.get('effect')}" for one in found
                  if not str(one.get("key", "")).startswith(_CONTROLLERS_TAINTS))


def _cordoned_by_others(node: Mapping[str, Any]) -> bool:
    """Whether somebody else wrote its `unschedulable` last, as the API notes it."""
    managers = {one.get("manager") for one in node["metadata"].get("managedFields") or ()
                if "f:unschedulable" in ((one.get("fieldsV1") or {}).get("f:spec") or {})}
    return bool(managers) and SOURCE not in managers


def why_left_cordoned(facts: Mapping[str, Any], node: Mapping[str, Any] | None) -> str:
    """Why a node is not ours to uncordon; "" where it is, or where nothing of ours is on it. Pure."""
    if not facts["was_schedulable"]:
        return f"node {facts['node']} was cordoned before the drill: it is left so"
    if node is None or uid_of(node) != facts["uid"]:
        return ""  # the one that we cordoned is gone
    by = labels_or(node, "annotations").get(CORDONED)
    if by is None and is_schedulable(node):
        return ""
    if by != facts["run"]:
        return f"node {facts['node']} is cordoned by {by or 'somebody who took our annotation off'}: it is left so"
    if not is_schedulable(node) and (_cordoned_by_others(node) or own_taints(node) != list(facts["taints"])):
        return f"somebody changed node {facts['node']} meanwhile: it is left cordoned; `kubectl uncordon` when you know"
    return ""


def time_of(text: str | None) -> float | None:
    """Unix seconds of a time as the API writes it."""
    return None if not text else datetime.fromisoformat(text).timestamp()


def text_of(at: float, *, micro: bool = False) -> str:
    """A time as the API writes it; with microseconds for Leases."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S" + (".%fZ" if micro else "Z"))
