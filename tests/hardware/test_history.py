"""What happened, folded: joined, counted, cancelled, mended; and what of it still asks for somebody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from agent.hardware.history import MOST_CLUSTERS, MOST_ENTRIES, Finding, History, findings
from agent.hardware.lines import line_of, record_of
from agent.hardware.table import ACTIONS, RECOVERY, Severity, stronger, switch, xid, xids
from agent.model import Event
from agent.sources.kernel_log import told_by
from tests.hardware.cases import cases

T0 = 1_790_000_000.0
HOUR, DAY = 3600.0, 86400.0
A, B = "0000:1a:00", "0000:1b:00"


def of_text(text: str, at_s: float = 0.0, count: int = 1) -> Event:
    """The event of a log's line."""
    record = record_of(text)
    assert record is not None
    line = line_of(record.message)
    assert line is not None
    at = T0 + at_s
    return Event(line.kind, line.device, line.number, at, at, count, detail=told_by(line))  # type: ignore[arg-type]


def log(number: int, at_s: float = 0.0, device: str = A, text: str = "x", count: int = 1) -> Event:
    """An Xid of the log."""
    return of_text(f"NVRM: Xid (PCI:{device}): {number}, {text}", at_s, count)


def nvml(number: int, at_s: float = 0.0, device: str = A) -> Event:
    """An Xid by NVML's events."""
    return Event("xid", device, number, T0 + at_s, T0 + at_s, origin="nvml")


def told(*events: Event) -> History:
    """A history of these."""
    history = History()
    history.fold(events, lambda _: None)
    return history


def found(history: History, at_s: float = 60.0, overrides: Mapping[int, Severity] | None = None,
          recovery: Mapping[str, str | None] | None = None) -> list[Finding]:
    """What asks for somebody at a second of the story; what is only logged is left out."""
    return [f for f in findings(history, T0 + at_s, overrides or {}, recovery or {}) if f.severity != "log"]


def codes(history: History, at_s: float = 60.0, **more: Any) -> list[tuple[str, str]]:
    """(code, severity) of the same."""
    return [(f.code, f.severity) for f in found(history, at_s, **more)]


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_number_of_the_catalogue_is_in_the_table() -> None:
    """A number that the table lacks is a ticket with a raw text: these are known, and have words."""
    known = [8, 11, 25, 13, 31, 32, 37, 38, *range(39, 42), *range(70, 73), *range(75, 78), 85, *range(126, 136), 43,
             44, 45, 46, 48, 54, 60, 62, 63, 64, 66, 67, 68, 69, 74, 78, 79, 80, 82, 83, 84, 88, 89, *range(96, 106),
             86, 139, 92, 93, 94, 95, 106, 107, 109, 110, 119, 120, 121, 136, 137, 140, 141, 142, 143,
             *range(144, 177), 185]
    assert sorted(set(known) - set(xids())) == []
    for number, row in xids().items():
        assert row.severity in ("page", "ticket", "info", "log"), number
        assert row.action in ACTIONS, number
        assert row.group in ("gpu", "memory", "link"), number
        assert 0 < len(row.means) <= 100, number


@pytest.mark.parametrize(("numbers", "severity"), [
    ([46, 48, 54, 62, 64, 74, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 158, 167, 169, 173, 175],
     "page"),
    ([32, 60, 63, 78, 80, 92, 93, 121, 142, 156, 157, 159, 163, 164, 165, 168, 171, 172, 176, 185, 4711], "ticket"),
    ([8, 11, 25, 37, 38, 43, 44, 45, 66, 67, 68, 69, 106, 107, 137, 141, 152, 153, 160, 162, 174], "log"),
])
def test_severities_of_the_catalogue(numbers: list[int], severity: str) -> None:
    """Who is woken by which number."""
    assert {number: xid(number).severity for number in numbers} == dict.fromkeys(numbers, severity)


@pytest.mark.parametrize(("numbers", "action"), [
    ([8, 11, 25, 13, 31, 32, 39, 60, 68, 69, 70, 80, 82, 86, 94, 126, 135, 139], "restart_app"),
    ([46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158], "reset"),
    ([37, 38, 43, 44, 63, 66, 67, 93, 106, 107, 121, 137, 141, 152, 153, 160], "none"),
    ([48], "drain_reset"), ([79, 151], "reboot"), ([54, 78, 142, 159], "check"),
])
def test_actions_of_the_catalogue(numbers: list[int], action: str) -> None:
    """What the driver's maker asks for, number by number."""
    assert {number: xid(number).action for number in numbers} == dict.fromkeys(numbers, action)


def test_switch_numbers() -> None:
    """A set that overlaps another would have a number be fatal and corrected."""
    table = switch()
    assert not table.fatal & table.corrected
    assert {11001, 20034, 23017, 24007} <= table.fatal


def test_the_stronger_action_wins() -> None:
    """NVML's numbers are not in the order of their strength: 3 (drain P2P) is less than 1 (reset)."""
    assert stronger("reset", "drain_p2p") == "reset"
    assert stronger("reset", None) == "reset"
    assert stronger() == "none"
    assert [RECOVERY[n] for n in (3, 1, 4, 5, 2)] == sorted((RECOVERY[n] for n in (1, 2, 3, 4, 5)), key=ACTIONS.index)


# --- joining and counting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("story", "events", "count"), [
    ("the log, then NVML", [log(79), nvml(79, 1)], 1),
    ("NVML, then the log", [nvml(79), log(79, 1.5)], 1),
    ("three lines of one fault, one event", [log(79, count=3), nvml(79, 1)], 3),
    ("two faults, both told twice", [log(79), nvml(79, 1), log(79, 60), nvml(79, 61)], 2),
    ("NVML alone, for the log cannot be read", [nvml(79), nvml(79, 60)], 2),
    ("another GPU's", [log(79), nvml(79, 1, B)], 1),
    # the driver writes both at one fall (osHandleGpuLost)
    ("lost without a number, and with it", [of_text(f"NVRM: GPU {A}.0: GPU has fallen off the bus."), log(79, 1)], 1),
    ("with a number, and without it", [log(79), of_text(f"NVRM: GPU {A}.0: GPU has fallen off the bus.")], 1),
    ("lost without a number alone", [of_text(f"NVRM: GPU {A}.0: GPU has fallen off the bus.")], 1),
])
def test_what_both_tell_is_counted_once(story: str, events: list[Event], count: int) -> None:
    """The log and NVML tell each Xid: counted as two it would repeat at once."""
    assert sum(e.count for e in told(*events).entries.values() if e.device == A) == count, story


@pytest.mark.parametrize("events", [[nvml(999), log(176, 1)], [log(176), nvml(999, 1)]])
def test_999_is_the_number_that_the_log_tells(events: list[Event]) -> None:
    """NVML does not know the newest numbers and says 999; the log beside it says which it was."""
    assert [(e.number, e.count) for e in told(*events).entries.values()] == [(176, 1)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_999_beside_a_number_that_nvml_knows(order: tuple[int, ...]) -> None:
    """119 and 176 at once; NVML tells 119 and "unknown": each once, in whatever order they arrive."""
    events = (log(119), log(176, 0.1), nvml(119, 0.2), nvml(999, 0.3))
    history = told(*(events[n] for n in order))

    assert sorted((e.number, e.count) for e in history.entries.values()) == [(119, 1), (176, 1)]


def test_999_alone_is_a_ticket() -> None:
    """Where the log cannot be read nobody knows the number, and it is not dropped."""
    assert codes(told(nvml(999))) == [("xid.999", "ticket")]


def test_c061_a_storm_is_one_entry() -> None:
    """10,029 lines: one entry with the count, the first and the last time, and bounded memory."""
    history = told(*(log(95, at_s=n * 10.0, count=20) for n in range(501)), log(95, 5010, count=9))
    (entry,) = history.entries.values()
    (finding,) = [f for f in found(history, 5011) if f.code == "xid.95"]

    assert (finding.times, finding.first_at, finding.last_at) == (10_029, T0, T0 + 5010)
    assert len(entry.clusters) <= MOST_CLUSTERS
    assert "10029 times" in finding.text
    assert len(json.dumps(history.saved())) < 3000


def test_many_numbers_stay_bounded() -> None:
    """Broken hardware can tell thousands of different errors: the oldest go first."""
    history = told(*(log(number, at_s=number) for number in range(1500)))

    assert len(history.entries) == MOST_ENTRIES
    assert max(e.number or 0 for e in history.entries.values()) == 1499


def test_history_outlives_a_restart() -> None:
    """What was counted before the restart counts after it."""
    history = told(log(79), log(13, 5), nvml(79, 1), of_text(f"NVRM: GPU at PCI:{A}: GPU-00000000-aaaa"))
    history.reset(B, T0)
    again = History.restored(json.loads(json.dumps(history.saved())))

    assert again.saved() == history.saved()
    assert found(again) == found(history)


def test_an_entry_of_another_version_does_not_stop_the_start() -> None:
    """After a way back to an older version the monitor ended at each start, at a row that it did not know."""
    saved = told(log(79), log(13)).saved()
    first, second = saved["entries"]
    saved["entries"][first] = [*saved["entries"][first], "something new"]
    saved["entries"]["x"] = None

    assert list(History.restored(saved).entries) == [second]


def test_a_rate_limit_makes_counts_lower_bounds() -> None:
    """The driver prints one of thirty from now on: the count is said to be no more than that."""
    history = told(log(119), log(119, 6), of_text(
        f"NVRM: Rate limiting GSP RPC error prints for GPU at PCI:{A} (printing 1 of every 30).  The GPU likely …"))

    assert "2 times or more" in found(history)[0].text


# --- which device ----------------------------------------------------------------------------------------------------


def test_c052_the_uuid_stands_in_the_line_before() -> None:
    """NVML cannot name a lost GPU; the log did, when the driver was loaded."""
    history = told(*(of_text(line) for line in cases()["C052"]["input"].splitlines()))
    (finding,) = found(history)

    assert (finding.code, finding.subject) == ("xid.14", "GPU-00000000-1111-2222-3333-444444444444")


def test_c064_a_lost_gpu_keeps_its_event() -> None:
    """Xid 79 was thrown away, since the lost GPU no longer had a UUID."""
    case = cases()["C064"]["input"]
    first, second = found(told(of_text(case["log"]))), found(told(of_text(case["log2"])))

    assert [(f.code, f.subject, f.severity) for f in first] == [("xid.79", "0000:43:00", "page")]
    assert second[0].injected
    assert "INJECTED" in second[0].text


# --- what a number means here ----------------------------------------------------------------------------------------


def test_c053_one_alert_a_number() -> None:
    """13, 13, 109: the 13s are one thing with a count of two, the 109 another, with another action."""
    history = told(*(of_text(line, n) for n, line in enumerate(cases()["C053"]["input"].splitlines())))

    assert [(f.code, f.severity, f.action, f.times) for f in found(history)] == [
        ("xid.109", "page", "reset", 1), ("xid.13", "ticket", "restart_app", 2)]


@pytest.mark.parametrize(("story", "events", "want"), [
    ("once", [log(13)], []),
    ("twice in a day", [log(13), log(13, 20 * HOUR)], [("xid.13", "ticket")]),
    ("on two GPUs it is the application", [log(31), log(31, 60), log(31, 61, B)], []),
    ("long ago", [log(31, -2 * DAY), log(31, 20 * HOUR)], []),
])
def test_13_and_31_are_the_application_s_until_one_gpu_repeats_them(
    story: str, events: list[Event], want: list[tuple[str, str]]
) -> None:
    """A page for each application that crashed is a pager that is switched off."""
    assert codes(told(*events), 20 * HOUR + 90) == want, story


@pytest.mark.parametrize(("number", "action", "severity"), [
    (94, "restart_app", "page"), (63, "none", "ticket"), (64, "reset", "page"), (79, "reboot", "page"),
    (95, "reset", "page"), (109, "reset", "page"), (999, "none", "ticket")])
def test_c065_actions(number: int, action: str, severity: str) -> None:
    """94 was taken for a dead GPU, 109 ignored, 63 paged, 999 raised."""
    line = cases()["C065"]["input"].splitlines()[0].replace(": 94,", f": {number},")
    (finding,) = found(told(of_text(line)))

    assert (finding.action, finding.severity) == (action, severity)
    assert "replace" in finding.text or number != 64
    assert "Contained: CE User Channel" in finding.text or number != 999


@pytest.mark.parametrize(("story", "events", "want"), [
    ("45 belongs to its cause", [log(31), log(45, 1), log(45, 2, B)], []),
    ("48 with what was done about it", [log(48), log(63, 1), log(171, 2), log(45, 3)], [("xid.48", "page")]),
    ("48 with 95", [log(48), log(95, 1)], [("xid.95", "page"), ("xid.48", "page")]),
    ("163, then 162", [log(163), log(162, 5)], []),
    ("162, then 163", [log(162), log(163, 5)], [("xid.163", "ticket")]),
])
def test_numbers_that_belong_together(story: str, events: list[Event], want: list[tuple[str, str]]) -> None:
    """One fault was three alerts."""
    assert sorted(codes(told(*events))) == sorted(want), story


def test_what_came_with_it_is_told() -> None:
    """The alert of the cause names what followed."""
    assert "with Xid 45" in found(told(log(79), log(45, 1)))[0].text
    assert "with Xid 63, 171" in found(told(log(48), log(63, 1), log(171, 2)))[0].text


def test_c055_and_1357_the_line_says_how_bad() -> None:
    """Nonfatal in the line wins over a table that calls the number fatal."""
    lines = cases()["C055"]["input"]
    assert codes(told(of_text(lines["a"]))) == [("xid.145", "ticket")]
    assert codes(told(of_text(lines["b"]))) == [("xid.149", "page")]
    assert codes(told(log(149))) == [("xid.149", "page")]  # it does not say


@pytest.mark.parametrize(("line", "want"), [
    ("nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", ("page", "reset")),
    ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress", ("ticket", "reboot")),
    ("nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 22013, Correctable, minion, instance=1", None),
    ("nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 11012, Non-fatal, Link 3 x", None),
    ("nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 22013, Fatal, unhandled interrupt", ("page", "reset")),
])
def test_switch_errors(line: str, want: tuple[str, str] | None) -> None:
    """A corrected error of a switch is only counted; a fatal one wakes somebody."""
    assert [(f.severity, f.action) for f in found(told(of_text(line)))] == ([want] if want else [])


def test_bursts() -> None:
    """Five incidents on one GPU in a day: one more reset will not mend it."""
    events = [log(119 if n % 2 else 62, n * HOUR) for n in range(5)]

    assert "xid.burst" not in [f.code for f in found(told(*events[:4]), 5 * HOUR)]
    (burst,) = [f for f in found(told(*events), 5 * HOUR) if f.code == "xid.burst"]
    assert (burst.action, burst.times) == ("replace", 5)


def test_a_severity_of_the_owner() -> None:
    """`rules: {xid: {79: {severity: ticket}, 13: {severity: page}, 92: {severity: log}}}`."""
    history = told(log(79), log(13), log(92))

    assert sorted(codes(history, overrides={79: "ticket", 13: "page", 92: "log"})) == [
        ("xid.13", "page"), ("xid.79", "ticket")]


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_c058_recovery_action_by_the_log() -> None:
    """154 names the action; 154 to None is the end of it; a broken line is a 154 of which the action is not known."""
    lines = cases()["C058"]["input"]
    needed = of_text(lines["a"])
    assert [(f.code, f.severity, f.action) for f in found(told(needed))] == [("xid.154", "page", "reset")]
    assert found(told(needed, of_text(lines["b"], 30))) == []
    assert [(f.severity, f.action) for f in found(told(of_text(lines["c"])))] == [("ticket", "none")]


def of_recovery(action: str, at_s: float = 0.1) -> Event:
    """Xid 154 of GPU A."""
    return of_text(f"NVRM: Xid (PCI:{A}): 154, GPU recovery action changed from 0x0 (None) to {action}", at_s)


@pytest.mark.parametrize(("story", "events", "want"), [
    # leptonai/gpud's kmsg_test.go: 149 and, a millisecond later, 154
    ("a link's error and the driver's word on it", [log(149), of_recovery("0x4 (Drain and Reset)")],
     [("xid.149", "page", "drain_reset")]),
    ("the driver asks for less than the table", [log(95), of_recovery("0x3 (Drain P2P)")],
     [("xid.95", "page", "reset")]),
    ("of an error that pages nobody it is the page", [log(31), of_recovery("0x1 (GPU Reset Required)")],
     [("xid.154", "page", "reset")]),
    ("of another GPU", [log(149, device=B), of_recovery("0x1 (GPU Reset Required)")],
     [("xid.154", "page", "reset"), ("xid.149", "page", "reset")]),
    ("an hour later", [log(149), of_recovery("0x2 (Node Reboot Required)", HOUR)],
     [("xid.154", "page", "reboot"), ("xid.149", "page", "reset")]),
    ("an application's error asks for less, and stands beside it", [log(94), of_recovery("0x1 (GPU Reset Required)")],
     [("xid.154", "page", "reset"), ("xid.94", "page", "restart_app")]),
])
def test_the_driver_s_word_on_an_error_is_no_second_page(story: str, events: list[Event], want: list[tuple[str, ...]],
                                                          ) -> None:
    """Xid 149 paged as a link's fault, and the 154 that the driver wrote beside it as a GPU's: two pages of one."""
    assert [(f.code, f.severity, f.action) for f in found(told(*events), HOUR)] == want, story


def test_the_driver_s_word_comes_again() -> None:
    """Eight hours after a double-bit error it asked for a reboot, and paged nobody; and of one that it had said but
    once, the error's day was over 4 s before its own: a page, a day later."""
    once = [log(48), of_recovery("0x1 (GPU Reset Required)", 4)]
    assert [f.code for f in found(told(*once), DAY + 2)] == []
    again = [*once, of_recovery("0x2 (Node Reboot Required)", 8 * HOUR)]
    assert [(f.code, f.action) for f in found(told(*again), 8 * HOUR)] == [
        ("xid.154", "reboot"), ("xid.48", "drain_reset")]


def test_the_stronger_of_table_and_driver() -> None:
    """The driver says "reboot" of a GPU for which the table asks a reset."""
    history = told(log(119))
    assert found(history)[0].action == "reset"
    assert found(history, recovery={A: "reboot"})[0].action == "reboot"
    assert found(history, recovery={A: "drain_p2p"})[0].action == "reset"
    assert found(told(log(94)), recovery={A: "reset"})[0].action == "restart_app"  # not about this error


@pytest.mark.parametrize(("story", "after", "at_s", "want"), [
    ("an hour later it still needs a reset", (), 2 * HOUR, ["xid.119"]),
    ("a day later nobody will come", (), 25 * HOUR, []),
    ("the machine has booted", (Event("boot", "", None, T0 + 30, T0 + 30),), 60, []),
    ("154 to None", (of_text(cases()["C058"]["input"]["b"].replace("0009:01:00", A), 30),), 60, []),
    ("it fails again after the boot", (Event("boot", "", None, T0 + 30, T0 + 30), log(119, 50)), 60, ["xid.119"]),
])
def test_how_a_reset_class_error_ends(story: str, after: tuple[Event, ...], at_s: float, want: list[str]) -> None:
    """Every alert has a way to clear."""
    assert [c for c, _ in codes(told(log(119), *after), at_s)] == want, story


def test_a_reset_mends_it() -> None:
    """NVML's counters begin anew: the GPU was reset, or the driver loaded again."""
    history = told(log(119))
    history.reset(A, T0 + 30)
    assert found(history) == []
    history.fold([log(119, 40)], lambda _: None)
    assert [c for c, _ in codes(history)] == ["xid.119"]


def test_the_driver_says_that_all_is_well() -> None:
    """Where NVML tells that no action is needed, an hour is enough."""
    assert codes(told(log(109)), 59 * 60.0, recovery={A: "none"}) == [("xid.109", "page")]
    assert codes(told(log(109)), 61 * 60.0, recovery={A: "none"}) == []


def test_a_drill_s_line_ends_by_itself_and_marks_nothing_else() -> None:
    """The drill's Xid 79 fires, says so, and is gone; the real one beside it is no drill and stays."""
    drill = Event("xid", A, 79, T0, T0, detail={"text": "GPU has fallen off the bus.", "drill": True})
    (finding,) = found(told(drill))
    assert (finding.code, finding.severity) == ("xid.79", "page")
    assert "DRILL" in finding.text
    assert found(told(drill), 150) == []
    both = found(told(drill, log(79, 10)), 150)
    assert [f.code for f in both] == ["xid.79"]
    assert "DRILL" not in both[0].text


def test_an_application_s_error_ends_after_an_hour() -> None:
    """94 asks for a restart of the application, and then there is nothing left to do."""
    assert codes(told(log(94)), 59 * 60.0) == [("xid.94", "page")]
    assert codes(told(log(94)), 61 * 60.0) == []
