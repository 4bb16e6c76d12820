"""GPUs as a drill sees them: who holds one, what the driver says of it, what `nvidia-smi` answered.

NVML is asked in a child that ends (`python -m drills.gpu`): a handle that stays open refuses the reset, and a call that
hangs in the driver must hang alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drills import proc
from drills.model import ProcessId, Refused

LOOKED_WITHIN_S = 20.0  # NVML sets a GPU up anew where persistence mode is off, which takes seconds
DEV = Path("/dev")
NONE = frozenset({"", "none", "n/a", "[n/a]", "not supported", "[not supported]", "0"})
BLANK_FROM = 0x7FFFFFF0  # the fillers that NVML writes for "no data"
ACTIONS: Mapping[int, str] = {
    1: "GPU Reset", 2: "Node Reboot", 3: "Drain P2P", 4: "Drain and Reset", 5: "Recover IMEX domain", 6: "Bus Reset",
    7: "System Reboot",
}  # fmt: skip
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
ALONE_SINCE = 8  # compute capability (Ampere) from which a GPU with NVLink is reset without its peers
_SHARED_DEVICES = re.compile(r"nvidia(ctl|-uvm|-uvm-tools|-modeset)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML told it. None: this driver or card does not tell."""

    uuid: str
    index: int
    bdf: str = ""
    minor: int | None = None  # of /dev/nvidiaN, which need not be the index
    persistence: bool | None = None
    recovery: str | None = None  # what the driver says it needs; None: nothing, or not told
    mig: bool | None = None
    ecc: bool | None = None
    remap_pending: bool | None = None
    mig_devices: int | None = None
    fabric: bool | None = None  # whether it has joined the NVLink fabric
    nvlinks: int | None = None  # active ones
    capability: int | None = None  # major compute capability
    power_limit_w: float | None = None
    power_least_w: float | None = None
    power_most_w: float | None = None
    sm_clock_mhz: float | None = None
    utilization: float | None = None  # percent


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a GPU's device open or mapped."""

    process: ProcessId
    command: str
    unit: str | None = None  # of systemd
    pod: str | None = None  # its UID

    def __str__(self) -> str:
        """For people: `process 4242 (dcgm-exporter), nvidia-dcgm.service`."""
        where = f", {self.unit}" if self.unit else f", pod {self.pod}" if self.pod else ""
        return f"process {self.process.pid} ({self.command or self.process.comm}){where}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reset said. `reason`: a closed list of codes; "" where it was done."""

    exit: int | None  # None: it gave none in time
    done: bool
    gpus: Sequence[str] = ()  # bus ids of those that were not reset
    reason: str = ""  # in_use, peers, not_supported, no_permission, not_found, driver, hang, unknown
    text: str = ""
    hints: Sequence[str] = field(default_factory=tuple)


# ---- what a reset takes along ----


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that the driver resets together, and the pods on them."""

    gpus: Sequence[int]
    pods: Sequence[str]


def groups_of(gpus: Iterable[Mapping[str, Any]], asked: Iterable[int]) -> list[Group]:
    """What a reset of `asked` takes along, each group once. A GPU: {"i", "hive": those that fall together, "pods"}.

    The instances of a partitioned GPU fall with it: all their pods are its pods.
    """
    known = {int(gpu["i"]): gpu for gpu in gpus}
    found: list[Group] = []
    for index in asked:
        if index not in known or any(index in group.gpus for group in found):
            continue
        hive = known[index].get("hive")
        same = {i for i, gpu in known.items() if hive is not None and gpu.get("hive") == hive}
        members = sorted({index, *same})
        pods = dict.fromkeys(str(pod) for i in members for pod in known[i].get("pods") or ())
        found.append(Group(members, list(pods)))
    return found


def uncovered(groups: Iterable[Group], approved: Iterable[str]) -> list[str]:
    """The pods that a reset would take along and nobody approved."""
    known = set(approved)
    return [pod for group in groups for pod in group.pods if pod not in known]


def peers_of(gpu: Gpu, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs that are reset with this one: before Ampere all that NVLink joins; where nobody tells, none is known."""
    if not gpu.nvlinks or gpu.capability is None or gpu.capability >= ALONE_SINCE:
        return []
    return [one for one in gpus if one.uuid != gpu.uuid and one.nvlinks]


def recovery_of(told: object) -> str | None:
    """What the driver says that a GPU needs, in words; None, N/A, 0 and empty mean: nothing, or an older driver."""
    if told is None or str(told).strip().lower() in NONE:
        return None
    if isinstance(told, int):
        if told >= BLANK_FROM:
            return None
        return ACTIONS.get(told, f"action {told}")
    return str(told).strip()


# ---- who holds one ----


def holders(device: Path) -> list[Holder]:
    """Every process that has the device open or mapped, by number. Those that we may not look into are not seen."""
    try:
        wanted = device.stat()
    except OSError:
        return []
    found = []
    for pid in proc.pids():
        if not _holds(pid, device, wanted):
            continue
        with contextlib.suppress(ProcessLookupError):
            found.append(holder_of(pid))
    return found


def holder_of(pid: int) -> Holder:
    """Who a process is, and under what it runs. Raises ProcessLookupError."""
    groups = cgroups_of(pid)
    command = " ".join(" ".join(proc.command_line(pid)).split())[:80]  # one line
    return Holder(proc.identify(pid), command, unit_of(groups), pod_of(groups))


def _holds(pid: int, device: Path, wanted: os.stat_result) -> bool:
    if any(_same(seen, wanted) for seen in proc.open_files(pid)):
        return True
    try:
        maps = (proc.PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False
    # In a container the device has the same name, and another inode.
    return any(line.split(maxsplit=5)[5:] == [str(device)] for line in maps.splitlines())


def _same(seen: os.stat_result, wanted: os.stat_result) -> bool:
    if stat.S_ISCHR(wanted.st_mode):
        return stat.S_ISCHR(seen.st_mode) and seen.st_rdev == wanted.st_rdev
    return (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino)


def device_of(gpu: Gpu) -> Path:
    """The device file of a GPU. Raises Refused where NVML does not tell its number: the index need not be it."""
    if gpu.minor is None:
        raise Refused(f"{gpu.uuid}: NVML does not tell which /dev/nvidiaN it is, so its holders cannot be listed")
    return DEV / f"nvidia{gpu.minor}"


def cgroups_of(pid: int) -> str:
    """/proc/PID/cgroup; empty where it is gone."""
    try:
        return (proc.PROC / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return ""


def unit_of(groups: str) -> str | None:
    """The service of the system manager that a process belongs to; None: none of its own, or a user's."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "name=systemd"} or "/user@" in path or "kubepods" in path:
            continue
        found = [part for part in path.split("/") if part.endswith(".service")]
        if found:
            return found[0]
    return None


def pod_of(groups: str) -> str | None:
    """The UID of the pod that a process belongs to, whatever the runtime made of it in its cgroup's name."""
    match = re.search(r"kubepods[^\n]*?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})", groups)
    return match[1].replace("_", "-") if match else None


# ---- asking NVML, in a child ----


def look(deadline_s: float = LOOKED_WITHIN_S) -> list[Gpu]:
    """Every GPU that NVML lists now. Raises Refused: no answer in time, no driver, or no GPU."""
    child = subprocess.Popen(
        [sys.executable, "-m", "drills.gpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    try:
        told, said = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _end_group(child)
        raise Refused(f"NVML gave no answer within {deadline_s:g} s; look at dmesg | grep NVRM") from None
    if child.returncode != 0:
        raise Refused(f"NVML: {said.strip().splitlines()[-1] if said.strip() else 'it gave no reason'}")
    found = [Gpu(**one) for one in json.loads(told)]
    if not found:
        raise Refused("NVML lists no GPU here")
    return found


def _end_group(child: subprocess.Popen[str]) -> None:
    """End a child and wait a moment for it; one that hangs in the kernel (state D) is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def find(uuid: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """The GPU with this UUID, whatever its index is now."""
    return next((gpu for gpu in gpus if gpu.uuid == uuid), None)


def worse(before: Gpu, after: Gpu) -> list[str]:
    """What of a GPU is not as it was: health, and settings that a reset may lose."""
    found = []
    if after.recovery is not None:
        found.append(f"the driver asks for: {after.recovery}")
    if after.remap_pending and not before.remap_pending:
        found.append("a row remapping is pending")
    for name, a, b in (("ECC", before.ecc, after.ecc), ("MIG mode", before.mig, after.mig)):
        if a is not None and b is not None and a != b:
            found.append(f"{name} was {'on' if a else 'off'} and is {'on' if b else 'off'}")
    if before.mig_devices is not None and after.mig_devices is not None and after.mig_devices != before.mig_devices:
        found.append(f"it has {after.mig_devices} MIG devices, and had {before.mig_devices}")
    if before.fabric and after.fabric is False:
        found.append("it has not joined the NVLink fabric again")
    if before.power_limit_w is not None and after.power_limit_w is not None and (
            abs(after.power_limit_w - before.power_limit_w) >= 1.0):
        found.append(f"its power limit was {before.power_limit_w:.0f} W and is {after.power_limit_w:.0f} W")
    if before.nvlinks is not None and after.nvlinks is not None and after.nvlinks < before.nvlinks:
        found.append(f"{after.nvlinks} of {before.nvlinks} NVLinks are active")
    return found


# ---- nvidia-smi ----


def smi(arguments: Sequence[str], deadline_s: float, inherit: Sequence[int] = ()) -> tuple[int | None, str]:
    """Run nvidia-smi in a session of its own: its exit status, None where it hangs, and all that it said.

    `inherit`: descriptors that tell others that something still acts on the GPU. Raises Refused where it is not there.
    """
    try:
        child = subprocess.Popen(
            ["nvidia-smi", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True, pass_fds=tuple(inherit),
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise Refused(f"nvidia-smi: {error.strerror}; it belongs to the driver") from None
    try:
        said, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _end_group(child)
        return None, f"no answer within {deadline_s:g} s"
    return child.returncode, said


_NOT_RESET = re.compile(r"GPU\s+([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*:\s*(.+)")
_DONE = re.compile(r"GPU\s+([0-9A-Fa-f:.]+)\s+was successfully reset", re.IGNORECASE)
_REASONS: Sequence[tuple[str, str]] = (
    ("in use by", "in_use"), ("being used by", "in_use"), ("reset together", "peers"), ("nvlink", "peers"),
    ("not supported", "not_supported"), ("primary gpu", "not_supported"), ("permission", "no_permission"),
    ("not found", "not_found"), ("no devices", "not_found"), ("valid gpu identifier", "not_found"),
    ("gpu is lost", "driver"), ("device handle", "driver"),
)  # fmt: skip
_CODES: Mapping[int, str] = {
    3: "not_supported", 4: "no_permission", 6: "not_found", 9: "driver", 15: "driver", 18: "driver",
}  # fmt: skip


def parse_reset(exit_status: int | None, said: str, *, persistence: bool | None = None) -> Answer:
    """What `nvidia-smi --gpu-reset` answered. Done only if it says so of one at least, of none otherwise, and exits 0.

    `persistence`: whether persistence mode was on before, which alone can make it refuse.
    """
    text = " ".join(said.split())
    done = _DONE.findall(said)
    failed = [(bus, why) for bus, why in _NOT_RESET.findall(said) if bus not in done]
    if exit_status is None:
        return Answer(None, False, (), "hang", text, ("it may hold the GPU in the kernel (state D): look at ps",))
    if exit_status == 0 and done and not failed:
        return Answer(0, True, (), "", text)
    told = " ".join(why for _, why in failed).lower() or text.lower()
    reason = next((code for words, code in _REASONS if words in told), None)
    reason = reason or next((code for words, code in _REASONS if words in text.lower()), None)
    reason = reason or _CODES.get(exit_status, "unknown")
    hints = []
    if reason == "peers":
        hints.append("NVLink joins it to GPUs that would have to be reset with it: it cannot be drilled alone")
    if reason == "in_use":
        hints = ["persistence mode is on: it holds the device"] if persistence else []
        hints.append("nvidia-persistenced, DCGM, Fabric Manager and nvidia_drm hold devices, too")
    return Answer(exit_status, False, [bus for bus, _ in failed], reason, text, hints)


# ---- the child ----


def _tell(nvml: Any, handle: Any, index: int) -> Gpu:
    """One GPU; what its driver does not tell is None."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except (nvml.NVMLError, AttributeError, ValueError):
            return None

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    def watts(value: Any) -> float | None:
        return None if value is None else value / 1000.0

    pci, mig, ecc = ask("nvmlDeviceGetPciInfo", handle), ask("nvmlDeviceGetMigMode", handle), ask(
        "nvmlDeviceGetEccMode", handle)
    rows, least = ask("nvmlDeviceGetRemappedRows", handle), ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
    capability, used = ask("nvmlDeviceGetCudaComputeCapability", handle), ask("nvmlDeviceGetUtilizationRates", handle)
    links = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(18)]
    persistence = ask("nvmlDeviceGetPersistenceMode", handle)
    return Gpu(
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        bdf="" if pci is None else text(pci.busId),
        minor=ask("nvmlDeviceGetMinorNumber", handle),
        persistence=None if persistence is None else bool(persistence),
        recovery=recovery_of(_field(nvml, handle, _RECOVERY_ACTION)),
        mig=None if mig is None else bool(mig[0]),
        mig_devices=None if mig is None else _mig_devices(nvml, handle),
        fabric=_fabric(nvml, handle),
        ecc=None if ecc is None else bool(ecc[0]),
        remap_pending=None if rows is None else bool(rows[2]),
        nvlinks=None if all(link is None for link in links) else sum(bool(link) for link in links),
        capability=None if capability is None else int(capability[0]),
        power_limit_w=watts(ask("nvmlDeviceGetPowerManagementLimit", handle)),
        power_least_w=None if least is None else watts(least[0]),
        power_most_w=None if least is None else watts(least[1]),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, 1),
        utilization=None if used is None else float(used.gpu),
    )


def _field(nvml: Any, handle: Any, number: int) -> int | None:
    try:
        (told,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
    except (nvml.NVMLError, AttributeError, ValueError):
        return None
    return None if told.nvmlReturn != 0 else int(told.value.uiVal)


def _mig_devices(nvml: Any, handle: Any) -> int | None:
    found = 0
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                found += 1
    except nvml.NVMLError:
        return None
    return found


def _fabric(nvml: Any, handle: Any) -> bool | None:
    info = nvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except nvml.NVMLError:
        return None
    if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return bool(info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == nvml.NVML_SUCCESS)


def _each(nvml: Any) -> Iterator[Gpu]:
    """One that cannot be opened is left out: the others are told, and whoever looks for it misses it."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            yield _tell(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)


def main() -> int:
    """Tell all GPUs as JSON."""
    import pynvml

    try:
        pynvml.nvmlInit()
        found = [asdict(one) for one in _each(pynvml)]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
