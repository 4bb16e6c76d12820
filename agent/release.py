"""The gray-release guard: is a new configuration worse than the old one, as its users meet it? Pure; unix seconds.

The seed's principle 8: p99 over 1.5 x the service level, over 1 % of errors, a business number 5 % down: roll back.
Each is said only where the numbers prove it, and only where the old group, under the same traffic, does better.

Proof is Wilson's score interval (1927) for a share, Newcombe's (1998, method 10) for the difference of two, and
Student's t over ten batch means for the business number, whose readings hang together in time. A watch looks again
and again, and each look may be wrong: so it looks only when a fifth more requests have come, and asks for 99.95 % each
time. Over a day's 50 looks that is wrong in at most 2.5 % of the releases that are sound. The end is judged with 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, Literal

from agent.model import SAMPLES, Batch, Sample, Slo
from agent.signals import errors_among
from agent.stats import Buckets, add_buckets, in_last_bucket, quantile, slow_share, wilson_lower
from agent.words import beside, quantity, span

TIMES_SLO = 1.5
SLOW_ALLOWED = 0.01  # what a p99 leaves over its limit
ERRORS_ALLOWED = 0.01
BUSINESS_KEPT = 0.95  # of the old group's
LEAST = 100  # requests of a group; of gaps between tokens three times that
LEAST_ITL = 300
LEAST_READINGS = 30  # of the business number, of both groups at once
BATCHES = 10
GROWTH = 1.2  # so many times the requests of the last look make another worth it
NEVER_S = 1800.0  # the largest models are loaded by then
DOWN_S = 120.0  # no engine of the new group answers, and the old ones do
TINY_LOAD = 0.5  # of what an engine of the old group serves: says little about a full one


@dataclass(frozen=True, slots=True)
class Certainty:
    """How sure a look must be: quantiles of the normal distribution, and of Student's t with 9 degrees of freedom."""

    z: float
    t: float


LOOK = Certainty(3.2905, 4.781)  # one-sided 99.95 %
END = Certainty(1.6449, 1.833)  # one-sided 95 %
State = Literal["OK", "BAD", "UNKNOWN", "N/A"]
LATENCIES: Mapping[str, str] = {"ttft": "ttft_p99", "itl": "itl_p99", "e2e": "e2e_p99"}  # sample -> service level
COUNTED = frozenset({"http", "finished", "rejections", *LATENCIES})


Sums = dict[str, dict[str, float]]  # sample -> key -> what it has risen by


@dataclass
class Tally:
    """What one engine did since it was first read: through restarts, and through reads that brought nothing."""

    url: str
    scrapes: int = 0
    missed: int = 0
    restarts: int = 0
    first_at: float | None = None  # of its first page
    answered_at: float | None = None  # of its last
    sums: Sums = field(default_factory=dict)  # of this process
    ended: list[Sums] = field(default_factory=list)  # of the processes before it: their bounds may be others
    _raw: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _started: float | None = None

    def take(self, batch: Batch) -> None:
        """Learn from one read. What an engine did while it was not read is in its next page, but for a crash's."""
        if batch.error is not None:
            self.missed += 1
            return
        told = {(r.subject, r.name, r.key): r.value for r in batch.readings
                if isinstance(r, Sample) and r.name in COUNTED and math.isfinite(r.value)}
        started = next((r.value for r in batch.readings if isinstance(r, Sample) and r.name == "process_start"), None)
        moved = started is not None and self._started is not None and abs(started - self._started) > 1.0
        if moved or any(value < self._raw.get(key, -math.inf) for key, value in told.items()):
            self.restarts += 1
            self.ended.append(self.sums)
            self.sums, self._raw = {}, {}
        for key, value in told.items():
            if self.first_at is not None:  # what stood on the first page happened before
                sums = self.sums.setdefault(key[1], {})
                sums[key[2]] = sums.get(key[2], 0.0) + value - self._raw.get(key, 0.0)
        self._raw |= told
        self._started = started if started is not None else self._started
        self.scrapes += 1
        self.answered_at = batch.at
        self.first_at = batch.at if self.first_at is None else self.first_at


@dataclass(frozen=True, slots=True)
class Group:
    """What the engines of one group did together."""

    engines: int = 0
    answering: int = 0
    scrapes: int = 0
    missed: int = 0
    restarts: int = 0
    requests: float = 0.0
    errors: float = 0.0
    answered_at: float | None = None  # when one of them last answered
    since: float | None = None  # when the watch began
    silent: Sequence[float | None] = ()  # when each of those that do not answer last did
    latencies: Mapping[str, Buckets] = field(default_factory=dict)
    business: Sequence[tuple[float, float | None]] = ()  # (when, the number)


def group(tallies: Sequence[Tally], business: Sequence[tuple[float, float | None]] = (), now: float = math.inf,
          late_s: float = math.inf, since: float | None = None) -> Group:
    """Engines as one group. One that has not answered for `late_s` is none that answers."""
    requests = errors = 0.0
    for one in tallies:
        sums = [*one.ended, one.sums]
        http, finished, refused = (_added(part.get(name, {}) for part in sums)
                                   for name in ("http", "finished", "rejections"))
        failed, n, _ = errors_among(http, finished, sum(refused.values()))
        requests, errors = requests + n, errors + failed
    last = [one.answered_at for one in tallies]
    told = [at for at in last if at is not None]
    silent = [at for at in last if at is None or at <= now - late_s]
    return Group(
        len(tallies), len(tallies) - len(silent), sum(one.scrapes for one in tallies),
        sum(one.missed for one in tallies), sum(one.restarts for one in tallies), requests, errors,
        max(told, default=None), since, silent, {name: _histogram(tallies, name) for name in LATENCIES}, business)


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    whole: dict[str, float] = {}
    for key, value in (item for part in parts for item in part.items()):
        whole[key] = whole.get(key, 0.0) + value
    return whole


def _histogram(tallies: Sequence[Tally], name: str) -> Buckets:
    """Of all engines and all their processes, bound by bound."""
    parts = [part[name] for one in tallies for part in (*one.ended, one.sums) if name in part]
    return add_buckets({float(key): count for key, count in part.items() if key not in ("sum", "count")}
                       for part in parts if part.get("+Inf"))


# --- the judgement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One criterion. `n_new`, `n_old`: of what it was judged."""

    name: str
    state: State
    asked: str
    new: str
    old: str
    why: str = ""
    n_new: float = 0.0
    n_old: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`fail`: roll back; `pass`: every criterion is proven to hold; `unknown`: neither."""

    verdict: Literal["pass", "fail", "unknown"]
    why: str
    rows: tuple[Row, ...]


def judge(old: Group, new: Group, slo: Slo, sure: Certainty, now: float) -> Verdict:
    """Every criterion, and what follows. `now`: unix seconds."""
    rows = (down_row(old, new, now), *(latency_row(name, old, new, slo, sure) for name in LATENCIES),
            error_row(old, new, sure), business_row(old, new, sure))
    bad, unknown = ([row for row in rows if row.state == state] for state in ("BAD", "UNKNOWN"))
    if bad:
        return Verdict("fail", "; ".join(f"{row.name}: {row.why}" for row in bad), rows)
    if unknown:
        return Verdict("unknown", "; ".join(f"{row.name}: {row.why}" for row in unknown), rows)
    return Verdict("pass", f"{sum(row.state == 'OK' for row in rows)} criteria hold", rows)


def down_row(old: Group, new: Group, now: float) -> Row:
    """A new configuration that does not answer serves nobody, which no page of it tells."""
    texts = (f"answers within {span(DOWN_S)}", f"{new.answering} of {new.engines}", f"{old.answering} of {old.engines}")
    if new.answered_at is None:
        is_late = new.since is not None and now - new.since > NEVER_S and old.answering
        said = "no engine of the new group has ever answered" + (f", in {span(round(now - new.since))}"
                                                                 if is_late and new.since is not None else "")
        return Row("answers", "BAD" if is_late else "UNKNOWN", *texts, said)
    silent_s = now - new.answered_at
    if silent_s <= DOWN_S:
        return _each_answers(old, new, now, texts)
    said = f"no engine of the new group has answered for {span(round(silent_s))}"
    if old.answering:
        return Row("answers", "BAD", *texts, said)
    return Row("answers", "UNKNOWN", *texts, f"{said}, nor does the old one: it may be our way to them")


def _each_answers(old: Group, new: Group, now: float, texts: tuple[str, str, str]) -> Row:
    """An engine that is gone serves nobody either, but may be loading its weights anew: it has as long as a new one."""
    if not new.silent:
        return Row("answers", "OK", *texts)
    longest_s = max(now - (at if at is not None else new.since if new.since is not None else now) for at in new.silent)
    said = f"{len(new.silent)} of {new.engines} engines of the new group not heard of for {span(round(longest_s))}"
    if longest_s <= NEVER_S:
        return Row("answers", "UNKNOWN", *texts, said)
    if old.silent:
        return Row("answers", "UNKNOWN", *texts, f"{said}, and of the old one {len(old.silent)} of {old.engines}")
    return Row("answers", "BAD", *texts, said)


def latency_row(name: str, old: Group, new: Group, slo: Slo, sure: Certainty) -> Row:
    """p99 within 1.5 x its service level: at most 1 % over it, counted by the bucket bounds around it."""
    promised: float | None = getattr(slo, LATENCIES[name])
    label = f"{name}_p99"
    if promised is None:
        return Row(label, "N/A", "not promised", "", "")
    limit_s, least = TIMES_SLO * promised, LEAST_ITL if name == "itl" else LEAST
    asked = f"p99 ≤ {span(limit_s)} ({TIMES_SLO:g} × {span(promised)})"
    theirs, ours = old.latencies[name], new.latencies[name]
    if not ours and not theirs:
        return Row(label, "N/A", asked, "", "", "neither group tells it")
    mine, other = slow_share(limit_s, ours), slow_share(limit_s, theirs)
    texts = (asked, _p99(ours), _p99(theirs))

    def row(state: State, why: str = "") -> Row:
        return Row(label, state, *texts, why, mine.n, other.n)

    if mine.n < least:
        return row("UNKNOWN", f"{mine.n:.0f} of at least {least} of the new group")
    if wilson_lower(mine.certain, mine.n, sure.z) > SLOW_ALLOWED:
        slow = f"{quantity(mine.certain / mine.n, 'ratio')} of {mine.n:.0f} over {span(limit_s)}"
        return row(*_against_old(mine.certain, mine.n, other.possible, other.n, least, sure, slow))
    if wilson_upper(mine.possible, mine.n, sure.z) <= SLOW_ALLOWED:
        return row("OK")
    inside = "" if mine.certain == mine.possible else \
        f"; the limit lies inside a bucket, {span(mine.low_bound)} to {span(mine.high_bound)}"
    over = f"{mine.certain:.0f}" if mine.certain == mine.possible else f"{mine.certain:.0f} to {mine.possible:.0f}"
    return row("UNKNOWN", f"{over} of {mine.n:.0f} over it: not decided{inside}")


def error_row(old: Group, new: Group, sure: Certainty) -> Row:
    """At most 1 % of the answers are errors."""
    asked = f"errors ≤ {quantity(ERRORS_ALLOWED, 'ratio')}"
    texts = (asked, _share(new.errors, new.requests), _share(old.errors, old.requests))

    def row(state: State, why: str = "") -> Row:
        return Row("errors", state, *texts, why, new.requests, old.requests)

    if new.requests < LEAST:
        return row("UNKNOWN", f"{new.requests:.0f} of at least {LEAST} requests of the new group")
    if wilson_lower(new.errors, new.requests, sure.z) > ERRORS_ALLOWED:
        said = f"{beside(new.errors / new.requests, ERRORS_ALLOWED, 'ratio')} of {new.requests:.0f} failed"
        return row(*_against_old(new.errors, new.requests, old.errors, old.requests, LEAST, sure, said))
    if wilson_upper(new.errors, new.requests, sure.z) <= ERRORS_ALLOWED:
        return row("OK")
    return row("UNKNOWN", f"{new.errors:.0f} of {new.requests:.0f} failed: not decided")


def _against_old(bad: float, n: float, bad_old: float, n_old: float, least: int, sure: Certainty, said: str,
                 ) -> tuple[State, str]:
    """What is over its limit is the new configuration's fault unless the old group is as bad."""
    if n_old < least:
        return "BAD", f"{said}; the old group served too little to compare ({n_old:.0f})"
    if difference_lower(bad, n, bad_old, n_old, sure.z) > 0:
        return "BAD", f"{said}, {quantity(bad_old / n_old, 'ratio')} of {n_old:.0f} in the old group"
    return "UNKNOWN", f"{said}, and the old group is as bad: rolling back would not help"


def business_row(old: Group, new: Group, sure: Certainty) -> Row:
    """The business number of the new group is at least 95 % of the old one's."""
    asked = f"at least {quantity(BUSINESS_KEPT, 'ratio')} of the old group's"
    if not old.business and not new.business:
        return Row("business", "N/A", asked, "", "", "not given")
    both = zip(old.business, new.business, strict=True)
    pairs = [(a, b) for (_, a), (_, b) in both if a is not None and b is not None]
    texts = tuple(f"mean {fmean(column):.6g}" if pairs else "" for column in zip(*pairs, strict=True)) or ("", "")
    n = float(len(pairs))

    def row(state: State, why: str = "") -> Row:
        return Row("business", state, asked, texts[1], texts[0], why, n, n)

    if n < LEAST_READINGS:
        return row("UNKNOWN", f"{n:.0f} of at least {LEAST_READINGS} readings of both groups")
    found = ratio_bounds(pairs, sure.t)
    if found is None:
        return row("UNKNOWN", "the old group's number is not above zero: there is nothing to compare with")
    low, middle, high = found
    said = f"{quantity(middle, 'ratio')} of the old group's ({quantity(low, 'ratio')} to {quantity(high, 'ratio')})"
    if high < BUSINESS_KEPT:
        return row("BAD", said)
    return row("OK", said) if low >= BUSINESS_KEPT else row("UNKNOWN", f"{said}: not decided")


# --- the statistics ---------------------------------------------------------------------------------------------------


def wilson_upper(hits: float, n: float, z: float) -> float:
    """Upper bound of Wilson's score interval; 1 of nothing."""
    return 1.0 if n <= 0 else 1.0 - wilson_lower(n - hits, n, z)


def difference_lower(hits: float, n: float, hits_old: float, n_old: float, z: float) -> float:
    """Lower bound of share - share_old (Newcombe 1998, Statistics in Medicine 17:873, method 10)."""
    share, share_old = hits / n, hits_old / n_old
    low, high_old = wilson_lower(hits, n, z), wilson_upper(hits_old, n_old, z)
    return share - share_old - math.hypot(share - low, high_old - share_old)


def ratio_bounds(pairs: Sequence[tuple[float, float]], t: float) -> tuple[float, float, float] | None:
    """(low, middle, high) of new ÷ old from readings (old, new) in the order of time; None: there is no ratio."""
    ratios = []
    for number in range(BATCHES):
        part = pairs[len(pairs) * number // BATCHES: len(pairs) * (number + 1) // BATCHES]
        theirs, ours = fmean(a for a, _ in part), fmean(b for _, b in part)
        if theirs <= 0:
            return None
        ratios.append(ours / theirs)
    middle, spread = fmean(ratios), t * stdev(ratios) / math.sqrt(BATCHES)
    return middle - spread, middle, middle + spread


# --- telling ----------------------------------------------------------------------------------------------------------


def notes(old: Group, new: Group, slo: Slo) -> list[str]:
    """What a person should know beside the verdict."""
    said = [] if slo.written else ["no `slo:` is written: judged by the defaults; --slo ttft_p99=500ms names yours"]
    if old.engines and not old.answering:
        said.append("no engine of the old group answers: the new one is judged by its limits alone")
    if old.requests and new.requests and old.engines and new.engines:
        ours, theirs = new.requests / new.engines, old.requests / old.engines
        if ours < TINY_LOAD * theirs:
            part = quantity(ours / theirs, "ratio")
            said.append(f"an engine of the new group served {part} of what one of the old did: little is known of"
                        " its full load")
    for name, one in (("old", old), ("new", new)):
        if one.restarts:
            times = f"{one.restarts} restart{'s' if one.restarts != 1 else ''}"
            said.append(f"{name} group: {times} of an engine; what it did after its last page is not counted")
    return said


def worth_a_look(new: Group, seen: float) -> bool:
    """Whether enough has come since the last look, at which there were `seen` requests or readings."""
    return progress_of(new) >= max(float(LEAST_READINGS), GROWTH * seen)


def progress_of(new: Group) -> float:
    """How much there is to judge: requests, first tokens or readings, whichever are most."""
    ttft = new.latencies.get("ttft", ())
    return max(new.requests, ttft[-1][1] if ttft else 0.0, float(len(new.business)))


def told(one: Group) -> dict[str, Any]:
    """A group as JSON tells it."""
    plain = asdict(one)
    del plain["business"], plain["latencies"], plain["answered_at"], plain["since"], plain["silent"]
    return plain | {f"{name}_p99_s": quantile(0.99, buckets) for name, buckets in one.latencies.items()} \
        | {"business_readings": sum(value is not None for _, value in one.business)}


def _p99(buckets: Buckets) -> str:
    p99 = quantile(0.99, buckets)
    if p99 is None:
        return "unknown"
    return f"p99 {'over ' if in_last_bucket(0.99, buckets) else ''}{span(p99)} of {buckets[-1][1]:.0f}"


def _share(part: float, n: float) -> str:
    return "unknown" if n <= 0 else f"{quantity(part / n, 'ratio')} of {n:.0f}"


assert all(SAMPLES[name] != "gauge" for name in COUNTED)  # noqa: S101  (what rises is counted, and nothing else)
