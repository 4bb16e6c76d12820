"""What the NVIDIA driver writes into the kernel log, line by line. Pure: text in, facts out, never an exception.

Only the beginning of a message counts: what a process is called, or what a message quotes, is not the driver's word.
Every pattern is anchored and reads a line once, whatever the line holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple

MOST_CHARS = 8192  # as much as /dev/kmsg gives of one record
MOST_JSON_CHARS = 1 << 16  # of one entry of the journal with all its fields
KERNEL = 0  # the facility that nobody but the kernel can write
USER = 1

LineKind = Literal["xid", "sxid", "lost", "map", "limited", "more"]
_ADDRESS = r"[0-9A-Fa-f]{1,8}:[0-9A-Fa-f]{1,2}(?::[0-9A-Fa-f]{1,2})?(?:\.[0-7])?"


def bdf(text: str) -> str:
    """A PCI address as domain:bus:device in lower-case hex, from NVML's, the kernel's or lspci's spelling.

    `00000000:1B:00.0`, `PCI:0000:1b:00`, `000b:00:00` (three parts: no function) and `1b:00.0` (domain 0) are
    understood. Raises ValueError for anything else.
    """
    found = re.fullmatch(
        r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-7])?", text.strip(), re.IGNORECASE
    )
    if found is None:
        raise ValueError(f"{text!r} is not a PCI address; expected domain:bus:device, as in 0000:1b:00")
    domain, bus, device = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


# ---- a record, with whatever stands before the message ----


class Record(NamedTuple):
    """One log record. `facility` 0 is the kernel's; None: this log does not tell. `usec`: since boot; `at`: unix s."""

    message: str
    facility: int | None = None
    level: int | None = None
    seq: int | None = None
    usec: int | None = None
    at: float | None = None

    @property
    def trusted(self) -> bool:
        """Nobody but the kernel (or, in a log of text, who may write that file) can have written it."""
        return self.facility in (KERNEL, None)

    def time(self, boot_at: float) -> float | None:
        """When it was written, unix seconds; `boot_at` is when the machine booted."""
        return self.at if self.usec is None else boot_at + self.usec / 1e6


_KMSG = re.compile(r"(\d{1,5}),(\d{1,20}),(\d{1,20}),[^;\n]{0,256};")
_ISO = r"\d{4}-\d\d-\d\d[T ][\d:.,+Z-]{8,30}"
_SYSLOG = re.compile(  # of a syslog file, and of `journalctl --output=short` in its forms with a date
    r"(?:<(?P<pri>\d{1,3})>)?"
    r"(?:(?P<bsd>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,6})?)|(?P<iso>" + _ISO + r")"
    r"|[A-Z][a-z]{2} (?P<day>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?) (?P<zone>[A-Za-z0-9+-]{1,6}))"
    r" (?P<host>[^\s]{1,255}) (?:(?P<from>[a-z]{3,8}[0-7]?)\.[a-z]{3,7} )?"  # BusyBox: kern.err
    r"(?P<tag>[^\s:\[]{1,64})(?:\[\d{1,10}\])?: "
)
_SHORT = re.compile(  # journalctl's short-monotonic and short-unix
    r"(?:\[(?P<stamp> *\d{1,12}\.\d{1,6})\]|(?P<unix>\d{9,11}\.\d{1,6})) [^\s:]{1,255} kernel: "
)
_RFC5424 = re.compile(
    r"<(?P<pri>\d{1,3})>\d{1,2} (?P<iso>[^\s]{1,40}) [^\s]{1,255} (?P<tag>[^\s]{1,48}) [^\s]{1,128} [^\s]{1,32}"
    r" (?:-|(?:\[[^\]\n]{0,1024}\]){1,8}) \ufeff?"
)
_CALLER = r"(?:\[ *[TC]\d{1,10}\] ?)?"  # the thread or CPU, where the kernel was built to tell (PRINTK_CALLER)
_DECODED = (  # `dmesg --decode`; Talos, with the node before it
    r"(?:(?:[^\s:]{1,255}: )?(?P<facility>kern|user|mail|daemon|auth|syslog|lpr|news|uucp|cron|authpriv|ftp|local[0-7])"
    r" {0,8}: ?(?:emerg|alert|crit|err|error|warn|warning|notice|info|debug) {0,8}: )?"
)
_BARE = re.compile(
    r"(?:<(?P<pri>\d{1,3})>)?" + _DECODED + r"(?:kernel: )?"
    r"(?:(?:\[(?P<stamp>[^\]\n]{1,40})\]:? ?|(?P<iso>" + _ISO + r") )" + _CALLER + r")?(?:kernel: )?"
)
_SECONDS = re.compile(r" *(\d{1,12})\.(\d{1,6})(?: <[^>]{1,20}>)?")
_SPAN = re.compile(r"\.\.\.| *\+\d{1,12}\.\d{1,6}|< *\d{1,12}\.\d{1,6}>")  # since the line before it: no time
_DAY_S = 86400.0
# What dmesg and journalctl indent below "NVRM: The NVIDIA GPU …"; by itself it says nothing.
_REST_OF_LOST = ("NVRM: (PCI ID:", "NVRM: installed in this system has", "NVRM: fallen off the bus and is not respond")


def record_of(text: str, now: float = 0.0) -> Record | None:
    """A record of /dev/kmsg, of dmesg, of the journal or of a syslog file; None for what continues the one before.

    `now`: unix seconds; a date that tells no year is the last such day before it.
    """
    if text.startswith((" ", "\t")):  # the key=value lines after a record, or the rest of a message of several lines
        rest = text[:MOST_CHARS].strip()
        return Record(rest) if rest.startswith(_REST_OF_LOST) else None
    if text.startswith("{"):
        return _of_json(text)
    text = text[:MOST_CHARS].partition("\n")[0].rstrip("\r")
    kmsg = _KMSG.match(text)
    if kmsg is not None:
        priority = int(kmsg[1])
        return Record(text[kmsg.end() :], priority >> 3, priority & 7, int(kmsg[2]), int(kmsg[3]))
    for pattern, read in ((_SYSLOG, _of_syslog), (_SHORT, _of_short), (_RFC5424, _of_syslog), (_BARE, _of_bare)):
        found = pattern.match(text)
        if found is not None:
            return read(found, text[found.end() :], now)
    return None


def entry_of(entry: Mapping[str, Any]) -> Record | None:
    """An entry of the journal, by its fields; None for what journald has not read from the kernel.

    Raises KeyError, TypeError or ValueError where it has no time.
    """
    at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    if entry.get("_TRANSPORT") != "kernel":
        return None
    name, told = (field_of(entry.get(key)) for key in ("SYSLOG_IDENTIFIER", "SYSLOG_FACILITY"))
    facility = int(told) if told.isdecimal() else KERNEL if name == "kernel" and not told else USER
    message = field_of(entry.get("MESSAGE"))
    if facility != KERNEL and name:  # of a user's line journald takes "NVRM: " for the name of a program
        message = f"{name}: {message}"
    return Record(message.replace("\n", "\\x0a"), facility, at=at)


def field_of(told: Any) -> str:
    """A journal's field: text, its bytes where they are no UTF-8, the first where it has several; "" where it lacks."""
    if isinstance(told, list) and told and all(isinstance(byte, int) and 0 <= byte < 256 for byte in told):
        return bytes(told).decode("utf-8", "replace")
    if isinstance(told, list):
        return field_of(told[0]) if told else ""
    return told if isinstance(told, str) else ""


def _of_json(text: str) -> Record | None:
    """A line of `journalctl --output=json`."""
    try:
        entry = json.loads(text[:MOST_JSON_CHARS])
        return entry_of(entry) if isinstance(entry, dict) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _of_syslog(found: re.Match[str], told: str, now: float) -> Record:
    dates = found.groupdict()
    if bsd := dates.get("bsd"):
        at = _last_day(bsd, "%b %d %H:%M:%S.%f" if "." in bsd else "%b %d %H:%M:%S", now)
    elif day := dates.get("day"):
        at = _date(f"{day}+00:00" if dates["zone"] in ("UTC", "GMT") else day, now)
    else:
        at = _date(dates["iso"], now)
    inner = _BARE.match(told)
    assert inner is not None  # noqa: S101
    usec, _ = _stamp(inner["stamp"], now)
    message = told if usec is None else told[inner.end() :]
    of_kernel = found["tag"] == "kernel" and dates.get("from") in (None, "kern")
    return Record(message, _facility(found["pri"], None if of_kernel else USER), at=at)


def _of_short(found: re.Match[str], told: str, now: float) -> Record:
    usec, _ = _stamp(found["stamp"], now)
    return Record(told, usec=usec, at=None if found["unix"] is None else float(found["unix"]))


def _of_bare(found: re.Match[str], message: str, now: float) -> Record:
    usec, at = _stamp(found["stamp"], now) if found["iso"] is None else (None, _date(found["iso"], now))
    stamp = found["stamp"]
    if stamp and usec is None and at is None and not _SPAN.fullmatch(stamp):
        message = found.string[found.start("stamp") - 1 :]  # it belongs to the message
    facility = None if found["facility"] in (None, "kern") else USER
    return Record(message, _facility(found["pri"], facility), usec=usec, at=at)


def _facility(priority: str | None, otherwise: int | None) -> int | None:
    return otherwise if priority is None else int(priority) >> 3 or otherwise


def _stamp(text: str | None, now: float) -> tuple[int | None, float | None]:
    """What stands in dmesg's brackets: seconds since boot as usec, or a date as unix seconds."""
    if text is None:
        return None, None
    seconds = _SECONDS.fullmatch(text)
    if seconds is not None:
        return int(seconds[1]) * 1_000_000 + int(seconds[2].ljust(6, "0")), None
    return None, _date(text, now)


def _date(text: str, now: float) -> float | None:
    """A date of dmesg -T or -e, or of ISO 8601; without a zone it is local."""
    try:
        return datetime.fromisoformat(text.replace(",", ".")).timestamp()
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp()  # noqa: DTZ007  (as dmesg writes it)
    except (ValueError, OverflowError):
        return _last_day(text, "%b%d %H:%M", now)


def _last_day(text: str, form: str, now: float) -> float | None:
    """A local date without its year, as unix seconds: the last such day before `now`, or at most a day ahead."""
    year = datetime.fromtimestamp(now).year  # noqa: DTZ006  (as syslog writes it)
    for told in (year, year - 1):
        try:
            at = datetime.strptime(f"{told} {text}", f"%Y {form}").timestamp()  # noqa: DTZ007
        except (ValueError, OverflowError):
            continue
        if at <= now + _DAY_S:
            return at
    return None


# ---- a message ----


@dataclass(frozen=True, slots=True)
class Line:
    """What one message of the driver's says. `device` is domain:bus:device, or "" where none was told.

    kind: "xid" and "sxid" are errors by number; "lost" is a GPU gone without a number; "map" names a GPU's UUID;
    "limited" says that equal messages are left out from now on; "more" belongs to the error before and is no other.
    """

    kind: LineKind
    device: str = ""
    number: int | None = None
    text: str = ""
    pid: int | None = None
    process: str | None = None
    caused_by: int | None = None
    instance: int | None = None  # MIG GPU instance
    compute_instance: int | None = None
    unit: str | None = None  # of NVLink5: RLW_SRC_TRACK
    fatal: bool | None = None  # None: the line does not say
    link: int | None = None
    injected: bool = False
    subcode: int | None = None
    words: tuple[int, ...] = ()  # registers that the line shows
    action_before: int | None = None  # of Xid 154, as NVML numbers recovery actions
    action: int | None = None
    uuid: str | None = None
    every: int | None = None  # of "limited": one of so many is printed

    @property
    def error_status(self) -> int | None:
        """The second register of an NVLink5 error."""
        return self.words[1] if self.unit is not None and len(self.words) > 1 else None


_XID = re.compile(
    rf"(?:NVRM|nvidia_dev_xid): Xid \((?:PCI:)?(?P<bdf>{_ADDRESS})"
    r"(?: GPU-I:(?P<gi>\d{1,4}))?(?: GPU-CI:(?P<ci>\d{1,4}))?\): (?P<number>\d{1,10})(?:[,:;.]? |,|$)"
)
_SXID = re.compile(rf"nvidia-nvswitch\d{{1,4}}: SXid \((?:PCI:)?(?P<bdf>{_ADDRESS})\): (?P<number>\d{{1,6}})(?:, ?|$)")
_PROCESS = re.compile(r"pid=(?P<pid>\d{1,10}|'?<unknown>'?)(?:, name=(?P<name>[^,]{0,256}))?(?:, ?|$)")
_CAUSE = re.compile(r" caused by previous Xid (\d{1,5})\.?$")
_NVLINK5 = re.compile(  # the driver pads the unit and the severity; some units are written with that they are a part of
    r"(?P<unit>[A-Z][A-Z0-9_/]{1,60}) {1,40}(?i:(?P<non>non-?)?fatal) {1,20}XC\d{1,3} i(?P<injected>\d{1,3})"
    r" Link (?P<link>-?\d{1,4}) \((?P<words>0x[0-9A-Fa-f]{1,8}(?:,? 0x[0-9A-Fa-f]{1,8}){0,15})"
)
_NVLINK = re.compile(
    r"NVLink: (?P<fatal>fatal )?(?:error detected on )?link (?P<link>\d{1,4}) ?"
    r"\((?P<words>0x[0-9A-Fa-f]{1,8}(?:, ?0x[0-9A-Fa-f]{1,8}){0,15})"
)
_RECOVERY = re.compile(
    r"GPU recovery action changed from 0x(?P<before>[0-9A-Fa-f]{1,4})(?: \([^\n]{0,80}?\))?"
    r" to 0x(?P<now>[0-9A-Fa-f]{1,4})(?= |$)"
)
_MORE = re.compile(r"Severity \d|Data \{")
_SEVERITY = re.compile(r"(?P<severity>Fatal|Non-fatal|Correctable)(?:, ?|$)")
_SWITCH_LINK = re.compile(r"Link (\d{1,4})(?: |$)")
_LOST = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?(?P<bdf>{_ADDRESS}): GPU has fallen off the bus")
_LOST_1 = re.compile(rf"NVRM: The NVIDIA GPU (?P<bdf>{_ADDRESS})(?: |\\x0a|$)")
_LOST_3 = re.compile(r"fallen off the bus and is not responding")
_MAP = re.compile(rf"NVRM: GPU at (?:PCI:)?(?P<bdf>{_ADDRESS}): (?P<uuid>GPU-[0-9A-Fa-f-]{{8,64}})")
_LIMITED = re.compile(r"NVRM: Rate limiting [^\n]{1,200}? of every (?P<every>\d{1,6})")
_AT = re.compile(rf"PCI:(?P<bdf>{_ADDRESS})")
_FABRIC = re.compile(
    r"(?:nv-)?fabricmanager: (?:detected NVSwitch )(?P<severity>non-fatal|fatal) error (?P<number>\d{1,6}) on "
    rf"[^\n]{{0,80}}?pci bus id (?P<bdf>{_ADDRESS})(?:[^\n]{{0,60}}? port (?P<port>\d{{1,4}}))?"
)


@lru_cache(1024)  # a storm is one line, over and over
def line_of(message: str) -> Line | None:
    """What a message says; None where it is none of the driver's that we know."""
    message = message[:MOST_CHARS]
    if not message.startswith(("NVRM: ", "nvidia-nvswitch", "nvidia_dev_xid: ", "fabricmanager: ", "nv-fabric")):
        return None  # nearly every line of a log
    for pattern, read in _READERS:
        found = pattern.match(message)
        if found is not None:
            return read(found, message[found.end() :].strip())
    return None


def _device(found: re.Match[str]) -> str:
    try:
        return bdf(found["bdf"])
    except ValueError:
        return ""


def _xid(found: re.Match[str], rest: str) -> Line:
    number = int(found["number"])
    instance, compute = (None if found[name] is None else int(found[name]) for name in ("gi", "ci"))
    line = Line("xid", _device(found), number, instance=instance, compute_instance=compute)
    process = _PROCESS.match(rest)
    if process is not None:
        rest = rest[process.end() :]
        name = process["name"]
        line = replace(
            line,
            pid=int(process["pid"]) if process["pid"].isdigit() else None,
            process=None if not name or name.strip("'") == "<unknown>" else name,
        )
    cause = _CAUSE.search(rest[-60:])
    line = replace(line, text=rest, caused_by=None if cause is None else int(cause[1]))
    for pattern, add in ((_NVLINK5, _nvlink5), (_NVLINK, _nvlink), (_RECOVERY, _recovery)):
        detail = pattern.match(rest)
        if detail is not None:
            return add(line, detail)
    return line


def _nvlink5(line: Line, found: re.Match[str]) -> Line:
    words = _words(found["words"])
    return replace(
        line,
        unit=found["unit"],
        fatal=found["non"] is None,
        link=int(found["link"]),
        injected=int(found["injected"]) != 0,
        words=words,
        subcode=words[0] >> 20 & 0x3F,
    )


def _nvlink(line: Line, found: re.Match[str]) -> Line:
    fatal = True if found["fatal"] else None
    return replace(line, fatal=fatal, link=int(found["link"]), words=_words(found["words"]))


def _recovery(line: Line, found: re.Match[str]) -> Line:
    return replace(line, action_before=int(found["before"], 16), action=int(found["now"], 16))


def _words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in re.findall(r"0x([0-9A-Fa-f]+)", text))


def _sxid(found: re.Match[str], rest: str) -> Line:
    line = Line("sxid", _device(found), int(found["number"]), rest)
    if _MORE.match(rest):
        return replace(line, kind="more")
    severity = _SEVERITY.match(rest)
    if severity is None:
        return line
    link = _SWITCH_LINK.match(rest[severity.end() :])
    return replace(
        line, fatal=severity["severity"] == "Fatal", unit=severity["severity"], link=int(link[1]) if link else None
    )


def _fabric(found: re.Match[str], rest: str) -> Line:
    del rest
    port = found["port"]
    fatal = found["severity"] == "fatal"
    text = found[0].partition(": ")[2]
    return Line("sxid", _device(found), int(found["number"]), text, fatal=fatal, link=int(port) if port else None)


def _lost(found: re.Match[str], rest: str) -> Line:
    del rest
    return Line("lost", _device(found), text="GPU has fallen off the bus")


def _lost_whole(found: re.Match[str], rest: str) -> Line:
    """The message in three lines, as one record; as three records its end is told by Reader."""
    if _LOST_3.search(rest[:300]):
        return Line("lost", _device(found), text="fallen off the bus and is not responding to commands")
    return Line("more", _device(found), text="The NVIDIA GPU")


def _map(found: re.Match[str], rest: str) -> Line:
    del rest
    return Line("map", _device(found), uuid=found["uuid"])


def _limited(found: re.Match[str], rest: str) -> Line:
    del rest
    device = _AT.search(found[0])
    return Line("limited", _device(device) if device else "", every=int(found["every"]))


_READERS = (
    (_XID, _xid), (_SXID, _sxid), (_LOST, _lost), (_LOST_1, _lost_whole), (_MAP, _map), (_LIMITED, _limited),
    (_FABRIC, _fabric),
)  # fmt: skip


class Reader:
    """Messages one after the other: what dmesg and syslog split in three lines is one again."""

    def __init__(self) -> None:
        self._fallen: str | None = None  # the device of "The NVIDIA GPU …", whose sentence has not ended yet

    def read(self, message: str) -> Line | None:
        """What this message says, or what it completes."""
        line = line_of(message)
        if line is not None and line.kind == "more" and line.text == "The NVIDIA GPU":
            self._fallen = line.device
            return line
        if self._fallen is None:
            return line
        if line is None and message.startswith("NVRM: "):
            if _LOST_3.match(message[6:].lstrip()):
                device, self._fallen = self._fallen, None
                return Line("lost", device, text="fallen off the bus and is not responding to commands")
            if message[6:].lstrip().startswith(("(PCI ID:", "installed in this system has")):
                return None
        if message.startswith("NVRM: "):
            self._fallen = None
        return line
