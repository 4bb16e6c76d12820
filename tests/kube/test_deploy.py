"""deploy/kubernetes: what each container may do on its node, what each account may do at the API, and no more."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube.codecs import from_dict

from agent.config import load_config
from agent.sources.pod_resources import SOCKET
from agent.sources.workloads import KINDS
from drills.cluster import path_of
from drills.lease import NAME
from tests.drills.stand_ins import wait_for
from tests.kube.conftest import REAL
from tests.kube.kustomize import Object, add, build
from tests.kube.scene import Api
from tests.needs import find, need

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
BASE, DISCOVERY, DRILLS = (DEPLOY / name for name in ("base", "overlays/discovery", "overlays/drills"))
CLUSTER_RULES = DEPLOY / "overlays/cluster-rules"
GPU_RESET, POD_NAMESPACES = (DEPLOY / "components" / name for name in ("gpu-reset", "pod-namespaces"))
EVENTS, NODE_CONDITION = (DEPLOY / "components" / name for name in ("events", "node-condition"))
POD_RESOURCES, NODE_PROCESSES = (DEPLOY / "components" / name for name in ("pod-resources", "node-processes"))
FINDING, AGENT_ACCOUNT = (DEPLOY / "components" / name for name in ("discovery", "agent-account"))
RIGHTS = yaml.safe_load((Path(__file__).parent / "rights.yaml").read_text())
RBAC = "rbac.authorization.k8s.io"
PLURALS = {
    "Namespace": ("", "namespaces"), "ServiceAccount": ("", "serviceaccounts"), "ConfigMap": ("", "configmaps"),
    "Secret": ("", "secrets"),
    "DaemonSet": ("apps", "daemonsets"), "Deployment": ("apps", "deployments"),
    "Role": (RBAC, "roles"), "RoleBinding": (RBAC, "rolebindings"),
    "ClusterRole": (RBAC, "clusterroles"), "ClusterRoleBinding": (RBAC, "clusterrolebindings"),
}  # fmt: skip
OVERLAYS = {
    "base": build(BASE), "discovery": build(DISCOVERY), "drills": build(DRILLS),
    "gpu-reset": add(build(DRILLS), GPU_RESET), "told": add(add(build(BASE), EVENTS), NODE_CONDITION),
}  # fmt: skip
SEEING = add(add(build(BASE), NODE_PROCESSES), POD_RESOURCES)
BESIDE = add(add(add(build(DRILLS), FINDING), EVENTS), AGENT_ACCOUNT)
ALL = {**OVERLAYS, "cluster-rules": build(CLUSTER_RULES), "seeing": SEEING, "beside": BESIDE}
# Which account of an overlay needs which rights of rights.yaml.
ACCOUNTS = {
    "base": {"tocsin": ["base"]}, "discovery": {"tocsin": ["discovery"]}, "seeing": {"tocsin": ["seeing"]},
    "told": {"tocsin": ["events", "node-condition"]}, "drills": {"tocsin-drills": ["drills"]},
    "gpu-reset": {"tocsin-drills": ["drills", "gpu-reset"]}, "cluster-rules": {"tocsin-cluster": ["cluster-rules"]},
    "beside": {"tocsin-drills": ["drills"], "tocsin": ["discovery", "events"]},
}  # fmt: skip
MIXED = {
    "gpu-reset": (DRILLS, GPU_RESET, POD_NAMESPACES), "told": (BASE, EVENTS, NODE_CONDITION),
    "seeing": (DISCOVERY, NODE_PROCESSES, POD_RESOURCES), "beside": (DRILLS, FINDING, EVENTS, AGENT_ACCOUNT),
}  # fmt: skip


def the(objects: list[Object], kind: str, name: str = "tocsin") -> Object:
    """The one of a kind and name."""
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(objects: list[Object]) -> dict[str, Any]:
    """The pod that the DaemonSet makes."""
    spec: dict[str, Any] = the(objects, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def container(objects: list[Object], name: str) -> dict[str, Any]:
    """One of its containers."""
    (found,) = [one for one in pod_of(objects)["containers"] if one["name"] == name]
    return dict(found)


def yamls() -> list[Path]:
    """Every file of deploy/kubernetes."""
    return sorted(DEPLOY.rglob("*.yaml"))


@pytest.mark.parametrize("path", yamls(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_file_is_used_and_loads(path: Path) -> None:
    """A patch lay there for a year, and no kustomization named it."""
    assert [one for one in yaml.safe_load_all(path.read_text()) if one]
    if path.name != "kustomization.yaml":
        assert path.name in (path.parent / "kustomization.yaml").read_text()


# ---- the pod ----


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_agent_has_no_privilege_in_any_overlay(overlay: str) -> None:
    """Drills were wanted, and the agent beside them, which listens on the network, ran as root from then on."""
    objects = OVERLAYS[overlay]
    pod, agent = pod_of(objects), container(objects, "tocsin")
    assert agent["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    user = pod["securityContext"]
    assert (user["runAsNonRoot"], user["runAsUser"]) == (True, 10001)
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert agent["resources"]["requests"] == {"cpu": "50m", "memory": "64Mi"}
    assert agent["resources"]["limits"] == {"cpu": "250m", "memory": "128Mi"}
    assert agent["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    assert agent["ports"] == [{"name": "metrics", "containerPort": 9959}]
    assert {one["name"]: one for one in agent["env"]}["NODE_NAME"]["valueFrom"] == {
        "fieldRef": {"fieldPath": "spec.nodeName"}}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert not any(pod.get(name) for name in ("hostNetwork", "hostIPC"))
    mounted = {one["name"] for one in agent["volumeMounts"]}
    assert mounted == {"config", "state", "run"}
    assert not [one for one in pod["volumes"] if one["name"] in mounted and "hostPath" in one]


def test_the_base_has_no_access_to_the_api_and_nothing_of_the_host() -> None:
    """A monitor on each node with a token is a token on each node."""
    objects = OVERLAYS["base"]
    pod = pod_of(objects)
    assert pod["automountServiceAccountToken"] is False
    assert the(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert not [one["kind"] for one in objects if "Role" in one["kind"]]
    assert not [one for one in pod["volumes"] if "hostPath" in one or "projected" in one]
    assert not pod.get("hostPID")
    # So that the strictest of the Pod Security Standards is enforced for it.
    assert the(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_drilld_has_root_s_number_and_no_capability() -> None:
    """pod-kill needs the API alone. The token is drilld's: the agent in the same pod has none."""
    objects = OVERLAYS["drills"]
    pod, drilld = pod_of(objects), container(objects, "drilld")
    assert drilld["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert drilld["securityContext"]["readOnlyRootFilesystem"] is True
    assert drilld["securityContext"]["allowPrivilegeEscalation"] is False
    assert drilld["command"][-1] == "drills.supervisor"
    assert not pod.get("hostPID")
    assert pod["automountServiceAccountToken"] is False
    assert [one["name"] for one in pod["volumes"] if "hostPath" in one] == ["ledgers"]
    assert {one["name"] for one in pod["volumes"] if "projected" in one} == {"api"}
    assert "api" in {one["name"] for one in drilld["volumeMounts"]}
    config = yaml.safe_load(the(objects, "ConfigMap", "tocsin-config")["data"]["tocsin.yaml"])
    (ledgers,) = [one["mountPath"] for one in drilld["volumeMounts"] if one["name"] == "ledgers"]
    assert ledgers == f"{config.get('state_dir', '/var/lib/tocsin')}/drills"


@pytest.mark.parametrize("components", [(FINDING, EVENTS, AGENT_ACCOUNT), (AGENT_ACCOUNT, EVENTS, FINDING)])
def test_the_agent_beside_drilld_has_an_account_of_its_own(components: tuple[Path, ...]) -> None:
    """With drills a node no longer found its engines; with a token for it the agent could have deleted their pods."""
    objects = build(DRILLS)
    for component in components:
        objects = add(objects, component)
    pod, at = pod_of(objects), "/var/run/secrets/kubernetes.io/serviceaccount"
    volumes = {one["name"]: one for one in pod["volumes"]}
    # Where something is mounted there already, the pod's own account is not, whatever automount says.
    held = {name: [volumes[one["name"]] for one in container(objects, name)["volumeMounts"] if one["mountPath"] == at]
            for name in ("tocsin", "drilld")}
    assert held["tocsin"] == [{"name": "account", "secret": {"secretName": "tocsin-agent-token"}}]
    assert [one["name"] for one in held["drilld"]] == ["api"]
    secret = the(objects, "Secret", "tocsin-agent-token")
    assert secret["type"] == "kubernetes.io/service-account-token"
    assert secret["metadata"]["annotations"] == {"kubernetes.io/service-account.name": "tocsin"}
    the(objects, "ServiceAccount")  # without it the token controller deletes the Secret
    agent = container(objects, "tocsin")
    agent["volumeMounts"] = [one for one in agent["volumeMounts"] if one["name"] != "account"]
    assert agent == container(OVERLAYS["base"], "tocsin")


def test_capabilities_come_with_the_faults_that_need_them() -> None:
    """Every drill had what any drill needs."""
    network = add(build(DRILLS), POD_NAMESPACES)
    reset = OVERLAYS["gpu-reset"]
    both = add(reset, POD_NAMESPACES)
    needed = {
        "network": ["DAC_READ_SEARCH", "KILL", "NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"],
        "reset": ["DAC_READ_SEARCH", "SYS_ADMIN", "SYS_PTRACE"],
    }
    for name, objects in (("network", network), ("reset", reset), ("network", both)):
        assert container(objects, "drilld")["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": needed[name]}
        assert pod_of(objects)["hostPID"] is True
        assert container(objects, "tocsin") == container(OVERLAYS["drills"], "tocsin")
    assert container(network, "drilld")["image"] == "tocsin-drilld:0.1.0"


def test_the_shipped_configuration_is_one(tmp_path: Path) -> None:
    """The ConfigMap had a key that no version knew, and the DaemonSet never came up."""
    config = load_config(BASE / "tocsin.yaml", {"NODE_NAME": "gpu-17"})
    assert (config.listen, config.node) == ("0.0.0.0:9959", "gpu-17")


def test_what_it_takes_to_see_pods_without_the_api() -> None:
    """The kubelet's socket: root's number, its folder and nothing else; processes: hostPID and nothing else."""
    base, processes = container(OVERLAYS["base"], "tocsin"), add(build(BASE), NODE_PROCESSES)
    assert container(processes, "tocsin") == base
    assert pod_of(processes) == {**pod_of(OVERLAYS["base"]), "hostPID": True}
    agent = container(SEEING, "tocsin")
    assert agent["securityContext"] == {
        **base["securityContext"], "runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 10001}  # fmt: skip
    (volume,) = [one for one in pod_of(SEEING)["volumes"] if "hostPath" in one]
    (mount,) = [one for one in agent["volumeMounts"] if one["name"] == volume["name"]]
    assert volume["hostPath"]["path"] == mount["mountPath"] == str(SOCKET.parent)
    assert mount["readOnly"] is True
    assert pod_of(SEEING)["automountServiceAccountToken"] is False
    assert the(SEEING, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_one_agent_of_the_cluster(tmp_path: Path) -> None:
    """As little as the others have on a node, and one of it; what it is configured for is what its account may."""
    objects = ALL["cluster-rules"]
    deployment = the(objects, "Deployment", "tocsin-cluster")["spec"]
    pod = deployment["template"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert the(objects, "Namespace", "tocsin-cluster")["metadata"]["labels"][
        "pod-security.kubernetes.io/enforce"] == "restricted"
    (agent,) = pod["containers"]
    assert agent["securityContext"] == container(OVERLAYS["base"], "tocsin")["securityContext"]
    assert pod["securityContext"] == pod_of(OVERLAYS["base"])["securityContext"]
    assert not [one for one in pod["volumes"] if "hostPath" in one]
    config = load_config(CLUSTER_RULES / "tocsin.yaml", {})
    assert (config.cluster_rules, config.discover, config.nvml, config.kernel_log) == (True, False, "off", "off")
    (role,) = [one for one in objects if one["kind"] == "ClusterRole"]
    assert {name for rule in role["rules"] for name in rule["resources"]} == set(KINDS)


def as_known(one: Object) -> Any:
    """An object with the fields that Kubernetes' own definitions have."""
    known: Any = from_dict(one)
    return known.to_dict()


@pytest.mark.parametrize("overlay", ALL)
def test_every_field_is_one_of_kubernetes(overlay: str) -> None:
    """`readOnlyRootFileSystem: true`: kubectl took it, the API dropped it, and the root could be written."""
    assert [one for one in ALL[overlay] if as_known(one) != one] == []


def test_a_misspelt_field_is_seen() -> None:
    """That what is said above is said by something that can see it."""
    daemonset = copy.deepcopy(the(add(build(DRILLS), POD_NAMESPACES), "DaemonSet"))
    assert as_known(daemonset) == daemonset
    daemonset["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    assert as_known(daemonset) != daemonset


# ---- the image ----


def test_the_image_is_built_from_what_is_written_down() -> None:
    """The same commit made two images: a library had a new version in between."""
    docker = (ROOT / "deploy/Dockerfile").read_text()
    installs = re.findall(r"^.*\bpip.* install .*(?:\n .*)*?$", docker, flags=re.MULTILINE)
    assert installs
    assert all("--require-hashes" in one or "--no-deps /wheels" in one for one in installs)
    assert len(re.findall(r"^FROM ", docker, flags=re.MULTILINE)) == 3
    assert re.findall(r"^USER (.*)$", docker, flags=re.MULTILINE) == ["10001:10001"] * 2
    locked = (ROOT / "deploy/requirements.txt").read_text()
    project = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]")[0]
    wanted = {name.lower() for name in re.findall(r'^ +"([A-Za-z0-9_.-]+)', project, flags=re.MULTILINE)}
    assert wanted - set(re.findall(r"^([a-z0-9.-]+)==", locked, flags=re.MULTILINE)) == set(), "its head says how"
    assert all(line.endswith("\\") for line in locked.splitlines() if "==" in line and not line.startswith((" ", "#")))
    allowed = (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", docker, flags=re.MULTILINE):
        assert all(f"!{one}" in allowed for one in source.split()), source


# ---- the API ----


class Applied:
    """An overlay in the API, under the test's namespace and its own names, so that it can be taken away again."""

    def __init__(self, api: Api, objects: list[Object]) -> None:
        self.api = api
        self.wide: list[tuple[str, str]] = []
        self.other = api.make_namespace(f"{api.namespace}-other", opted_in=False)
        self.places = {"tocsin": api.namespace, "tocsin-cluster": api.namespace, "llm": f"{api.namespace}-llm",
                       "other": self.other}
        api.make_namespace(self.places["llm"])
        for name in ("default", "kube-system"):
            if api.cluster.get(path_of("", "v1", "namespaces", None, name)) is None:
                api.make_namespace(name, opted_in=False)  # every real server has them
        self.made: list[tuple[str, str, str, str]] = []
        for one in objects:
            if "Role" in one["kind"]:
                self.post(one)
        if any(one["metadata"]["name"] == "tocsin-drill-target" for one in objects):
            self.post({"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding",
                       "metadata": {"name": "tocsin-drills", "namespace": "llm"},
                       "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "tocsin-drill-target"},
                       "subjects": [{"kind": "ServiceAccount", "name": "tocsin-drills", "namespace": "tocsin"}]})

    def post(self, one: Object) -> None:
        """An object, moved into the test's own names."""
        moved = copy.deepcopy(one)
        group, plural = PLURALS[moved["kind"]]
        meta = moved["metadata"]
        meta["name"] = f"{self.api.namespace}-{meta['name']}"
        if "roleRef" in moved:
            moved["roleRef"]["name"] = f"{self.api.namespace}-{moved['roleRef']['name']}"
        for subject in moved.get("subjects", ()):
            subject["namespace"] = self.places[subject["namespace"]]
        namespace = None
        if meta.get("namespace"):
            namespace = meta["namespace"] = self.places.get(meta["namespace"], meta["namespace"])
        self.api.cluster.ask("POST", path_of(group, "v1", plural, namespace), body=moved)
        self.made.append((group, plural, namespace or "", meta["name"]))

    def may(self, account: str, verb: str, resource: str, group: str, namespace: str, name: str = "") -> bool:
        """Whether the account may."""
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{self.api.namespace}", "system:authenticated")
        return self.api.cluster.may(
            f"system:serviceaccount:{self.api.namespace}:{account}", verb, resource, group=group, groups=groups,
            namespace=self.places.get(namespace, namespace) or None, name=self.places.get(name, name),
        )

    def clear(self) -> None:
        """Take it away."""
        for group, plural, namespace, name in self.made:
            self.api.cluster.ask("DELETE", path_of(group, "v1", plural, namespace or None, name))


@pytest.fixture(params=ALL)
def applied(request: pytest.FixtureRequest, api: Api) -> Iterator[tuple[str, Applied]]:
    """One overlay after the other."""
    made = Applied(api, ALL[request.param])
    yield request.param, made
    made.clear()


def test_each_account_may_do_what_it_needs_and_nothing_more(applied: tuple[str, Applied]) -> None:
    """A drill was refused for want of a verb; another account could have read every secret."""
    overlay, at = applied
    everything = [row for rows in RIGHTS["may"].values() for row in rows]
    assert len(RIGHTS["may_not"]) >= 30
    for account in {account for accounts in ACCOUNTS.values() for account in accounts}:
        kinds = ACCOUNTS[overlay].get(account, [])
        needs = [row for kind in kinds for row in RIGHTS["may"][kind]]
        with suppress(AssertionError):  # a real server's authorizer hears of a new role a moment later
            wait_for(partial(all_may, at, account, needs))
        assert [row for row in needs if not at.may(account, *row)] == []
        assert [row for row in RIGHTS["may_not"] if at.may(account, *row)] == []
        beyond = [row for row in everything if row not in needs and at.may(account, *row)]
        assert not [row for row in beyond if "discovery" not in kinds or row[1] != "pods"], (account, beyond)


def all_may(at: Applied, account: str, rows: list[list[str]]) -> bool:
    """Whether an account may do all of it."""
    return all(at.may(account, *row) for row in rows)


def test_the_lease_is_the_one_that_drilld_writes() -> None:
    """The role named a Lease that nobody wrote, and the fleet's lock could not be had."""
    rules = [rule for one in OVERLAYS["drills"] if one["kind"] == "Role" for rule in one["rules"]]
    assert {name for rule in rules for name in rule.get("resourceNames", ())} == {NAME}


@pytest.mark.parametrize("overlay", ALL)
def test_the_api_takes_every_object(api: Api, overlay: str) -> None:
    """A misspelt key was dropped without a word. A real server checks each field; the stand-in, that it has a place."""
    for one in ALL[overlay]:
        group, plural = PLURALS[one["kind"]]
        assert one["apiVersion"] == (f"{group}/v1" if group else "v1")
        if api.stand_in is None:
            moved = copy.deepcopy(one)
            meta = moved["metadata"]
            meta["name"] = f"{api.namespace}-{meta['name']}"  # Tocsin may be installed there
            namespace = meta.get("namespace")
            if namespace in ("tocsin", "tocsin-cluster"):
                namespace = meta["namespace"] = api.namespace
            path = path_of(group, "v1", plural, namespace)
            api.cluster.ask("POST", path, {"dryRun": "All", "fieldValidation": "Strict"}, moved)


if REAL:  # with the stand-in there is nothing that kubectl could ask

    @pytest.mark.parametrize("overlay", [BASE, DISCOVERY, DRILLS, CLUSTER_RULES], ids=lambda folder: folder.name)
    def test_kubectl_applies_it(api: Api, overlay: Path) -> None:
        """As a person does it."""
        kubectl_takes(api, overlay, "cluster-rules" if overlay == CLUSTER_RULES else "base")

    @pytest.mark.parametrize("mixed", MIXED)
    def test_kubectl_applies_an_overlay_of_ones_own(api: Api, mixed: str, tmp_path: Path) -> None:
        """With components, as docs/kubernetes.md says: kubectl asks for relative paths."""
        first, *components = [os.path.relpath(folder, tmp_path.resolve()) for folder in MIXED[mixed]]
        (tmp_path / "kustomization.yaml").write_text(json.dumps({"resources": [first], "components": components}))
        kubectl_takes(api, tmp_path, "base")


def kubectl_takes(api: Api, folder: Path, of: str) -> None:
    """`kubectl apply -k … --dry-run=server`; the namespace must be there before."""
    need("kubectl")
    name = "tocsin-cluster" if of == "cluster-rules" else "tocsin"
    made = not api.has_namespace(name)
    if made:
        api.cluster.ask("POST", path_of("", "v1", "namespaces"), body=the(ALL[of], "Namespace", name))
    try:
        command = [find("kubectl") or "", "--kubeconfig", REAL, "apply", "-k", str(folder), "--dry-run=server"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
    finally:
        if made:
            api.drop_namespace(name)
