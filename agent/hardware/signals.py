"""The signals of the hardware: what the driver says happened, and what NVML tells of each GPU's state.

One small function each, as in agent.signals, whose table takes them from ROWS. What a card does not tell is N/A.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agent.hardware.history import Finding
from agent.hardware.table import IN_WORDS, RANK, RECOVERY, stronger
from agent.model import Sample, Signal, SubjectKind, Why
from agent.windows import Windows
from agent.words import span

if TYPE_CHECKING:
    from agent.signals import Ask, Scene

KERNEL_LOG, DEVICES, NVML = "kernel_log", "gpu_devices", "nvml"  # subjects
APP = "app"  # what a page asks for that leaves the GPU alone: what comes later and asks for more must page anew
XID_SIGNALS: Mapping[str, tuple[str, str | None]] = {  # signal -> severity and group of the findings that it counts
    "xid_gpu": ("page", "gpu"), "xid_memory": ("page", "memory"), "xid_link": ("page", "link"),
    "xid_app": ("page", APP), "xid_ticket": ("ticket", None), "xid_note": ("info", None),
}  # fmt: skip
HW_THERMAL, HW_POWER_BRAKE = 0x40, 0x80  # nvml.h: nvmlClocksEventReasonHwThermalSlowdown, ...HwPowerBrakeSlowdown
NO_PERMISSION, NOT_LOADED, NO_LIBRARY, VERSION_MISMATCH, UNKNOWN_ERROR = 4, 9, 12, 18, 999  # nvml.h: nvmlReturn_t
DRIVER_LATE_S = 120.0  # at boot the driver may be loaded after our start
NVML_AS_A_WHOLE = ("driver-mismatch", "device-access")  # rules: one alert, and not one more for each GPU
FABRIC_COMPLETED = 3  # nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED
BUSY = 0.5  # utilization at which a link is not asleep
PAGES_MOST = 60.0  # retired pages: the card's table has room for 64
MEMORY_MOST_C = 95.0  # where the card does not tell its own limit
# Replays a minute and lane that are still usual, by PCIe generation.
REPLAYS = {1: 0.15, 2: 0.3, 3: 0.48, 4: 0.96, 5: 1.92, 6: 3.84}
LANE_SHARE = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # GT/s


STATE = frozenset((  # what `told` asks for
    "gpu_recovery", "gpu_ecc_uncorrected", "gpu_ecc_corrected", "gpu_remap_pending", "gpu_remap_failed",
    "gpu_banks_exhausted", "gpu_retired_pending", "gpu_retired", "gpu_memory_temp_c", "gpu_nvlink_up",
    "gpu_nvlink_recoveries", "gpu_nvlink_replays", "gpu_pcie_gen", "gpu_pcie_gen_max", "gpu_pcie_width",
    "gpu_pcie_width_max", "gpu_pcie_replays", "gpu_fabric", "gpu_fabric_status", "gpu_persistence"))
STATE_KEPT_S = 7 * 86400.0
GAUGES = frozenset((  # what `latest_told` asks for
    "gpu_temp_c", "gpu_margin_c", "gpu_throttle", "gpu_memory_temp_max_c", "gpu_mem_used", "gpu_mem_free",
    "gpu_mem_total"))
LEARNED = STATE | GAUGES  # names that a GPU which told them once may not fall silent about
TOLD_BEFORE = "it was told before, and is no more: another driver, or what tells it was switched off"


def latest_told(ask: Ask, name: str) -> Sample | Signal:
    """A gauge's last sample, or why there is none: N/A only where the card has never told it, as in `told`."""
    got = ask.latest(name)
    if isinstance(got, Sample) or got.state != "na" or not was_told(ask, name):
        return got
    return ask.gap(Why.MISSING, TOLD_BEFORE)


def was_told(ask: Ask, name: str) -> bool:
    """Whether a number was told in the last seven days, by a GPU that is not in MIG mode."""
    told_at = ask.scene.state_told.get(ask.subject, {}).get(name)
    mig = ask.windows.latest(ask.subject, "gpu_mig", ask.now)
    return told_at is not None and ask.now - told_at <= STATE_KEPT_S and not (isinstance(mig, Sample) and mig.value)


def told(ask: Ask, name: str) -> Sample | Signal:
    """A number of the state; N/A where the card never told it, a Gap where it did in the last seven days.

    A driver that stops telling a fault has not mended it: its alert must stay. In MIG mode a card tells less, rightly.
    """
    got = ask.windows.latest(ask.subject, name, ask.now)
    if isinstance(got, Sample):
        return got
    if got.code not in (Why.MISSING, Why.NOT_SUPPORTED):
        return ask.gap(got.code, got.why)
    if not was_told(ask, name):
        return ask.na(got.why if got.code is Why.NOT_SUPPORTED else "this card or driver does not tell it")
    return ask.gap(Why.MISSING, TOLD_BEFORE)


def text_value(ask: Ask, value: float, text: str, at: float, **more: Any) -> Signal:
    """A value and, where it says something, its sentence."""
    return ask.value(value, at=at, evidence=({"text": text} if value > 0 else {}) | more)


# --- what happened ---------------------------------------------------------------------------------------------------


def recovery_action(windows: Windows, uuid: str, now: float) -> str | None:
    """What the driver says must be done to a GPU; None where it does not tell."""
    got = windows.latest(uuid, "gpu_recovery", now)
    return RECOVERY.get(int(got.value)) if isinstance(got, Sample) else None


def xids(ask: Ask) -> Signal:
    """X1 to X5, X27. How often errors by number came that nobody has mended yet, of this severity and group."""
    severity, group = XID_SIGNALS[ask.spec.id]
    found = [f for f in ask.scene.findings() if f.subject == ask.subject and f.severity == severity
             and group in (None, group_of(f)) and f.last_at > ask.not_before]
    if not found:
        return not_told(ask) or ask.value(0.0)
    action = stronger(*(f.action for f in found))
    text = "; ".join(f.text for f in found)
    evidence = {"text": text, "codes": [f.code for f in found], "action": action, "do": IN_WORDS[action],
                "first_at": min(f.first_at for f in found), "last_at": max(f.last_at for f in found)}
    return ask.value(float(sum(f.times for f in found)), evidence=evidence)


def group_of(finding: Finding) -> str:
    """Which of the rules that page tells of a finding."""
    return APP if RANK[finding.action] < RANK["drain_p2p"] else finding.group


def not_told(ask: Ask) -> Signal | None:
    """Why nobody tells us of Xids; None where somebody does."""
    gap = ask.windows.problem(KERNEL_LOG, "kernel_log_open", ask.now)
    if gap is None or ask.windows.problem(NVML, "nvml_events_open", ask.now) is None:
        return None
    return ask.na("the kernel log is not read") if gap.code is Why.MISSING else ask.gap(gap.code, gap.why)


def forged_lines(ask: Ask) -> Signal:
    """X6. Lines that look like the driver's, and that a user wrote."""
    return of_kind(ask, "forged", "line(s) that only look like the driver's; the last")


def lost_records(ask: Ask) -> Signal:
    """X7. Kernel messages that were overwritten before they were read: an Xid may have been among them."""
    return of_kind(ask, "overrun", "kernel messages were overwritten before they were read")


def of_kind(ask: Ask, kind: str, said: str) -> Signal:
    """Events of one kind in the window."""
    gap = ask.windows.problem(KERNEL_LOG, "kernel_log_open", ask.now)
    count, text = ask.scene.history.counted(kind, ask.start())
    if not count and gap is not None:
        return ask.na("the kernel log is not read") if gap.code is Why.MISSING else ask.gap(gap.code, gap.why)
    return text_value(ask, float(count), f"{count} {said}" + (f": {text}" if text else ""), ask.now)


# --- there, and of one mind ------------------------------------------------------------------------------------------


def gpu_lost(ask: Ask) -> Signal:
    """L4. Whether a GPU that was there is gone: NVML says so, or no longer lists it."""
    got = ask.windows.latest(ask.subject, "gpu_temp_c", ask.now)
    if isinstance(got, Sample) or got.code is Why.NOT_SUPPORTED:
        return ask.value(0.0, at=got.at)
    if got.code is not Why.LOST:
        return ask.gap(got.code, got.why)
    return text_value(ask, 1.0, f"lost: {got.why}", got.at)


def gpu_count(ask: Ask) -> Signal:
    """L4. GPUs that are expected (written, or as many as were ever seen) and that NVML does not show."""
    expected = ask.scene.gpus_expected
    if not expected:
        return ask.na("no GPU was ever seen here")
    codes = codes_of(ask.scene)
    told_of = [uuid for uuid, code in codes.items() if code is not Why.MISSING]  # not before a restart of ours alone
    shown = sum(codes[uuid] is not Why.LOST for uuid in told_of)
    unloaded = driver_not_loaded(ask)
    gone = unloaded or (not told_of and none_in_pci(ask))
    if not told_of and not gone and (codes or isinstance(ask.windows.latest(NVML, "nvml_error", ask.now), Sample)):
        return ask.gap(Why.MISSING, "NVML tells of no GPU since Tocsin was started, or for a while now")
    shown = 0 if gone else shown
    words = ["the kernel module nvidia is not loaded" if unloaded else f"NVML shows {shown}"]
    for name, what in (("gpus_pci", "PCI"), ("gpus_dev", "/dev/nvidia*")):
        got = ask.windows.latest(DEVICES, name, ask.now)
        words += [f"{what} {got.value:.0f}"] if isinstance(got, Sample) else []
    missing = float(max(0, expected - shown))
    return text_value(ask, missing, f"{missing:.0f} of {expected} GPUs missing: {', '.join(words)}", ask.now,
                      expected=expected, shown=shown, all_gone=gone)


def driver_not_loaded(ask: Ask) -> bool:
    """Whether the kernel has had no NVIDIA module for DRIVER_LATE_S: then no GPU can be used, whatever PCI shows.

    A container that lacks a right or the library sees the module all the same, in /proc.
    """
    start = ask.now - DRIVER_LATE_S
    module = ask.windows.latest(DEVICES, "gpus_proc", ask.now)
    now = ask.windows.latest(NVML, "nvml_error", ask.now)
    codes = list(ask.windows.history(NVML, "nvml_error", start - 2 * ask.windows.interval_s))
    return (isinstance(module, Sample) and not module.value and isinstance(now, Sample) and codes[0][0] <= start
            and all(int(code) == NOT_LOADED for _, code in codes))


def none_in_pci(ask: Ask) -> bool:
    """Whether PCI has shown no GPU for DRIVER_LATE_S."""
    start = ask.now - DRIVER_LATE_S
    shown = list(ask.windows.history(DEVICES, "gpus_pci", start - 2 * ask.windows.interval_s))
    return bool(shown) and shown[0][0] <= start and not any(count for _, count in shown)


def codes_of(scene: Scene) -> Mapping[str, Why | None]:
    """Why each GPU does not tell its temperature; None where it does, MISSING where it never did since our start.

    What an earlier run of ours read comes back from the store, and is late.
    """
    if ("codes",) not in scene.memo:
        told_by = {uuid: scene.windows.latest(uuid, "gpu_temp_c", scene.now) for uuid in scene.gpus}
        scene.memo[("codes",)] = {
            uuid: None if isinstance(got, Sample) else Why.MISSING if got.code is Why.LATE else got.code
            for uuid, got in told_by.items()}
    found: Mapping[str, Why | None] = scene.memo[("codes",)]
    return found


def never_told(scene: Scene, uuid: str) -> bool:
    """Whether a GPU is known from before our start alone, and NVML tells of others: it was replaced, or is missing."""
    codes = codes_of(scene)
    return codes[uuid] is Why.MISSING and any(code is not Why.MISSING for code in codes.values())


def driver_mismatch(ask: Ask) -> Signal:
    """Whether the driver's library and its kernel module are of different versions: a reload or reboot is due."""
    found = start_fails(ask, "the driver's library and the loaded kernel module are of different versions: nothing new "
                        "can use a GPU until the module is reloaded or the node rebooted", mismatch=True)
    got = ask.windows.latest(DEVICES, "driver_differs", ask.now)
    if found.value or not isinstance(got, Sample) or not got.value:
        return found
    text = ("another version of the driver's library was installed than the module that is loaded: what runs goes on, "
            "an engine that starts anew will not find its GPU (tocsin doctor shows both)")
    return text_value(ask, 1.0, text, got.at, nvml_works=True)


def device_access(ask: Ask) -> Signal:
    """Whether NVML fails although the kernel shows GPUs: we have lost the way to them, and not the GPUs."""
    got = ask.windows.latest(NVML, "nvml_error", ask.now)
    code = int(got.value) if isinstance(got, Sample) else 0
    why = ("NVML may not use them: a container that lost its devices (systemctl daemon-reload), or the rights of "
           "/dev/nvidia*")
    if code == NO_LIBRARY:
        why = ("libnvidia-ml.so.1 is not found: the driver's user-space part is not installed, or this container "
               "lacks the utility capability")
    elif code not in (NO_PERMISSION, NOT_LOADED, UNKNOWN_ERROR):
        why = f"NVML does not start (its error {code}): look at nvidia-smi and dmesg | grep NVRM"
    return start_fails(ask, f"the kernel shows the GPUs and {why}", mismatch=False)


def start_fails(ask: Ask, text: str, *, mismatch: bool) -> Signal:
    """NVML's own reason for not starting: that its versions do not match, or any other while the kernel shows GPUs."""
    got = ask.windows.latest(NVML, "nvml_error", ask.now)
    if not isinstance(got, Sample):
        if got.code is not Why.MISSING:
            return ask.gap(got.code, got.why)
        read = any(isinstance(ask.windows.latest(uuid, "gpu_temp_c", ask.now), Sample) for uuid in ask.scene.gpus)
        return ask.value(0.0) if read else ask.na("NVML shows no GPU here")
    # where the module is really not loaded PCI shows the GPUs all the same: then gpu-count tells
    there = [s.value for name in (("gpus_proc",) if int(got.value) == NOT_LOADED else ("gpus_pci", "gpus_proc"))
             if isinstance(s := ask.windows.latest(DEVICES, name, ask.now), Sample)]
    differs = int(got.value) == VERSION_MISMATCH
    failed = differs if mismatch else not differs and max(there, default=0.0) > 0
    return text_value(ask, float(failed), text, got.at)


def gpu_recovery(ask: Ask) -> Signal:
    """What the driver itself asks for, by rank; 0: nothing."""
    got = told(ask, "gpu_recovery")
    if isinstance(got, Signal):
        return got
    action = RECOVERY.get(int(got.value), "check")
    text = f"the driver asks: {IN_WORDS[action]}"
    return text_value(ask, float(RANK[action]), text, got.at, action=action, **({"do": IN_WORDS[action]} if
                      RANK[action] else {}))


# --- memory ----------------------------------------------------------------------------------------------------------


def ecc_uncorrected(ask: Ask) -> Signal:
    """Uncorrected memory errors in the window, by whichever counter rose more."""
    got = told(ask, "gpu_ecc_uncorrected")
    if isinstance(got, Signal):
        return got
    start = ask.start()
    rose = max(ask.count(name, ask.subject, start) for name in ("gpu_ecc_uncorrected", "gpu_ecc_uncorrected_ever"))
    return text_value(ask, rose, f"{rose:.0f} uncorrected memory error(s)", got.at)


def ecc_rate(ask: Ask) -> Signal:
    """Corrected memory errors a second."""
    return rate(ask, "gpu_ecc_corrected", "{:.3g} corrected memory errors a second")


def rate(ask: Ask, name: str, text: str, *more: str) -> Signal:
    """Rise of counters a second over the window."""
    got = told(ask, name)
    if isinstance(got, Signal):
        return got
    uncovered = ask.uncovered(name)
    if uncovered:  # a young agent: nothing to judge yet
        return ask.idle(uncovered.why or "not watched for long enough")
    start = ask.start()
    watched_s = min(ask.window_s(), ask.windows.watched_s(ask.subject, name, start))
    if watched_s <= 0:
        return ask.idle("not watched yet")
    value = sum(ask.count(n, ask.subject, start) for n in (name, *more)) / watched_s
    return text_value(ask, value, text.format(value), got.at)


def flag(name: str, text: str) -> Callable[[Ask], Signal]:
    """A signal that is a number of the state as it is."""
    def function(ask: Ask) -> Signal:
        got = told(ask, name)
        return got if isinstance(got, Signal) else text_value(ask, got.value, text.format(got.value), got.at)
    return function


def retired_pages(ask: Ask) -> Signal:
    """Pages that wait to be retired, or the table of them nearly full; as a multiple of what is allowed."""
    pending, total = told(ask, "gpu_retired_pending"), told(ask, "gpu_retired")
    if isinstance(pending, Signal):
        return pending
    if isinstance(total, Signal):
        return total
    text = f"{total.value:.0f} pages are retired" + (", one waits for a reset" if pending.value > 0 else "")
    return text_value(ask, max(float(pending.value > 0), total.value / PAGES_MOST), text, pending.at)


def memory_temperature(ask: Ask) -> Signal:
    """Kelvins over the memory's own limit."""
    got = told(ask, "gpu_memory_temp_c")
    if isinstance(got, Signal):
        return got
    most = latest_told(ask, "gpu_memory_temp_max_c")
    if isinstance(most, Signal) and was_told(ask, "gpu_memory_temp_max_c"):
        return most
    limit_c = most.value if isinstance(most, Sample) else MEMORY_MOST_C
    return ask.value(got.value - limit_c, at=got.at, evidence={"memory_temp_c": got.value, "memory_limit_c": limit_c})


# --- links -----------------------------------------------------------------------------------------------------------


def nvlink_down(ask: Ask) -> Signal:
    """Links that are down and were up in this boot, or that equal GPUs of this node have up."""
    got = told(ask, "gpu_nvlink_up")
    if isinstance(got, Signal):
        return got
    mask = int(got.value)
    gone = ask.scene.nvlinks_seen.get(ask.subject, mask) & ~mask
    fewer = most_links_up(ask, ask.scene.gpus[ask.subject].name) - mask.bit_count()
    value = max(gone.bit_count(), fewer)
    named = ", ".join(str(link) for link in range(gone.bit_length()) if gone >> link & 1)
    which = f"link {named}" if named else f"{fewer} fewer links than its neighbours have"
    return text_value(ask, float(value), f"NVLink down: {which}; {mask.bit_count()} are up", got.at)


def most_links_up(ask: Ask, name: str) -> int:
    """How many links the best connected GPU of this kind has up."""
    memo = ask.scene.memo
    if ("links up", name) not in memo:
        peers = [s for uuid, gpu in ask.scene.gpus.items() if gpu.name == name
                 and isinstance(s := ask.windows.latest(uuid, "gpu_nvlink_up", ask.now), Sample)]
        memo[("links up", name)] = max((int(s.value).bit_count() for s in peers), default=0)
    most: int = memo[("links up", name)]
    return most


def nvlink_recoveries(ask: Ask) -> Signal:
    """How often links had to recover in the window: days before one fails for good."""
    got = told(ask, "gpu_nvlink_recoveries")
    if isinstance(got, Signal):
        return got
    rose = ask.count("gpu_nvlink_recoveries", ask.subject, ask.start())
    return text_value(ask, rose, f"NVLink recovered {rose:.0f} times", got.at)


def nvlink_errors(ask: Ask) -> Signal:
    """Replays and CRC errors of all links a second."""
    return rate(ask, "gpu_nvlink_replays", "{:.3g} NVLink replays and CRC errors a second", "gpu_nvlink_crc")


def pcie_link(ask: Ask) -> Signal:
    """The share of its PCIe bandwidth that a busy GPU lacks."""
    names = ("gpu_pcie_gen", "gpu_pcie_gen_max", "gpu_pcie_width", "gpu_pcie_width_max", "gpu_util")
    numbers: dict[str, Sample] = {}
    for name in names:
        got = told(ask, name)
        if isinstance(got, Signal):
            return got
        numbers[name] = got
    gen, gen_max, width, width_max, util = (numbers[name].value for name in names)
    if util < BUSY:
        return ask.idle("an idle GPU lets its link sleep")
    most = LANE_SHARE.get(int(gen_max), gen_max) * width_max
    missing = 1 - LANE_SHARE.get(int(gen), gen) * width / most if most > 0 else 0.0
    text = f"PCIe gen {gen:.0f} x{width:.0f} of gen {gen_max:.0f} x{width_max:.0f}"
    return text_value(ask, max(0.0, missing), text, numbers["gpu_pcie_gen"].at)


def pcie_replays(ask: Ask) -> Signal:
    """PCIe replays as a multiple of what is usual for this link."""
    gen, width = told(ask, "gpu_pcie_gen_max"), told(ask, "gpu_pcie_width_max")
    per_s = rate(ask, "gpu_pcie_replays", "{:.3g} PCIe replays a second")
    if isinstance(gen, Signal) or isinstance(width, Signal) or per_s.value is None:
        return next((s for s in (per_s, gen, width) if isinstance(s, Signal) and s.state != "value"), per_s)
    usual = REPLAYS.get(int(gen.value), REPLAYS[6]) * max(1.0, width.value) / 60
    return text_value(ask, per_s.value / usual, f"{per_s.value * 60:.3g} PCIe replays a minute", per_s.at)


def fabric(ask: Ask) -> Signal:
    """Whether the fabric (NVSwitch) has not taken this GPU in."""
    state, status = told(ask, "gpu_fabric"), told(ask, "gpu_fabric_status")
    if isinstance(state, Signal):
        return state
    if isinstance(status, Signal):
        return status
    well = int(state.value) == FABRIC_COMPLETED and not status.value
    words = {1: "not started", 2: "in progress", 3: "completed"}.get(int(state.value), f"{state.value:.0f}")
    return text_value(ask, float(not well), f"fabric state {words}, status {status.value:.0f}", state.at)


# --- held back -------------------------------------------------------------------------------------------------------


def held_back(bit: int, what: str) -> Callable[[Ask], Signal]:
    """A signal: the share of the window in which one reason of hardware slowed the GPU down."""
    def function(ask: Ask) -> Signal:
        got = told(ask, "gpu_throttle")
        if isinstance(got, Signal):
            return got
        window_s = ask.window_s()
        reads = Counter(ask.windows.levels(ask.subject, "gpu_throttle", ask.start()))
        held = sum(times for reasons, times in reads.items() if int(reasons) & bit)
        share = min(1.0, held * ask.windows.interval_s / window_s)
        text = f"{what} for {span(share * window_s)} of the last {span(round(window_s))}"
        return text_value(ask, share, text, got.at)
    return function


def persistence(ask: Ask) -> Signal:
    """Whether persistence mode is off: each first use of an idle GPU sets it up anew, for seconds."""
    got = told(ask, "gpu_persistence")
    return got if isinstance(got, Signal) else text_value(ask, float(not got.value), "persistence mode is off", got.at)


# (id, unit, subject, help, function, windowed)
ROWS: tuple[tuple[str, str, SubjectKind, str, Callable[[Ask], Signal], bool], ...] = (
    ("xid_gpu", "count", "gpu", "Xids of the GPU itself that nobody has mended", xids, False),
    ("xid_memory", "count", "gpu", "Xids of GPU memory that nobody has mended", xids, False),
    ("xid_app", "count", "gpu", "Xids that cost an application and leave the GPU usable", xids, False),
    ("xid_link", "count", "gpu", "Xids and SXids of NVLink that nobody has mended", xids, False),
    ("xid_ticket", "count", "gpu", "Xids that can wait until the morning", xids, False),
    ("xid_note", "count", "gpu", "Xids that are told for information", xids, False),
    ("kernel_log_forged", "count", "node", "lines that look like the driver's and that a user wrote", forged_lines,
     True),
    ("kernel_log_lost", "count", "node", "kernel messages that were overwritten unread", lost_records, True),
    ("gpu_lost", "count", "gpu", "1 while a GPU that was there is gone", gpu_lost, False),
    ("gpu_count", "count", "node", "GPUs that are expected and not shown", gpu_count, False),
    ("driver_mismatch", "count", "node", "1 while the driver's library and module are of different versions",
     driver_mismatch, False),
    ("device_access", "count", "node", "1 while the kernel shows GPUs that NVML may not use", device_access, False),
    ("gpu_recovery", "count", "gpu", "rank of what the driver asks to be done to a GPU", gpu_recovery, False),
    ("gpu_ecc_uncorrected", "count", "gpu", "uncorrected memory errors", ecc_uncorrected, True),
    ("gpu_ecc_rate", "per second", "gpu", "corrected memory errors a second", ecc_rate, True),
    ("gpu_remap_pending", "count", "gpu", "1 while a remapped row waits for a reset",
     flag("gpu_remap_pending", "a remapped row waits for a reset"), False),
    ("gpu_remap_failed", "count", "gpu", "1 once remapping a row has failed",
     flag("gpu_remap_failed", "remapping a memory row has failed"), False),
    ("gpu_spare_rows", "count", "gpu", "memory banks without a spare row",
     flag("gpu_banks_exhausted", "{:.0f} memory bank(s) without a spare row"), False),
    ("gpu_retired_pages", "of limit", "gpu", "retired pages, as a multiple of what is allowed", retired_pages, False),
    ("gpu_memory_heat", "kelvin", "gpu", "kelvins of the memory over its own limit", memory_temperature, False),
    ("gpu_nvlink_down", "count", "gpu", "NVLinks that are down and should be up", nvlink_down, False),
    ("gpu_nvlink_recovered", "count", "gpu", "recoveries of NVLinks", nvlink_recoveries, True),
    ("gpu_nvlink_errors", "per second", "gpu", "NVLink replays and CRC errors a second", nvlink_errors, True),
    ("gpu_pcie_loss", "ratio", "gpu", "share of its PCIe bandwidth that a busy GPU lacks", pcie_link, False),
    ("gpu_pcie_replays", "of limit", "gpu", "PCIe replays as a multiple of what is usual", pcie_replays, True),
    ("gpu_fabric", "count", "gpu", "1 while the fabric has not taken the GPU in", fabric, False),
    ("gpu_power_brake", "ratio", "gpu", "share of the window slowed by the hardware's power brake",
     held_back(HW_POWER_BRAKE, "power brake"), True),
    ("gpu_thermal_slowdown", "ratio", "gpu", "share of the window slowed by hardware for heat",
     held_back(HW_THERMAL, "hardware thermal slowdown"), True),
    ("gpu_persistence_off", "count", "gpu", "1 while persistence mode is off", persistence, False),
)
