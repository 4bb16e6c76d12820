"""What happened to the hardware so far, and what of it still asks for somebody. Pure: time is handed in.

Events of the log and of NVML are folded into one entry for each (device, number); an entry ends with the reboot or
reset that mended it, with the driver's own word (Xid 154 to None), with the number that cancels it, or after its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agent.hardware.table import FALLEN, IN_WORDS, RANK, RECOVERY, UNKNOWN_NUMBER, Severity, stronger, switch, xid, xids
from agent.model import Event

JOIN_S = 2.0  # the log and NVML tell one error at nearly the same time
CAUSE_S = 30.0  # 45 cleans up after another error
MEMORY_S = 60.0  # 48 is told together with what was done about it
DAY_S = 86400.0
KEPT_S = 7 * DAY_S
DRILL_HOLD_S = 120.0  # what a drill has written ends by itself
HOLD_S = {"none": 3600.0, "restart_app": 3600.0}  # others: a day, or an hour where the driver says that all is well
BURST = 5  # incidents of a page's kind on one GPU in a day
MOST_ENTRIES = 256
MOST_CLUSTERS = 32
CLEANUP, RECOVERY_CHANGED, DOUBLE_BIT = 45, 154, 48
WITH_DOUBLE_BIT = frozenset({63, 64, 94, 95, 171, 172})
CANCELS: Mapping[int, int] = {163: 162}  # ended by
SAID = ("text", "pid", "process", "caused_by", "instance", "compute_instance", "unit", "fatal", "link", "injected",
        "subcode", "action", "action_before", "drill", "facility")


class Cluster(NamedTuple):
    """Events so close to each other that the log's and NVML's are the same."""

    first_at: float
    last_at: float
    in_log: int
    in_nvml: int

    @property
    def times(self) -> int:
        """How often it happened, as far as either tells; what only a sentence without a number told, once."""
        return max(self.in_log, self.in_nvml, 1)


@dataclass
class Entry:
    """All events of one number on one device. `subject`: the GPU's UUID where it was known, else the device."""

    kind: str
    device: str
    number: int | None
    subject: str
    first_at: float
    last_at: float
    older: int = 0  # counted in clusters that were let go of
    clusters: list[Cluster] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How often it happened."""
        return self.older + sum(cluster.times for cluster in self.clusters)

    def since(self, at: float) -> list[Cluster]:
        """The clusters that end after a time."""
        return [cluster for cluster in self.clusters if cluster.last_at > at]

    @property
    def whose(self) -> str:
        """The MIG instance that it is of alone, else `subject`."""
        return str(self.detail.get("mig") or self.subject)

    @property
    def code(self) -> str:
        """Stable, for scripts."""
        return f"{self.kind}.{self.number}" if self.number is not None else self.kind


def of_instance_alone(kind: str, number: int | None, detail: Mapping[str, Any]) -> bool:
    """Whether an error is of one MIG instance and its application: what asks for a reset is the whole GPU's."""
    return (kind == "xid" and detail.get("instance") is not None and number != RECOVERY_CHANGED
            and RANK[xid(number or 0).action] < RANK["drain_p2p"])


class History:
    """Everything that happened and is remembered. `saved` and `restored` are in plain JSON values."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.uuids: dict[str, str] = {}  # device -> UUID, as the log tells
        self.mended: dict[str, float] = {}  # subject -> when it was last reset
        self.well: dict[str, float] = {}  # subject -> when the driver last said that nothing needs to be done
        self.boot_at = 0.0

    def saved(self) -> dict[str, Any]:
        """As plain values."""
        entries = {key: [e.kind, e.device, e.number, e.subject, e.first_at, e.last_at, e.older,
                         [list(c) for c in e.clusters], e.detail] for key, e in self.entries.items()}
        return {"entries": entries, "uuids": self.uuids, "mended": self.mended, "well": self.well,
                "boot_at": self.boot_at}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> History:
        """From what was saved; what cannot be read is left out."""
        history = cls()
        for key, row in (saved.get("entries") or {}).items():
            try:
                kind, device, number, subject, first_at, last_at, older, clusters, detail = row
                history.entries[key] = Entry(kind, device, number, subject, first_at, last_at, older,
                                             [Cluster(*c) for c in clusters], dict(detail))
            except (TypeError, ValueError):  # another version's: to start without it is better than not to start
                continue
        for name in ("uuids", "mended", "well"):
            getattr(history, name).update(saved.get(name) or {})
        history.boot_at = float(saved.get("boot_at") or 0.0)
        return history

    # --- folding ----------------------------------------------------------------------------------------------------

    def fold(self, events: Iterable[Event], subject_of: Callable[[str], str | None],
             instance_of: Callable[[str, int, int | None], str | None] = lambda *_: None) -> None:
        """Learn from events, in their order. `subject_of`: a device's UUID where NVML tells it; `instance_of`: that of
        a MIG instance of it, by GPU instance and compute instance.

        What NVML has no number for comes last: it is whatever is left.
        """
        for event in sorted(events, key=lambda e: e.origin == "nvml" and e.number == UNKNOWN_NUMBER):
            if event.kind == "boot":
                self.boot_at = max(self.boot_at, event.at)
                self.well.clear()
            elif event.kind == "map":
                self.uuids[event.device] = event.detail["uuid"]
            elif event.kind == "limited":
                for entry in self.entries.values():
                    if entry.device == event.device:
                        entry.detail["at_least"] = True
            else:
                subject = subject_of(event.device) or self.uuids.get(event.device) or event.device
                self._add(event, subject, instance_of)

    def _add(self, event: Event, subject: str, instance_of: Callable[[str, int, int | None], str | None]) -> None:
        kind, number = ("xid", FALLEN) if event.kind == "lost" else (event.kind, event.number)
        detail = {name: event.detail[name] for name in SAID if name in event.detail}
        if number == UNKNOWN_NUMBER and event.origin == "nvml":
            number = self._number_near(event) or number
        mig = instance_of(event.device, detail["instance"], detail.get("compute_instance")) \
            if of_instance_alone(kind, number, detail) else None
        if mig is not None:
            detail["mig"] = mig
        apart = [detail.get(name, "") for name in ("instance", "compute_instance", "fatal", "drill")]
        key = ":".join(str(part) for part in (kind, event.device, number, *apart))
        if key not in self.entries:
            key = self._known_as(key, event, kind, number)
        entry = self.entries.get(key)
        if entry is None:
            self._make_room(event.at)
            entry = self.entries[key] = Entry(kind, event.device, number, subject, event.first_at, event.at)
        in_log, in_nvml = (event.count, 0) if event.origin == "log" else (0, event.count)
        if event.kind == "lost":  # the driver writes Xid 79 and, beside it, this sentence
            in_log = 0
        last = entry.clusters[-1] if entry.clusters else None
        told = last is not None and last.in_nvml > last.in_log and abs(last.last_at - event.first_at) <= JOIN_S
        if event.origin == "log" and kind == "xid" and not told:  # NVML did not tell it by its number
            in_nvml = self._take_unknown(event, number)
        self._count(entry, Cluster(event.first_at, event.at, in_log, in_nvml))
        entry.detail |= detail
        entry.last_at = max(entry.last_at, event.at)
        if number == RECOVERY_CHANGED and RECOVERY.get(detail.get("action", -1)) == "none" and "drill" not in detail:
            self.well[entry.subject] = event.at

    def _known_as(self, key: str, event: Event, kind: str, number: int | None) -> str:
        """The key of what the log tells and NVML too, each as exactly as it can: NVML no text, and not every instance.

        NVML's is whichever the log told; the log's takes over what NVML told a moment before.
        """
        same = {k: e for k, e in self.entries.items() if (e.kind, e.device, e.number) == (kind, event.device, number)}
        told = event.detail.get("instance")
        same = {k: e for k, e in same.items() if None in (told, e.detail.get("instance"))
                or told == e.detail["instance"]}
        if event.origin == "nvml":
            return next(reversed(same), key)
        near = [k for k, e in same.items() if e.clusters and e.clusters[-1].in_nvml > e.clusters[-1].in_log
                and abs(e.clusters[-1].last_at - event.first_at) <= JOIN_S]
        if near:
            self.entries[key] = self.entries.pop(near[-1])
        return key

    def _count(self, entry: Entry, new: Cluster) -> None:
        last = entry.clusters[-1] if entry.clusters else None
        if last is not None and new.first_at <= last.last_at + JOIN_S and new.last_at >= last.first_at - JOIN_S:
            entry.clusters[-1] = Cluster(min(last.first_at, new.first_at), max(last.last_at, new.last_at),
                                         last.in_log + new.in_log, last.in_nvml + new.in_nvml)
            return
        entry.clusters.append(new)
        if len(entry.clusters) > MOST_CLUSTERS:
            entry.older += entry.clusters.pop(0).times

    def _number_near(self, event: Event) -> int | None:
        """What the log calls an error of which NVML does not know the number."""
        near = [e for e in self.entries.values() if e.kind == "xid" and e.device == event.device
                and e.number != UNKNOWN_NUMBER and e.clusters and not e.clusters[-1].in_nvml
                and abs(e.clusters[-1].last_at - event.at) <= JOIN_S]
        return near[-1].number if near else None

    def _take_unknown(self, event: Event, number: int | None) -> int:
        """Take back what NVML called 999 a moment before the log told its number; returns how many."""
        if number == UNKNOWN_NUMBER:
            return 0
        for key, entry in list(self.entries.items()):
            if (entry.kind, entry.device, entry.number) != ("xid", event.device, UNKNOWN_NUMBER):
                continue
            last = entry.clusters[-1]
            if last.in_log == 0 and abs(last.last_at - event.first_at) <= JOIN_S:
                entry.clusters.pop()
                if not entry.clusters and not entry.older:
                    del self.entries[key]
                return last.in_nvml
        return 0

    def _make_room(self, now: float) -> None:
        for key, entry in list(self.entries.items()):
            if now - entry.last_at > KEPT_S:
                del self.entries[key]
        while len(self.entries) >= MOST_ENTRIES:
            del self.entries[min(self.entries, key=lambda k: self.entries[k].last_at)]

    def reset(self, subject: str, at: float) -> None:
        """A GPU was reset, or its driver loaded anew."""
        self.mended[subject] = at

    # --- asking -----------------------------------------------------------------------------------------------------

    def subjects(self) -> list[str]:
        """What anything is remembered of."""
        return list(dict.fromkeys(e.whose for e in self.entries.values() if e.kind in ("xid", "sxid")))

    def counted(self, kind: str, since: float) -> tuple[int, str]:
        """How many of a kind came after a time, and the text of the last."""
        entries = sorted((e for e in self.entries.values() if e.kind == kind), key=lambda e: e.last_at)
        text = str(entries[-1].detail.get("text", "")) if entries else ""
        return sum(c.times for e in entries for c in e.since(since)), text


# --- what still asks for somebody ------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One thing that asks for somebody, of one subject."""

    code: str
    subject: str
    severity: Severity
    group: str
    action: str
    text: str
    times: int
    first_at: float
    last_at: float
    injected: bool = False


def findings(history: History, now: float, overrides: Mapping[int, Severity],
             recovery: Mapping[str, str | None]) -> list[Finding]:
    """Everything that is not mended, cancelled or too old, the loudest first.

    `recovery`: what NVML says now of a subject (an action); None or absent: it does not tell.
    """
    found: list[Finding] = []
    entries = [e for e in history.entries.values() if e.kind in ("xid", "sxid") and e.clusters]
    standing: list[tuple[Entry, Finding]] = []
    asks: list[Entry] = []  # what pages by itself, also past its time: what the driver says of it never begins anew
    for entry in entries:
        if not _stands(entry, entries, history):
            continue
        finding = _of_switch(entry) if entry.kind == "sxid" else _of_xid(entry, entries, now, overrides)
        hold_s = HOLD_S.get(finding.action, 3600.0 if recovery.get(entry.subject) == "none" else DAY_S)
        if entry.detail.get("drill"):
            hold_s = DRILL_HOLD_S
        elif finding.severity == "page" and RANK[finding.action] >= RANK["drain_p2p"]:
            asks.append(entry)
        if now - entry.last_at <= hold_s or (_repeats(entry) and now - entry.last_at <= DAY_S):
            standing.append((entry, finding))
    loud = [entry for entry, finding in standing if finding.severity == "page" and not entry.detail.get("drill")]
    for entry, finding in standing:
        if any(_is_of(entry, cause) for cause in asks):
            continue  # the driver's word on an error that pages by itself: one thing, one page
        words = [recovery.get(entry.subject), *(RECOVERY.get(other.detail.get("action", -1)) for other, _ in standing
                                                if _is_of(other, entry))]
        action = stronger(finding.action, *(words if RANK[finding.action] >= RANK["drain_p2p"] else ()))
        found.append(finding._replace(action=action, text=f"{finding.text}: {_then(entry, action)}"))
    found += _bursts(loud, now)
    return sorted(found, key=lambda f: (-_LOUD[f.severity], -RANK[f.action], -f.last_at))


_LOUD: Mapping[str, int] = {"log": 0, "info": 1, "ticket": 2, "page": 3}


def _repeats(entry: Entry) -> bool:
    return entry.kind == "xid" and xid(entry.number or 0).repeat is not None


def _then(entry: Entry, action: str) -> str:
    then = xid(entry.number or 0).then if entry.kind == "xid" else None
    return f"{IN_WORDS[action]}; {then}" if then else IN_WORDS[action]


def _stands(entry: Entry, entries: Sequence[Entry], history: History) -> bool:
    """It was not mended by a reboot or a reset, the driver has not said that all is well, and no number ended it."""
    if entry.last_at <= max(history.boot_at, history.mended.get(entry.subject, 0.0)):
        return False
    if entry.number == RECOVERY_CHANGED and RECOVERY.get(entry.detail.get("action", -1)) == "none":
        return False
    needs_more = entry.kind == "xid" and RANK[xid(entry.number or 0).action] >= RANK["drain_p2p"]
    if (needs_more or entry.number == RECOVERY_CHANGED) and entry.last_at < history.well.get(entry.subject, 0.0):
        return False
    same = [e for e in entries if e.device == entry.device and e is not entry]
    ends = CANCELS.get(entry.number or 0)
    if any(e.number == ends and e.last_at >= entry.last_at for e in same if ends is not None):
        return False
    if entry.number == CLEANUP:  # it belongs to its cause, and is told with it
        return not any(_near(e, entry, CAUSE_S) for e in same if e.kind == "xid")
    if entry.number in WITH_DOUBLE_BIT and xid(entry.number or 0).severity != "page":
        return not any(e.number == DOUBLE_BIT and _near(e, entry, MEMORY_S) for e in same)
    return True


def _is_of(changed: Entry, cause: Entry) -> bool:
    """Whether the last change of the recovery action (Xid 154) is what the driver says of another error."""
    return (changed.number == RECOVERY_CHANGED != cause.number and changed.device == cause.device
            and changed.detail.get("drill") == cause.detail.get("drill")
            and cause.first_at - CAUSE_S <= changed.last_at <= cause.last_at + CAUSE_S)


def _near(one: Entry, other: Entry, within_s: float) -> bool:
    return one.first_at - within_s <= other.last_at and other.first_at - within_s <= one.last_at


def _of_switch(entry: Entry) -> Finding:
    table, number = switch(), entry.number or 0
    fatal = entry.detail.get("fatal")
    if fatal is None:
        fatal = number in table.fatal
    corrected = entry.detail.get("unit") == "Correctable" or number in table.corrected
    severity: Severity = "page" if fatal else "log" if corrected else "ticket"
    action = "reboot" if number in table.reboot else "reset" if fatal else "none"
    means = table.means.get(number) or str(entry.detail.get("text") or "an NVSwitch error")[:80]
    return Finding(entry.code, entry.whose, severity, "link", action, f"SXid {number} ({means}){_times(entry)}",
                   entry.count, entry.first_at, entry.last_at)


def _of_xid(entry: Entry, entries: Sequence[Entry], now: float, overrides: Mapping[int, Severity]) -> Finding:
    number = entry.number or 0
    row = xid(number)
    severity, action, means = row.severity, row.action, row.means
    if row.by_line and entry.detail.get("fatal") is False:
        severity, action, means = "ticket", "none", f"{means}, not fatal"
    if number == RECOVERY_CHANGED:
        told = RECOVERY.get(entry.detail.get("action", -1))
        action = told or "none"
        severity = "page" if RANK[action] >= RANK["reset"] else "ticket"
        means += "" if told else ", and the line does not say to what"
    if row.repeat is not None and _repeated(entry, entries, now, row.repeat):
        severity, means = "ticket", f"{means}; again on this GPU alone in 24 h"
    severity = overrides.get(number, severity)
    if number not in xids() or number == UNKNOWN_NUMBER:
        means = str(entry.detail.get("text") or means)[:120]
    text = f"Xid {number} ({means}){_times(entry)}{_more(entry, entries)}"
    return Finding(entry.code, entry.whose, severity, row.group, action, text, entry.count, entry.first_at,
                   entry.last_at, bool(entry.detail.get("injected")))


def _repeated(entry: Entry, entries: Sequence[Entry], now: float, repeat: int) -> bool:
    """So many in a day on one GPU, and on no other: an application that errs takes its fault along."""
    day = now - DAY_S
    elsewhere = any(e.number == entry.number and e.device != entry.device and e.since(day) for e in entries)
    return not elsewhere and sum(c.times for c in entry.since(day)) >= repeat


def _times(entry: Entry) -> str:
    if entry.count < 2:
        return ""
    return f" {entry.count} times" + (" or more" if entry.detail.get("at_least") else "")


def _more(entry: Entry, entries: Sequence[Entry]) -> str:
    """Who noticed, on which part of the GPU, and what came with it."""
    detail, said = entry.detail, []
    if detail.get("injected"):
        said.append("INJECTED by somebody")
    if detail.get("drill"):
        said.append("DRILL")
    if detail.get("unit"):
        said.append(str(detail["unit"]) + (f" subcode {detail['subcode']}" if detail.get("subcode") else ""))
    if detail.get("link") is not None:
        said.append(f"link {detail['link']}")
    if detail.get("instance") is not None:
        said.append("MIG instance " + "/".join(str(detail[n]) for n in ("instance", "compute_instance") if n in detail))
    if detail.get("pid") is not None:
        said.append(f"noticed by pid {detail['pid']}" + (f" {detail['process']}" if detail.get("process") else ""))
    within_s = MEMORY_S if entry.number == DOUBLE_BIT else CAUSE_S
    with_it = WITH_DOUBLE_BIT if entry.number == DOUBLE_BIT else {CLEANUP, RECOVERY_CHANGED}
    came = sorted({e.number for e in entries if e.device == entry.device and e.number in with_it and e is not entry
                   and e.number is not None and _near(e, entry, within_s)})
    if came:
        said.append("with Xid " + ", ".join(map(str, came)))
    return f", {', '.join(said)}" if said else ""


def _bursts(loud: Sequence[Entry], now: float) -> list[Finding]:
    """A GPU that fails again and again, in whichever MIG instance, is not mended by one more reset."""
    more = []
    for subject in dict.fromkeys(entry.subject for entry in loud):
        times = sorted(c.first_at for e in loud if e.subject == subject for c in e.since(now - DAY_S))
        incidents = [at for n, at in enumerate(times) if n == 0 or at - times[n - 1] > MEMORY_S]
        if len(incidents) >= BURST:
            text = f"{len(incidents)} incidents in 24 h on one GPU: {IN_WORDS['replace']}"
            more.append(Finding("xid.burst", subject, "page", "gpu", "replace", text, len(incidents), incidents[0],
                                times[-1]))
    return more
