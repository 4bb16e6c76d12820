"""The driver's lines in the kernel log: every form that it is known to write, and what anybody else may write."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.hardware.lines import MOST_CHARS, Line, Reader, Record, bdf, line_of, record_of
from tests.hardware.cases import cases, golden

NOW = 1_790_000_000.0


def said(line: Line | None) -> dict[str, Any] | None:
    """The fields of a line that say something; `kind` always."""
    if line is None:
        return None
    plain = {f.name: getattr(line, f.name) for f in fields(line)}
    empty = Line(line.kind)
    return {"kind": line.kind} | {
        name: list(value) if name == "words" else value
        for name, value in plain.items()
        if value != getattr(empty, name)
    }


def one(text: str) -> Line:
    """What the message of a log's line says."""
    record = record_of(text)
    assert record is not None
    line = line_of(record.message)
    assert line is not None
    return line


# --- every form ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", golden(), ids=lambda e: e["line"][:60])
def test_every_form_of_the_driver(entry: dict[str, Any]) -> None:
    """A form that a tool did not match was an error nobody heard of: MIG, no `PCI:`, a switch's line without a link."""
    assert said(line_of(entry["line"])) == entry["want"]


PREFIXES = ("", "[12345.678901] ", "kernel: ", "kernel: [12345.678901] ", "[...] ", "[Fri Aug 30 11:43:09 2024] ",
            "<4>[  345.000001] ", "Nov 29 23:44:01 gpu-17 kernel: ", "Nov 29 23:44:01 gpu-17 kernel: [12345.678901] ",
            "[12345.678901][ T1234] ", "[12345.678901] [   C12] ",
            "2026-11-29T23:44:01.123456+00:00 gpu-17 kernel: ", "4,1234,567890,-;", "6,1,2,c,caller=T1;",
            # dmesg -x, -x --time-format iso, --time-format iso, -e (an hour's first and the others), -d; Talos
            "kern  :err   : [12345.678901] ", "kern  :notice: 2026-11-29T20:08:25,000000+00:00 ",
            "2026-11-29T20:08:25,000000+00:00 ", "[Nov29 20:08] ", "[  +0.000012] ", "[12345.678901 <    0.000012>] ",
            "192.168.11.119: kern: warning: [2026-04-22T21:27:51.288830314Z]: ",
            # journalctl -o short-precise, short-iso, short-full, short-monotonic, short-unix; RFC 5424
            "Nov 29 23:44:01 gpu-17 kern.err kernel: [12345.678901] ",  # BusyBox
            "Nov 29 23:44:01.123456 gpu-17 kernel: ", "2026-11-29T23:44:01+0000 gpu-17 kernel: ",
            "Sun 2026-11-29 23:44:01 UTC gpu-17 kernel: ", "[12345.678901] gpu-17 kernel: ",
            "1796046320.123456 gpu-17 kernel: ", "<3>1 2026-11-29T23:44:01.123456Z gpu-17 kernel - - - ",
            '<3>1 2026-11-29T23:44:01.123456Z gpu-17 kernel - - [meta sequenceId="29"] ')


@pytest.mark.parametrize("prefix", PREFIXES)
def test_whatever_stands_before_the_message(prefix: str) -> None:
    """dmesg, journald, syslog and /dev/kmsg put different things before one message."""
    for entry in golden():
        record = record_of(prefix + entry["line"])
        assert record is not None
        assert record.trusted
        assert said(line_of(record.message)) == entry["want"]


def test_times_of_records() -> None:
    """An event was dated by the hour in which it was read, and an old one alarmed again."""
    assert record_of("4,1234,567890,-;x") == Record("x", 0, 4, 1234, 567890, None)
    stamped = record_of("[12345.5] x")
    assert stamped is not None
    assert stamped.usec == 12_345_500_000
    bsd = record_of("Nov 29 23:44:01 gpu-17 kernel: x", datetime(2026, 12, 3, tzinfo=UTC).timestamp())
    assert bsd is not None
    assert bsd.time(0.0) == datetime(2026, 11, 29, 23, 44, 1).timestamp()  # noqa: DTZ001  (local, as syslog writes)
    iso = record_of("2026-11-29T23:44:01+02:00 gpu-17 kernel: x")
    assert iso is not None
    assert iso.time(0.0) == datetime(2026, 11, 29, 21, 44, 1, tzinfo=UTC).timestamp()
    talk = record_of("Fri Aug 30 11:43:09 2024] x")
    assert talk is not None
    assert (talk.message, talk.time(0.0)) == ("Fri Aug 30 11:43:09 2024] x", None)
    assert record_of(" SUBSYSTEM=pci") is None
    assert record_of("[drm] ready") == Record("[drm] ready")


@pytest.mark.parametrize(("text", "want"), [
    ("Sun 2026-11-29 23:44:01 UTC gpu-17 kernel: x", datetime(2026, 11, 29, 23, 44, 1, tzinfo=UTC)),
    ("2026-11-29T23:44:01,500000+02:00 x", datetime(2026, 11, 29, 21, 44, 1, 500_000, tzinfo=UTC)),
    ("a: kern: info: [2026-11-29T23:44:01.288830314Z]: x", datetime(2026, 11, 29, 23, 44, 1, 288_830, tzinfo=UTC)),
    ("1796046320.5 gpu-17 kernel: x", datetime(2026, 11, 30, 13, 45, 20, 500_000, tzinfo=UTC)),
    ("[Nov29 20:08] x", datetime(2026, 11, 29, 20, 8)),  # noqa: DTZ001
    ("Dec 31 23:59:58 gpu-17 kernel: x", datetime(2025, 12, 31, 23, 59, 58)),  # noqa: DTZ001
    ("Feb 29 12:00:00.25 gpu-17 kernel: x", None),  # neither this year nor the last had one
    ("[  +0.000012] x", None),
])
def test_a_date_in_every_form(text: str, want: datetime | None) -> None:
    """A file with December's lines was read in January: each was of next December, and so of now."""
    record = record_of(text, datetime(2026, 12, 3, tzinfo=UTC).timestamp())
    assert record is not None
    assert (record.message, record.time(0.0)) == ("x", None if want is None else want.timestamp())


@pytest.mark.parametrize("first", [
    ("NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: (PCI ID: 10de:26b5) installed in this system has"),
    ("NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:26b5)", "NVRM: installed in this system has"),
])
def test_gpu_lost_in_three_records(first: tuple[str, str]) -> None:
    """dmesg splits one message in three lines; only the last says that the GPU is lost, and it names none."""
    reader = Reader()
    told = [reader.read(message) for message in (*first, "NVRM: fallen off the bus and is not responding to commands.")]

    assert [line.kind if line else None for line in told] == ["more", None, "lost"]
    assert told[2] is not None
    assert told[2].device == "0000:b3:00"


def test_a_gpu_that_is_not_supported_is_not_lost() -> None:
    """The message begins alike and ends otherwise; what follows later must not complete it."""
    reader = Reader()
    for message in ("NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:26b5)",
                    "NVRM: installed in this system is not supported by the",
                    "NVRM: fallen off the bus and is not responding to commands."):
        line = reader.read(message)
        assert line is None or line.kind == "more"


# --- the public cases ------------------------------------------------------------------------------------------------


def test_c052_old_drivers_print_no_prefix() -> None:
    """No `PCI:`, no pid, no name; the GPU's UUID stands in the line before, which is no event."""
    first, second = (one(line) for line in cases()["C052"]["input"].splitlines())

    assert (first.kind, first.uuid) == ("map", "GPU-00000000-1111-2222-3333-444444444444")
    assert (second.kind, second.number, second.device, second.pid, second.process) == (
        "xid", 14, "0000:03:00", None, None)
    assert second.device == first.device


def test_c053_unknown_pid_and_name() -> None:
    """`pid='<unknown>'` is no process, and the next line is another error with a real one."""
    events = [one(line) for line in cases()["C053"]["input"].splitlines()]

    assert [e.number for e in events] == [13, 13, 109]
    assert [(e.pid, e.process) for e in events] == [(None, None), (None, None), (17978, "pt_main_thread")]


def test_c055_nvlink5_says_how_bad_it_is() -> None:
    """Nonfatal was reported as fatal; a link of -1 and the injected flag were not read."""
    a, b, c = (one(cases()["C055"]["input"][name]) for name in "abc")

    assert (a.number, a.unit, a.fatal, a.link, a.injected, a.error_status) == (145, "RLW_RXPIPE", False, 13, False, 8)
    assert (b.number, b.fatal, b.link, b.subcode) == (149, True, -1, 0)
    assert (c.number, c.fatal, c.link, c.subcode) == (149, True, 0, 37)


def test_c056_names_hold_colons() -> None:
    """A process called VLLM::Worker_TP0 broke what splits at colons."""
    event = one(cases()["C056"]["input"])

    assert (event.number, event.device, event.pid, event.process) == (31, "0018:01:00", 8767, "VLLM::Worker_TP0")


def test_c058_recovery_action_and_a_line_that_is_broken() -> None:
    """One bracket too many ended a monitor; the line is an Xid 154 of which the action is not known."""
    a, b, c = (one(cases()["C058"]["input"][name]) for name in "abc")

    assert (a.number, a.action_before, a.action) == (154, 0, 1)
    assert (b.number, b.action_before, b.action) == (154, 4, 0)
    assert (c.number, c.action, c.text) == (154, None, "GPU recovery action) changed (")


@pytest.mark.parametrize(("rest", "want"), [
    ("79 GPU has fallen off the bus.", {"number": 79}),  # newer drivers word their lines anew: the number is the key
    ("99999999, x", {"number": 99999999}),
    ("31, pid=12, name=, Ch 8", {"number": 31, "pid": 12, "process": None, "text": "Ch 8"}),
    ("145, RLW_RXPIPE Non-fatal XC0 i0 Link 13 (0x0409a0c2 0x8)", {"fatal": False, "link": 13, "injected": False}),
    ("145, RLW_RXPIPE NONFATAL XC0 i0 Link 13 (0x0409a0c2 0x8)", {"fatal": False}),
    ("145, RLW_RXPIPE FATAL XC0 i12 Link 13 (0x0409a0c2 0x8)", {"fatal": True, "injected": True}),
    # as the driver pads them (gpud's kmsg_test.go), and units with what they are a part of (its nvlink_logs_test.go)
    ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000)",
     {"unit": "NETIR_LINK_EVT", "fatal": True, "link": 1, "subcode": 33}),
    ("145, RLW_RXPIPE      Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008", {"unit": "RLW_RXPIPE", "fatal": False}),
    ("146, TLW_RX/TLW_RX_PIPE0 Nonfatal XC0 i0 Link 00 (0x0000000a 0x00000001 0x00000000 0x00000000)",
     {"unit": "TLW_RX/TLW_RX_PIPE0", "fatal": False, "link": 0, "error_status": 1}),
    ("148, NVLPW_CTRL/NVLPW Nonfatal XC0 i0 Link 00 (0x0000000f 0x80000000)", {"fatal": False}),
    ("154, GPU recovery action changed from 0x0 (None) to 0x1 (Reset (of the GPU))", {"action": 1}),
    ("154, GPU recovery action changed from 0x0 to 0x2", {"action_before": 0, "action": 2}),
    ("154, GPU recovery action changed from 0x0 (None) to 0x", {"number": 154, "action": None}),
])
def test_the_words_of_a_line_may_change(rest: str, want: dict[str, Any]) -> None:
    """A wording that nobody had seen cost an Xid, made a harmless one a page, or hid that a reset was asked for."""
    event = one(f"NVRM: Xid (PCI:0000:1a:00): {rest}")

    assert {name: getattr(event, name) for name in want} == want


def test_c059_the_log_s_address_is_nvml_s() -> None:
    """000b:00:00 in the log is 0000000B:00:00.0 in NVML."""
    case = cases()["C059"]["input"]

    assert [bdf(bus_id) == one(case["log"]).device for bus_id in case["nvml_bus_ids"]] == [False, True]


def test_c062_kmsg_tells_microseconds_since_boot() -> None:
    """The record's numbers are not the Xid's, and what begins with a space continues the record."""
    case = cases()["C062"]["input"]
    boot_at = datetime.fromisoformat(case["boot_time"]).timestamp()
    text, more, _ = case["record"].split("\n")
    record = record_of(text)
    assert record is not None
    event = one(case["record"])

    assert (event.number, event.pid, event.process) == (119, 40718, "python")
    assert (record.seq, record.level, record.facility) == (4711, 3, 0)
    assert record.time(boot_at) == datetime(2026, 11, 29, 0, 30, 43, 308145, tzinfo=UTC).timestamp()
    assert record_of(more) is None


def test_c064_an_injected_fault_says_so() -> None:
    """A GPU that is lost has no UUID any more, and its event must not be lost with it; i1 is an injected one."""
    case = cases()["C064"]["input"]

    assert (one(case["log"]).number, one(case["log"]).device) == (79, "0000:43:00")
    assert (one(case["log2"]).number, one(case["log2"]).injected, one(case["log2"]).error_status) == (145, True, 8)


@pytest.mark.parametrize("number", [94, 63, 64, 79, 95, 109, 999])
def test_c065_every_number_is_read(number: int) -> None:
    """An unknown number raised, and the monitor was gone."""
    line = cases()["C065"]["input"].splitlines()[0].replace(": 94,", f": {number},")

    assert one(line).number == number


def test_c110_only_the_kernel_s_own_words_count() -> None:
    """A local user wrote a fake Xid 79, and a tool reset the GPU."""
    a, b, c = (record_of(cases()["C110"]["input"][name]) for name in "abc")
    assert a is not None
    assert b is not None
    assert c is not None

    assert (a.facility, a.trusted) == (1, False)
    assert (b.facility, b.trusted) == (0, True)
    assert said(line_of(b.message)) == {
        "kind": "xid", "device": "0000:1a:00", "number": 79, "text": "GPU has fallen off the bus."}
    assert c.trusted
    assert line_of(c.message) is None


@pytest.mark.parametrize("text", [
    "Nov 29 23:44:01 gpu-17 myapp[12]: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "<11>Nov 29 23:44:01 gpu-17 kernel: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "<11>NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "12,1,2,-;NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "Nov 29 23:44:01 gpu-17 user.err kernel: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "user  :err   : [12345.678901] NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "gpu-17: daemon: err: [2026-04-22T21:27:51Z]: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "<11>1 2026-11-29T23:44:01Z gpu-17 kernel - - - NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "<3>1 2026-11-29T23:44:01Z gpu-17 myapp 12 - - NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    "Sun 2026-11-29 23:44:01 UTC gpu-17 myapp[12]: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.",
    ('{"__REALTIME_TIMESTAMP": "1796046320123456", "_TRANSPORT": "kernel", "SYSLOG_FACILITY": "1", '
     '"SYSLOG_IDENTIFIER": "NVRM", "MESSAGE": "Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."}'),
])
def test_c110_in_other_logs(text: str) -> None:
    """The same line by `logger`, by another program's name, or by /dev/kmsg with a daemon's facility."""
    record = record_of(text)
    assert record is not None
    assert not record.trusted


@pytest.mark.parametrize(("fields", "xid"), [
    ('"_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "SYSLOG_IDENTIFIER": "kernel"', 79),
    ('"_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel"', 79),  # older journald leaves the kernel's facility out
    ('"_TRANSPORT": "syslog", "SYSLOG_FACILITY": "0", "SYSLOG_IDENTIFIER": "kernel"', None),  # logger -t kernel
    ('"SYSLOG_FACILITY": "0"', None),
])
def test_lines_of_the_journal_in_json(fields: str, xid: int | None) -> None:
    """`journalctl -o json` into a file: read as text, no line of it was the driver's."""
    record = record_of('{"__REALTIME_TIMESTAMP": "1796046320123456", "PRIORITY": "3", "MESSAGE": "NVRM: Xid '
                       f'(PCI:0000:1a:00): 79, GPU has fallen off the bus.", {fields}}}')
    line = None if record is None else line_of(record.message)

    assert (None if line is None else line.number) == xid
    if record is not None:
        assert (record.trusted, record.at) == (True, 1796046320.123456)


@pytest.mark.parametrize("text", ['{"a"', "{}", '{"__REALTIME_TIMESTAMP": "x", "_TRANSPORT": "kernel"}', "{" * 70_000,
                                  '{"__REALTIME_TIMESTAMP": 1, "_TRANSPORT": "kernel", "MESSAGE": null}'[:-9]])
def test_json_that_is_no_entry(text: str) -> None:
    """A line that was cut, and one that is something else."""
    assert record_of(text) is None


def test_a_process_cannot_name_the_cause() -> None:
    """A name is the user's: what stands in it is neither the error's number nor its cause."""
    event = one("NVRM: Xid (PCI:0000:1a:00): 13, pid=9, name=Xid 79: 79, Ch 00000008 caused by previous Xid 31, or so")

    assert (event.number, event.caused_by, event.process) == (13, None, "Xid 79: 79")


# --- whatever else ---------------------------------------------------------------------------------------------------

TOKENS = (
    "NVRM: ", "NVRM: Xid (", "PCI:", "0000:1a:00", "0000:1a:00.0", "): ", " GPU-I:05", " GPU-CI:00", "79", ", ",
    "pid=12", "²", "pid='<unknown>'", "name=", "a:b", "SXid (", "nvidia-nvswitch0: SXid (PCI:", "Fatal", "Link 3 ",
    "caused by previous Xid 31", "Rate limiting ", "The NVIDIA GPU ", "\\x0a", "\n", "4,1,2,-;", "[1.0] ", "0x1",
    "(", ")", "999999999999", "\x00",
)  # fmt: skip
MUTATED = st.tuples(st.sampled_from([e["line"] for e in golden()]), st.integers(0, 200), st.text(max_size=6)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
)
LINES = st.one_of(st.lists(st.sampled_from(TOKENS), max_size=14).map("".join), MUTATED, st.text(max_size=80))
XID_AT_START = re.compile(r"(?:NVRM|nvidia_dev_xid): Xid \([^)]*\): (\d+)")


def check(text: str, reader: Reader) -> None:
    """No exception; an Xid only where the message begins as the driver's does, with the number that it tells."""
    record = record_of(text)
    if record is None:
        return
    line = reader.read(record.message)
    if line is None:
        return
    if line.kind == "xid":
        start = XID_AT_START.match(record.message)
        assert start is not None
        assert line.number == int(start[1])
    if line.kind in ("xid", "sxid", "lost"):
        assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}|", line.device)


@given(LINES)
@settings(max_examples=300)
def test_no_line_breaks_the_parser(text: str) -> None:
    """A line that somebody could write: it does not end the reading, and is no Xid that the driver did not tell."""
    check(text, Reader())


def many(seed: int, count: int) -> Iterator[str]:
    """Lines put together of pieces, and known ones with a few characters put in, taken out or exchanged."""
    dice = random.Random(seed)
    known = [e["line"] for e in golden()]
    for _ in range(count):
        if dice.random() < 0.5:
            yield "".join(dice.choices(TOKENS, k=dice.randrange(14)))
            continue
        line = list(dice.choice(known))
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(line) + 1)
            line[at : at + dice.randrange(3)] = dice.choice((dice.choice(TOKENS), chr(dice.randrange(0x250)), ""))
        yield "".join(line)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_twenty_thousand_lines(seed: int) -> None:
    """Lines by the thousand, read one after the other as the source does."""
    reader = Reader()
    for text in many(seed, 1000):
        check(text, reader)


@pytest.mark.heavy
@given(st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_million_lines(seed: int) -> None:
    """The same in the long run."""
    reader = Reader()
    for text in many(seed, 10_000):
        check(text, reader)


@pytest.mark.parametrize("part", [
    "NVRM: Xid (PCI:", "NVRM: Xid (PCI:0000:1a:00): 13, pid=1, name=", "NVRM: Xid (PCI:0000:1a:00): 145, ",
    "0x1, ", "[", " ",
    "NVRM: Rate limiting ", "fabricmanager: detected NVSwitch fatal error 1 on ", " caused by previous Xid 3",
    "Nov 29 ", "kern :", "a ", "<3>1 2026-11-29T23:44:01Z a kernel - - [", "NVRM: Xid (PCI:0000:1a:00): 145, A",
])
def test_no_line_takes_long(part: str) -> None:
    """A line as long as a record may be, made for a pattern that looks back, is read in milliseconds."""
    heads = ("", "NVRM: Xid (PCI:0000:1a:00): 145, ", "NVRM: Rate limiting ",
             "fabricmanager: detected NVSwitch fatal error 1 on ")
    began = time.process_time()
    for head in heads:
        check(head + part * (2 * MOST_CHARS // len(part)), Reader())
    assert time.process_time() - began < 1.0
