"""One target's pages, one after another, to readings: which series is which number of which engine. Pure: no clock.

What stands where is worked out once for a layout (the same families and series in the same order) and used again until
it changes: the page of a live engine changes its numbers at every read, and its layout hardly ever.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, repeat
from operator import itemgetter, le
from typing import NamedTuple

from agent.engines import (
    KINDS,
    ROUTER_KINDS,
    Absent,
    Alias,
    Chosen,
    EngineMap,
    Names,
    Quantity,
    detect,
    gone_text,
    is_muted,
    load_map,
    normalise,
    resolve,
    shown_patterns,
    spellings,
    with_patterns,
)
from agent.exposition import BadLine, NativeHistogram, Page, Reader, Series
from agent.model import OLD_S, SAMPLES, EngineFacts, Found, Gap, Sample, Why

_AT_OF = itemgetter(3)  # Series.at
_SAMPLE_OF = partial(tuple.__new__, Sample)  # a third of the time of Sample(...), for many
# Nothing that an engine tells is larger. Over it a float cannot count by one: a counter that has risen by so much, for
# one garbled page, would stand still ever after.
LARGEST = 2.0**53
PERCENT_FROM = 1.5  # a share over this is in percent
SHARE_TOP = 1.0 + 1e-9  # what rounding may make of 1
MOST_ENGINES = 256  # that one page may tell of; indices farther apart are names
# Reasons, statuses or buckets of one number of one engine; of a router its workers, those included that are long gone.
# More are something new each time (a request, an error's text), and each would be remembered for days.
MOST_KEYS: Mapping[str, int] = {"engine": 500, "router": 2000}
RESTART_S = 1.0  # a process start time that moved by more is another process
NAMELESS = frozenset({None, "", "undefined"})  # a model's label that names none (trtllm-serve to about 1.2)
ROLES = frozenset({"prefill", "decode"})
SHOWN_FAMILIES = 12  # of a page that is not understood, in words

SlotKey = tuple[str, str, str]  # (name, subject, key), as in Sample
Apart = tuple[tuple[str, str], ...]  # a series' labels without those in which copies of one number differ
_ANY = "any"  # the key of what was counted under one that tells nothing
_BARE = "{} has no buckets on this page (a summary?), so nobody can tell how many were slow: have it write a histogram"
_FACTORS: Mapping[str, float] = {"ms": 1e-3, "us": 1e-6, "percent": 1e-2}


class _One(NamedTuple):
    """A number that is one series' value as it stands. `top`: the largest that it may be."""

    at: int  # in Page.series
    slot: SlotKey
    top: float


class _Columns(NamedTuple):
    """Many of them, one list a column: so they are read in C."""

    names: list[str]
    subjects: list[str]
    keys: list[str]
    at: list[int]
    tops: list[float]


class _Many(NamedTuple):
    """A number that is made of several series, or in another unit."""

    slot: SlotKey
    quantity: Quantity
    unit: str
    groups: tuple[tuple[int, ...], ...]  # copies of one number stand in one group
    plus: float  # of series that were here and are gone
    over: tuple[tuple[int, ...], ...] = ()  # the same of what it is divided by


class _Hole(NamedTuple):
    """What this layout does not tell."""

    slot: SlotKey
    code: Why
    why: str


class _Member(NamedTuple):
    """A series that counts towards a quantity."""

    at: int
    name: str
    key: str
    engine: str | None  # its index, as its label says
    apart: Apart
    series: Series
    is_over: bool = False  # what the quantity is divided by


class _Take(NamedTuple):
    """How series of one name are taken for a quantity. `le`: as its buckets; else `part` is the key."""

    name: str
    part: str
    key: str | None
    as_key: str | None
    keys: Mapping[str, str]
    select: Mapping[str, tuple[str, ...]]
    skip: Mapping[str, tuple[str, ...]]
    is_over: bool = False

    def key_of(self, labels: Mapping[str, str]) -> str | None:
        """Sample.key of a series with these labels; None where it does not count."""
        if any(labels.get(label) not in values for label, values in self.select.items()):
            return None
        if any(labels.get(label) in values for label, values in self.skip.items()):
            return None
        if self.part == "le":
            return labels.get("le", "")
        if self.as_key is not None:
            return self.as_key
        if self.key is None:
            return self.part
        value = labels.get(self.key, "")
        return self.keys.get(value, self.keys.get("*", value))


class _Plan(NamedTuple):
    families: Mapping[str, str]
    layout: list[tuple[str, Mapping[str, str]]]
    had_bad: bool
    twice: Sequence[str]  # series that came again
    ones: list[_One]
    columns: _Columns  # of the same
    many: list[_Many]
    fixed: list[tuple[SlotKey, float]]  # told by a label, so part of the layout
    holes: list[_Hole]
    starts: tuple[int, ...]  # where the process start time stands
    names: Names | None
    facts: EngineFacts


class PageReader:
    """Reads the pages of one target.

    Args:
        target: its name, the subject of what belongs to no single engine.
        kind: "auto", or one of agent.engines.KINDS.
        shape: whether its engines' subjects carry an index, as it was before a restart of ours; None at first sight.
        maps: the engines that are known; for tests.

    Raises:
        KeyError: `kind` is not known.
    """

    def __init__(
        self, target: str, *, kind: str = "auto", shape: bool | None = None, maps: Sequence[EngineMap] | None = None,
    ) -> None:
        self.target = target
        self.shape = shape
        kinds = KINDS if kind == "auto" else (kind,)
        self._maps = tuple(load_map(k) for k in kinds) if maps is None else tuple(maps)
        self._map = None if kind == "auto" else self._maps[0]
        self._reader = Reader(_wanted(kinds) if maps is None else spellings(self._maps))
        self._start_names = {
            normalise(alias.name)
            for engine_map in self._maps
            if (quantity := engine_map.quantities.get("process_start")) is not None
            for alias in quantity.names
        }
        self._plan: _Plan | None = None
        self._given: dict[str, str] = {}  # quantity -> the name that gave it last
        self._lost: dict[str, Absent] = {}  # quantity -> what became of that name, while nothing else gives it
        self._moved: dict[str, str] = {}  # quantity -> what became of its former name
        self._removed: tuple[str, ...] = ()  # own families that the last change of build took away
        self._indices: tuple[str, ...] = ()
        self._strangers: set[str] = set()  # engines that one page told of since this process began
        self._left_out = False  # the last page told of one of them
        self._closed: set[str] = set()
        self._expected: set[SlotKey] = set()  # seen since this process of the engine began
        self._places: dict[SlotKey, dict[Apart, list[int]]] = {}  # of each counter's series, at the last plan
        self._gone: dict[SlotKey, dict[Apart, float]] = {}  # series that vanished while others of their counter stayed
        self._crowded: set[tuple[str, str]] = set()  # (name, subject) with more than MOST_KEYS since this process began
        self._series: Sequence[Series] = ()  # of the last page
        self._percent: set[tuple[str, str]] = set()  # (build, quantity) that turned out to be in percent
        self._started: float | None = None
        self._was_down = False
        self._shared: frozenset[str] = frozenset()  # what this target tells of all its engines together
        self._is_patterned = False

    def read_patterns(self) -> None:
        """From the next page on, read what deployment patterns have; else it is read once a page shows one."""
        if self._is_patterned:
            return
        self._is_patterned = True
        self._maps = tuple(map(with_patterns, self._maps))
        self._map = None if self._map is None else next(m for m in self._maps if m.kind == self._map.kind)
        self._reader = Reader(spellings(self._maps))
        if self._plan is not None:  # nothing of the page may have changed, and it is read for more
            self._plan = self._plan._replace(families={})

    @property
    def facts(self) -> EngineFacts | None:
        """What the target said of itself at its last good page; None before the first."""
        return None if self._plan is None else self._plan.facts

    @property
    def unmute(self) -> str:
        """The flag by which this engine tells of itself, where it is known which it is."""
        return "" if self._map is None else self._map.unmute

    @property
    def is_health_load(self) -> bool:
        """Whether this engine's /health says 5xx under mere load."""
        return self._map is not None and self._map.is_health_load

    def read(self, body: bytes, content_type: str, at: float) -> list[Sample | Gap]:
        """The readings of one page (decompressed).

        Raises:
            PageError: the page as a whole must not be used; `failed` then says what is owed for it.
        """
        page = self._reader.read(body, content_type)
        if any(map(_AT_OF, page.series)):  # no engine tells times: what stands between us and it does
            page = _without_old(page, at)
        plan = self._plan_for(page)
        self._series = page.series
        return self._readings(plan, page.series, at)

    def _plan_for(self, page: Page) -> _Plan:
        plan = self._plan
        if plan is not None and page.families is plan.families and not (page.bad or plan.had_bad or self._left_out):
            return self._replan(page, restarted=True) if self._is_restarted(page, plan.starts) else plan
        restarted = self._is_restarted(page, self._starts(page.series))
        layout = _layout(page)
        if plan is None or restarted or page.bad or plan.had_bad or self._left_out or not _is_same(plan, page, layout):
            return self._replan(page, restarted)
        self._plan = plan._replace(families=page.families)
        return self._plan

    def failed(self, code: Why, why: str, at: float, *, is_down: bool = False) -> list[Sample | Gap]:
        """What is owed for a read without a usable page: a Gap for all that the target should tell.

        Args:
            is_down: nobody listened, so the next page may be another process's.
        """
        self._was_down = self._was_down or is_down
        plan = self._plan
        engines = plan.facts.engines if plan is not None and plan.facts.engines else (self.target,)
        engine_map = self._map or self._maps[0]
        never = {hole.slot: hole for hole in plan.holes if hole.code is Why.NOT_SUPPORTED} if plan is not None else {}
        out: list[Sample | Gap] = []
        had = frozenset() if plan is None or plan.names is None else plan.names.quantities.keys()
        for name, quantity in engine_map.quantities.items():
            if name in engine_map.patterns and name not in had:
                continue
            of_all = quantity.of == "target" or name in self._shared
            for subject in (self.target,) if of_all else engines:
                hole = never.get((name, subject, ""))
                if hole is None:
                    out.append(Gap(name, subject, code, why, at))
                else:
                    out.append(Gap(name, subject, hole.code, hole.why, at))
        return out

    # -- reading with a plan ------------------------------------------------------------------------------------------

    def _readings(self, plan: _Plan, series: Sequence[Series], at: float) -> list[Sample | Gap]:
        out: list[Sample | Gap] = self._ones(plan, series, at)
        append = out.append
        for (name, subject, key), value in plan.fixed:
            append(Sample(name, subject, value, at, key))
        for (name, subject, key), code, why in plan.holes:
            append(Gap(name, subject, code, why, at, key))
        if plan.many:
            self._learn_units(plan, series)
            out.extend(self._quotient(plan, many, series, at) if many.over else
                       self._made_of_many(plan, many, series, at) for many in plan.many)
        return out

    def _ones(self, plan: _Plan, series: Sequence[Series], at: float) -> list[Sample | Gap]:
        names, subjects, keys, places, tops = plan.columns
        values = [series[i].value for i in places]
        if all(map(le, repeat(0.0), values)) and all(map(le, values, tops)):  # false for NaN, too
            return list(map(_SAMPLE_OF, zip(names, subjects, values, repeat(at), keys)))
        return [Sample(name, subject, value, at, key) if 0.0 <= value <= top
                else self._unfit(plan, (name, subject, key), series[i].name, value, top, at)
                for value, (i, (name, subject, key), top) in zip(values, plan.ones, strict=True)]

    def _learn_units(self, plan: _Plan, series: Sequence[Series]) -> None:
        for many in plan.many:
            if many.unit == "ratio or percent" and any(
                PERCENT_FROM < series[i].value <= LARGEST for group in many.groups for i in group
            ):
                self._percent.add((plan.facts.build or "", many.slot[0]))

    def _made_of_many(self, plan: _Plan, many: _Many, series: Sequence[Series], at: float) -> Sample | Gap:
        name, subject, key = many.slot
        unit = many.unit
        if unit == "ratio or percent":
            unit = "percent" if (plan.facts.build or "", name) in self._percent else "ratio"
        factor = _FACTORS.get(unit, 1.0)
        top = SHARE_TOP / factor if unit in {"ratio", "percent"} else LARGEST
        for group in many.groups:
            for i in group:
                if not 0.0 <= series[i].value <= top:
                    return self._unfit(plan, many.slot, series[i].name, series[i].value, top, at)
        parts = [max(series[i].value for i in group) for group in many.groups]
        value = (max(parts) if many.quantity.merge == "max" else sum(parts) + many.plus) * factor
        return Sample(name, subject, 1.0 - value if many.quantity.invert else value, at, key)

    def _quotient(self, plan: _Plan, many: _Many, series: Sequence[Series], at: float) -> Sample | Gap:
        """A number that is one family's divided by another's."""
        name, subject, key = many.slot
        for i in (*chain.from_iterable(many.groups), *chain.from_iterable(many.over)):
            if not 0.0 <= series[i].value <= LARGEST:
                return self._unfit(plan, many.slot, series[i].name, series[i].value, LARGEST, at)
        part, whole = (sum(max(series[i].value for i in group) for group in groups)
                       for groups in (many.groups, many.over))
        if whole <= 0:
            return Gap(name, subject, Why.NO_DATA, f"{series[many.groups[0][0]].name} of 0", at, key)
        if many.unit == "ratio" and part > whole * SHARE_TOP:
            metric = series[many.groups[0][0]].name
            return Gap(name, subject, Why.OUT_OF_RANGE, f"{metric} is {part:g} of {whole:g}", at, key)
        return Sample(name, subject, part / whole, at, key)

    def _unfit(self, plan: _Plan, slot: SlotKey, metric: str, value: float, top: float, at: float) -> Gap:
        name, subject, key = slot
        quantity = plan.names.map.quantities[name] if plan.names is not None else None
        if not math.isfinite(value):
            return Gap(name, subject, Why.NOT_A_NUMBER, f"{metric} is {value}", at, key)
        if quantity is not None and value in quantity.sentinels:
            return Gap(name, subject, Why.SENTINEL, f"{metric} is {value:g}, which stands for no value", at, key)
        if value < 0 or top == LARGEST:
            cannot = "be negative" if value < 0 else "be over 2^53"
            return Gap(name, subject, Why.OUT_OF_RANGE, f"{metric} is {value:g}, and cannot {cannot}", at, key)
        unit = "a percentage" if top > PERCENT_FROM else "a share"
        return Gap(name, subject, Why.OUT_OF_RANGE, f"{metric} is {value:g}; {unit} is at most {top:.0f}", at, key)

    # -- making a plan ------------------------------------------------------------------------------------------------

    def _starts(self, series: Sequence[Series]) -> tuple[int, ...]:
        return tuple(i for i, one in enumerate(series) if normalise(one.name) in self._start_names)

    def _is_restarted(self, page: Page, starts: Iterable[int]) -> bool:
        """Is this another process than at the last page? Without its start time only an outage can tell."""
        started = max((page.series[i].value for i in starts if math.isfinite(page.series[i].value)), default=None)
        was_down, self._was_down = self._was_down, False
        known = self._started
        if started is not None:
            self._started = started
        if started is None or known is None:
            return was_down and self._plan is not None
        return abs(started - known) > RESTART_S

    def _replan(self, page: Page, restarted: bool) -> _Plan:
        """Work out anew what stands where. `restarted`: another process may have other engines and features."""
        if restarted:
            for known in (self._expected, self._places, self._gone, self._crowded):
                known.clear()
        names = self._resolve(page, restarted)
        layout = _layout(page)
        if names is None:
            facts, holes = self._not_understood(page)
            plan = _Plan(page.families, layout, bool(page.bad), page.duplicates, [], _columns([]), [], [], holes, (),
                         None, facts)
        else:
            plan = self._understood(page, names, restarted, layout)
        self._plan = plan
        return plan

    def _resolve(self, page: Page, restarted: bool) -> Names | None:
        plan, families = self._plan, page.families
        if plan is not None and plan.names is not None and plan.families == families and not restarted:
            return plan.names
        found, against = detect(self._maps, families)
        if found is not None and found is not self._map:
            for known in (self._given, self._lost, self._moved):  # another engine's names are none of this one's
                known.clear()
            self._map = found
        if self._map is None or against:
            return None
        if found is None and not self._given and not is_muted(self._map, families):
            return None  # the kind was given, and nothing of it was ever on this page
        if not self._is_patterned and (shown_patterns(self._map, families) or role_of(self._map, page)):
            self.read_patterns()
        names = resolve(self._map, families)
        before = self._plan.names if self._plan is not None else None
        if before is not None and before.build != names.build and before.map is names.map:
            self._removed = tuple(sorted(before.families - names.families))
        for name, had in names.quantities.items():
            self._remember(names.map, name, had, restarted)
        return names

    def _remember(self, engine_map: EngineMap, name: str, had: Chosen | Absent, restarted: bool) -> None:
        """Say what became of a name that gave a number until now."""
        before = self._given.get(name)
        if isinstance(had, Chosen):
            self._lost.pop(name, None)
            self._given[name] = had.alias.name
            if before is not None and before != had.alias.name:
                self._moved[name] = gone_text(engine_map, before) or f"{before} is gone; it is now {had.alias.name}"
            return
        quantity = engine_map.quantities[name]
        may_go = quantity.conditional or quantity.absent_means is not None
        if before is None or had.code is None or (may_go and restarted):
            if restarted:
                self._given.pop(name, None)
                self._lost.pop(name, None)
            return
        text = gone_text(engine_map, before) or f"{before} is gone"
        if had.remedy is not None and had.remedy == engine_map.unmute:
            self._lost[name] = Absent(Why.MISSING, f"{before} is gone: {engine_map.muted}", had.remedy)
        elif len(quantity.names) > 1:
            self._lost[name] = Absent(Why.MISSING, f"{text}, and that is not on the page either", had.remedy)
        else:
            self._lost[name] = Absent(Why.MISSING, text, had.remedy)

    def _not_understood(self, page: Page) -> tuple[EngineFacts, list[_Hole]]:
        against = detect(self._maps, page.families)[1]
        known = ", ".join(m.title for m in self._maps)
        shown = ", ".join(list(page.families)[:SHOWN_FAMILIES]) or "none"
        more = f" and {len(page.families) - SHOWN_FAMILIES} more" if len(page.families) > SHOWN_FAMILIES else ""
        muted = next((m for m in self._maps if is_muted(m, page.families)), None)
        role = self._maps[0].role
        unknown = f"no {role} that this version knows (only {known}) writes this page; its families: {shown}{more}"
        why = against or unknown
        remedy = "give the address of a /metrics page of " + known
        elsewhere = None if against else self._of_the_other_role(page)
        kinds = KINDS if role == "engine" else ROUTER_KINDS
        other = None if against else detect([load_map(kind) for kind in kinds], page.families)[0]
        if other is not None and other not in self._maps:
            why = f"this is a page of {other.title}, and its kind was given as {known}"
            remedy = f"write kind: {other.kind}, or leave kind out"
        elif elsewhere is not None:
            why = f"this is {elsewhere.title}, {'a router' if elsewhere.role == 'router' else 'an engine'}; {why}"
            remedy = f"write it under {elsewhere.role}s:"
        elif muted is not None and not against:
            why = f"no {role}'s numbers are on this page (it has {shown}{more}); if it is {muted.title}, {muted.muted}"
            remedy = muted.unmute
        engine_map = self._maps[0]
        found = tuple(Found(name, self.target, None, why=why, remedy=remedy, code=Why.MISSING)
                      for name in engine_map.quantities if name not in engine_map.patterns)
        holes = [_Hole((name, self.target, ""), Why.MISSING, f"{why}: {remedy}") for name in engine_map.quantities
                 if name not in engine_map.patterns]
        return EngineFacts(self.target, (), kind="unknown", found=found, closed=tuple(sorted(self._closed))), holes

    def _of_the_other_role(self, page: Page) -> EngineMap | None:
        """A router where engines are, or an engine where routers are."""
        kinds = ROUTER_KINDS if self._maps[0].role == "engine" else KINDS
        return detect([load_map(kind) for kind in kinds], page.families)[0]

    def _understood(
        self, page: Page, names: Names, restarted: bool, layout: list[tuple[str, Mapping[str, str]]]
    ) -> _Plan:
        names = _with_series(names, page)
        members = self._without_strangers(_lowest_ranks(_members(page.series, names), names.map), names, restarted)
        subjects = self._see({m.engine for m in members if names.map.quantities[m.name].of == "engine"}, restarted)
        slots = _slots(members, names, subjects, self.target)
        self._shared = frozenset() if self.target in subjects.values() else frozenset(
            name for name, subject, _ in slots if subject == self.target and names.map.quantities[name].of == "engine")
        slots = self._leave_crowded(slots, MOST_KEYS[names.map.role])
        slots, holes = self._without_reasons(slots, names)
        self._keep_gone(slots)
        ones: list[_One] = []
        many: list[_Many] = []
        fixed: list[tuple[SlotKey, float]] = []
        for slot, group in slots.items():
            quantity = names.map.quantities[slot[0]]
            had = names.quantities[slot[0]]
            over = had.alias.over if isinstance(had, Chosen) else None
            if quantity.label is not None:
                _from_label(slot, quantity, group, fixed, holes)
            elif over is not None and len({member.is_over for member in group}) < 2:
                lacks = quantity.names[0].name if all(member.is_over for member in group) else over.name
                holes.append(_Hole(slot, Why.MISSING, f"{lacks} is not on the page, and the number is made of both"))
            else:
                plus = sum(value for value in self._gone.get(slot, {}).values() if 0.0 <= value <= LARGEST)
                _from_values(slot, quantity, group, names, plus, ones, many)
        fixed += [((name, subject, ""), 0.0) for name, had in names.quantities.items()
                  if isinstance(had, Absent) and had.is_zero for subject in self._owners(names, name, subjects)]
        holes += [_Hole((name, subject, ""), Why.TOO_LARGE, _crowd_text(names, name))
                  for name, subject in sorted(self._crowded)]
        holes += self._holes(names, set(slots), subjects, page)
        holes += self._bare(names, slots, subjects, page.series)
        self._expected |= {slot for slot in slots if slot[2] != _ANY}
        facts = self._say(page, names, subjects, slots, holes)
        starts = self._starts(page.series)
        columns = _columns(ones)
        return _Plan(page.families, layout, bool(page.bad), page.duplicates, ones, columns, many, fixed, holes, starts,
                     names, facts)

    def _without_strangers(self, members: Sequence[_Member], names: Names, restarted: bool) -> Sequence[_Member]:
        """All but those of an engine that no page before this one told of: a garbled line may name any, which would be
        missed for ever after, and give the others new names. It is taken when a second page tells of it, and at once
        where it is the next in number.
        """
        if restarted:
            self._strangers.clear()
        new = set[str]() if restarted or not self._indices else {
            one.engine for one in members
            if one.engine is not None and names.map.quantities[one.name].of == "engine"}.difference(self._indices)
        new -= self._strangers | _next_to(self._indices, new)
        self._left_out = bool(new)
        self._strangers |= set(sorted(new)[:max(0, MOST_ENGINES - len(self._strangers))])
        return [one for one in members if one.engine not in new] if new else members

    def _leave_crowded(self, slots: Mapping[SlotKey, list[_Member]], most: int) -> dict[SlotKey, list[_Member]]:
        """The slots but those of numbers that have, or had, more than `most` keys; of them nothing is remembered."""
        count = Counter((name, subject) for name, subject, _ in {*slots, *self._expected})
        self._crowded |= {of for of, keys in count.items() if keys > most}
        self._expected = {slot for slot in self._expected if slot[:2] not in self._crowded}
        return {slot: group for slot, group in slots.items() if slot[:2] not in self._crowded}

    def _without_reasons(
        self, slots: Mapping[SlotKey, list[_Member]], names: Names
    ) -> tuple[dict[SlotKey, list[_Member]], list[_Hole]]:
        """Where one key that a bug counts everything under stands alone: the count goes on, its key tells nothing."""
        kept, holes = dict(slots), list[_Hole]()
        for slot in slots:
            name, subject, key = slot
            had, quantity = names.quantities[name], names.map.quantities[name]
            if key not in quantity.lone or not isinstance(had, Chosen):
                continue
            if all(other == slot or other[:2] != slot[:2] for other in (*slots, *self._expected)):
                kept[name, subject, _ANY] = kept.pop(slot)
                why = f"{had.family} counts all as {key}: {quantity.lone_means}"
                holes.append(_Hole(slot, quantity.lone[key], why))
        return kept, holes

    def _keep_gone(self, slots: Mapping[SlotKey, Sequence[_Member]]) -> None:
        """A counter of several series must not drop because one of them left: that would read as a restart."""
        last = self._series
        for slot, places in self._places.items():
            gone = self._gone.setdefault(slot, {})
            gone |= {apart: max(last[i].value for i in at) for apart, at in places.items()}
        self._places = defaultdict(lambda: defaultdict(list))
        for slot, group in slots.items():
            if SAMPLES[slot[0]] != "gauge":
                for member in group:
                    self._places[slot][member.apart].append(member.at)
                    self._gone.get(slot, {}).pop(member.apart, None)  # here, so not gone

    def _see(self, found: set[str | None], restarted: bool) -> dict[str, str]:
        """Index -> subject of every engine here, those included that should be here and are not."""
        before = dict(self._subjects())
        indices = {index for index in found if index is not None} or ({"0"} if found else set())
        first = not self._indices
        if not indices:  # nothing of any engine on this page
            return before or {"0": f"{self.target}/0" if self.shape else self.target}
        if restarted and not first:
            indices |= set(_between(indices))
            self.shape = len(indices) > 1
        else:
            indices |= set(self._indices)
            indices |= set(_between(indices))
            self.shape = len(indices) > 1 or bool(self.shape)
        self._indices = tuple(sorted(indices, key=lambda i: (not _is_index(i), int(i) if _is_index(i) else 0, i)))
        now = dict(self._subjects())
        # The target itself goes on as the subject of all engines together, also where it was the name of the one.
        self._closed = (self._closed | set(before.values())) - set(now.values()) - {self.target}
        self._expected = {slot for slot in self._expected if slot[1] not in self._closed}
        return now

    def _subjects(self) -> Iterator[tuple[str, str]]:
        for index in self._indices:
            yield index, self.target if index == "0" and not self.shape else f"{self.target}/{index}"

    def _owners(self, names: Names, name: str, subjects: Mapping[str, str]) -> tuple[str, ...]:
        """Of whom a quantity is told: of the target, or of each of its engines."""
        of_all = names.map.quantities[name].of == "target" or name in self._shared
        return (self.target,) if of_all else tuple(subjects.values())

    def _bare(
        self, names: Names, slots: Collection[SlotKey], subjects: Mapping[str, str], series: Sequence[Series]
    ) -> Iterator[_Hole]:
        """A Gap for each latency that is told without buckets. Its count goes on: arrivals are judged by it."""
        bare, told = _without_buckets(slots), {slot[:2] for slot in (*slots, *self._expected)}
        plain = {normalise(one.name) for one in series}  # a gauge, or only quantiles
        for name, had in names.quantities.items():
            if isinstance(had, Chosen) and SAMPLES[name] == "histogram" and had.alias.part is None and (
                    normalise(had.alias.name) in plain):
                bare |= {(name, subject) for subject in self._owners(names, name, subjects)} - told
        for name, subject in sorted(bare):
            had = names.quantities[name]
            if isinstance(had, Chosen):
                yield _Hole((name, subject, "+Inf"), Why.MISSING, _BARE.format(had.family))

    def _holes(
        self, names: Names, slots: set[SlotKey], subjects: Mapping[str, str], page: Page
    ) -> Iterator[_Hole]:
        """A Gap for all that should stand on this page and does not."""
        told = {(name, subject) for name, subject, _ in slots} | self._crowded  # these have a Gap of their own
        seen = {subject for _, subject in told}
        spoilt = _spoilt(names, page, {name for name, _ in told})
        keys, known = defaultdict(list), {slot[1] for slot in self._expected}
        for name, subject, key in sorted(self._expected - slots):
            keys[name, subject].append(key)
        for name, had in names.quantities.items():
            quantity = names.map.quantities[name]
            for subject in self._owners(names, name, subjects):
                if isinstance(had, Absent):
                    absent = self._lost.get(name, had)
                    if absent.code is not None:
                        remedy = f": {absent.remedy}" if absent.remedy else ""
                        yield _Hole((name, subject, ""), absent.code, absent.why + remedy)
                    continue
                gone = keys.get((name, subject), [])
                if (name, subject) not in told:  # one Gap for the whole of it
                    others = any(n == name for n, _ in told)
                    if not (gone or name in spoilt or (others and _is_plain(name, quantity))):
                        continue
                    gone = [""]
                elif name in spoilt and not gone and not _is_plain(name, quantity):
                    gone = [""]  # we cannot know which
                code, why = Why.MISSING, f"{had.family} is gone from the page"
                if name in spoilt:
                    code, why = spoilt[name]
                elif subject != self.target and subject not in seen:
                    why = f"engine {subject} is {'gone from' if subject in known else 'not on'} the page"
                for key in gone:
                    yield _Hole((name, subject, key), code, why)

    def _say(
        self, page: Page, names: Names, subjects: Mapping[str, str], slots: Collection[SlotKey], holes: Sequence[_Hole]
    ) -> EngineFacts:
        """For people: how each quantity was had, or why not and what to do."""
        told = {(name, subject) for name, subject, key in slots if key != _ANY} - _without_buckets(slots)
        missing = {hole.slot[:2]: hole for hole in holes}
        found = [self._say_page(page, names, {subject for _, subject, _ in slots})]
        for name, had in names.quantities.items():
            quantity = names.map.quantities[name]
            for subject in self._owners(names, name, subjects):
                hole = missing.get((name, subject))
                if isinstance(had, Absent):
                    absent = self._lost.get(name, had)
                    if absent.is_zero:
                        found.append(Found(name, subject, "0", note=absent.why))
                        continue
                    found.append(Found(name, subject, None, why=absent.why, remedy=absent.remedy, code=absent.code))
                elif hole is not None and (name, subject) not in told:
                    found.append(Found(name, subject, None, why=hole.why, remedy=quantity.remedy, code=hole.code))
                else:
                    since = f"{names.map.versioned}'s name since {had.alias.since}" if had.alias.since else ""
                    empty = "" if (name, subject) in told else "nothing counted yet"
                    parts = (since, had.alias.note, self._moved.get(name, ""), empty)
                    found.append(Found(name, subject, _spelt(had), note="; ".join(part for part in parts if part),
                                       at_end=had.alias.at_end, drifts=had.alias.drifts))
        model = names.map.model_label
        models = (s.labels[model] for s in page.series if model is not None and s.labels.get(model) not in NAMELESS)
        engines = tuple(subjects.values())
        closed = tuple(sorted(self._closed))
        return EngineFacts(self.target, engines, names.map.kind, next(models, None), names.build, tuple(found), closed,
                           shown_patterns(names.map, page.families), role_of(names.map, page))

    def _say_page(self, page: Page, names: Names, seen: Set[str]) -> Found:
        title, whose = names.map.title, names.map.versioned
        version = f"{whose} {names.at_least} or later, by its names" if names.at_least else whose
        version = version if whose == title else f"{title}: {version}"
        notes = []
        start = names.quantities.get("process_start")
        if isinstance(start, Absent) and names.map.quantities["process_start"].names:  # else it never has one
            notes.append(start.why)
        lacking = [index for index, subject in self._subjects() if subject not in seen]
        if lacking and len(lacking) < len(self._indices):
            notes.append(f"of the engines {self._indices[0]} to {self._indices[-1]} this page tells nothing of "
                         + ", ".join(lacking))
        if page.duplicates:
            more = f" and {len(page.duplicates) - 1} more" if len(page.duplicates) > 1 else ""
            notes.append(f"told twice, and the first counts: {page.duplicates[0]}{more}")
        if page.bad_count:
            notes.append(f"not read: {page.error}")
        if self._removed:
            notes.append("gone since the last build: " + ", ".join(self._removed))
        return Found("page", self.target, version, note="; ".join(notes))


def _crowd_text(names: Names, name: str) -> str:
    had, label = names.quantities[name], names.map.quantities[name].key or "le"
    family = had.family if isinstance(had, Chosen) else name
    return (f"{family} has had more than {MOST_KEYS[names.map.role]} values of {label}: something that is new each time"
            " is written there, and it is not read until the process behind this page restarts without that")


def role_of(engine_map: EngineMap, page: Page) -> str:
    """"prefill" or "decode", where a page says so."""
    label = engine_map.role_label
    return next((s.labels[label] for s in page.series if label is not None and s.labels.get(label) in ROLES), "")


@lru_cache(8)
def _wanted(kinds: tuple[str, ...]) -> frozenset[str]:
    """One set for all readers of the same engines."""
    return spellings(load_map(kind) for kind in kinds)


def _is_index(word: str) -> bool:
    """Whether a label counts engines: a number that somebody may have written."""
    return word.isdecimal() and len(word) < 10


def _next_to(indices: Iterable[str], new: Set[str]) -> set[str]:
    """Those of the new ones that count on from the others."""
    numbers, known = {i for i in new if _is_index(i)}, [int(i) for i in indices if _is_index(i)]
    return {i for i in numbers if known and int(i) <= max(known) + len(numbers)}


def _between(indices: Iterable[str]) -> list[str]:
    """The indices that a gapless count from the first to the last would have, too."""
    known = {int(index) for index in indices if _is_index(index)}
    if not known or max(known) - min(known) > MOST_ENGINES:
        return []
    return [str(i) for i in range(min(known), max(known)) if i not in known]


def _layout(page: Page) -> list[tuple[str, Mapping[str, str]]]:
    """What stands on a page and in which order: as long as it stays, so does the plan."""
    return [*((one.name, one.labels) for one in page.series), *((one.name, one.labels) for one in page.natives)]


def _is_same(plan: _Plan, page: Page, layout: list[tuple[str, Mapping[str, str]]]) -> bool:
    return plan.families == page.families and plan.layout == layout and plan.twice == page.duplicates


def _columns(ones: Sequence[_One]) -> _Columns:
    names, subjects, keys = ([one.slot[part] for one in ones] for part in range(3))
    return _Columns(names, subjects, keys, [one.at for one in ones], [one.top for one in ones])


def _spelt(had: Chosen) -> str:
    """The metric's name for people: with its `_total`, unless the page writes it in a way of its own."""
    name = had.alias.name if had.alias.name.removesuffix("_total") == had.family else had.family
    return name if had.alias.over is None else f"{name} / {had.alias.over.name}"


def _is_plain(name: str, quantity: Quantity) -> bool:
    """One number a subject, without keys."""
    return SAMPLES[name] != "histogram" and quantity.key is None


def _without_buckets(slots: Iterable[SlotKey]) -> set[tuple[str, str]]:
    """Of which (name, subject) a sum and a count are told and no bucket: a summary, or a histogram made without."""
    told, with_buckets = set(), set()
    for name, subject, key in slots:
        if SAMPLES[name] == "histogram":
            told.add((name, subject))
            if not math.isnan(_number(key)):
                with_buckets.add((name, subject))
    return told - with_buckets


def _with_series(names: Names, page: Page) -> Names:
    """Where a name is chosen that the page only declares, or by its labels and none is so labelled: the quantity's next
    name that has a series.
    """
    chosen = dict(names.quantities)
    found: dict[str, list[Series | NativeHistogram]] = defaultdict(list)
    every: list[Series | NativeHistogram] = [*page.series, *page.natives]
    for one in every:
        found[normalise(one.name)].append(one)
    written = {normalise(family): family for family in page.families}
    for name, had in names.quantities.items():
        if not isinstance(had, Chosen):
            continue
        quantity = names.map.quantities[name]
        for alias in quantity.names:
            take = _take(name, "", quantity, alias)
            other = Chosen(alias, written.get(normalise(alias.name), alias.name))
            ones = chain.from_iterable(
                found[part] for part in (normalise(alias.name), *(part for part, _ in _parts(name, other))))
            if any(alias.select is None or take.key_of(one.labels) is not None for one in ones):
                chosen[name] = had if alias is had.alias else other
                break
    return names._replace(quantities=chosen)


def _take(name: str, part: str, quantity: Quantity, alias: Alias) -> _Take:
    select = quantity.select if alias.select is None else alias.select
    return _Take(name, part, quantity.key, quantity.as_key, quantity.keys, select, quantity.skip)


def _members(series: Sequence[Series], names: Names) -> Iterator[_Member]:
    """The series that count, each with what it is."""
    wanted: dict[str, list[tuple[str, _Take]]] = defaultdict(list)
    for name, had in names.quantities.items():
        quantity = names.map.quantities[name]
        if isinstance(had, Chosen):
            for written, part in _parts(name, had):
                wanted[written].append((had.alias.name, _take(name, part, quantity, had.alias)))
            if had.alias.over is not None:
                over = had.alias.over
                take = _Take(name, "", None, None, {}, over.select, {}, is_over=True)
                wanted[normalise(over.name)].append((over.name, take))
            for also in quantity.also:
                take = _Take(name, "", also.key, also.as_key, also.keys, also.select, also.skip)
                wanted[normalise(also.name)].append((also.name, take))
    counters = {normalise(one.name) for one in series if one.name.endswith("_total")}
    both = counters.intersection(normalise(one.name) for one in series if not one.name.endswith("_total"))
    copies, breakdowns = frozenset(names.map.copies), names.map.breakdowns
    for i, one in enumerate(series):
        written = normalise(one.name)
        for name, take in wanted.get(written, ()):
            if written in both and one.name.endswith("_total") != name.endswith("_total"):
                continue  # x and x_total are two things here
            labels = one.labels
            key = take.key_of(labels)
            if key is None or any(labels.get(label) for label in breakdowns):
                continue
            index = next((labels[label] for label in names.map.engine_labels if labels.get(label)), None)
            apart = (("", written), *sorted((k, v) for k, v in labels.items() if k not in copies))
            yield _Member(i, take.name, key, index, apart, one, take.is_over)


def _lowest_ranks(members: Iterable[_Member], engine_map: EngineMap) -> list[_Member]:
    """Of series that every rank of an engine tells, the lowest rank's count; shares are compared, so all of them."""
    found = list(members)
    if not engine_map.ranks:
        return found
    lowest: dict[tuple[str, str, Apart], tuple[tuple[int, str], ...]] = {}
    ranked: list[tuple[_Member, tuple[str, str, Apart] | None, tuple[tuple[int, str], ...]]] = []
    for member in found:
        quantity = engine_map.quantities[member.name]
        ranks = [label for label in engine_map.ranks if label != quantity.key]
        if quantity.merge == "max" or not any(label in member.series.labels for label in ranks):
            ranked.append((member, None, ()))
            continue
        same = (member.name, member.key, tuple((k, v) for k, v in member.apart if k not in ranks))
        values = [member.series.labels.get(label, "") for label in ranks]
        rank = tuple((int(v) if _is_index(v) else 0, v) for v in values)
        lowest[same] = min(lowest.get(same, rank), rank)
        ranked.append((member, same, rank))
    return [member for member, same, rank in ranked if same is None or lowest[same] == rank]


def _parts(name: str, had: Chosen) -> Iterator[tuple[str, str]]:
    base = normalise(had.alias.name)
    if had.alias.part is not None:
        yield f"{base}_{had.alias.part}", ""
    elif SAMPLES[name] != "histogram":
        yield base, ""
    else:
        yield f"{base}_bucket", "le"
        yield f"{base}_sum", "sum"
        yield f"{base}_count", "count"


def _slots(
    members: Iterable[_Member], names: Names, subjects: Mapping[str, str], target: str
) -> dict[SlotKey, list[_Member]]:
    slots: dict[SlotKey, list[_Member]] = defaultdict(list)
    for member in members:
        if names.map.quantities[member.name].of == "target":
            slots[member.name, target, member.key].append(member)
        elif member.engine is not None:
            slots[member.name, subjects[member.engine], member.key].append(member)
        elif len(subjects) > 1 and SAMPLES[member.name] != "gauge":  # counted by all of them together
            slots[member.name, target, member.key].append(member)
        else:  # before engines were told apart, or a number of all of them
            for subject in subjects.values():
                slots[member.name, subject, member.key].append(member)
    return dict(slots)


def _from_label(
    slot: SlotKey,
    quantity: Quantity,
    members: Sequence[_Member],
    fixed: list[tuple[SlotKey, float]],
    holes: list[_Hole],
) -> None:
    label = quantity.label or ""
    words = [member.series.labels.get(label, "") for member in members]
    values = [quantity.words[word] if word in quantity.words else _number(word) for word in words]
    wrong = next((word for word, value in zip(words, values, strict=True) if not 0.0 <= value <= LARGEST), None)
    if wrong is not None:
        why = f"{members[0].series.name}: {label} is {wrong!r}, not a number"
        holes.append(_Hole(slot, Why.NOT_A_NUMBER, why))
        return
    fixed.append((slot, max(values) if quantity.merge == "max" else sum(values)))


def _number(word: str) -> float:
    """A label as a number; NaN where it is none."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def _from_values(
    slot: SlotKey,
    quantity: Quantity,
    members: Sequence[_Member],
    names: Names,
    plus: float,
    ones: list[_One],
    many: list[_Many],
) -> None:
    had = names.quantities[slot[0]]
    unit = (had.alias.unit if isinstance(had, Chosen) else None) or quantity.unit
    if SAMPLES[slot[0]] == "histogram":
        factor = _FACTORS.get(unit, 1.0)
        if slot[2] not in {"sum", "count", "+Inf"}:
            bound = _number(slot[2])
            if math.isnan(bound):  # a bucket of no bound is none
                return
            if factor != 1.0:
                slot = (slot[0], slot[1], repr(bound * factor))
        if slot[2] != "sum":
            unit = "1"
    over = _groups(member for member in members if member.is_over)
    if over:
        many.append(_Many(slot, quantity, unit, _groups(m for m in members if not m.is_over), plus, over))
        return
    if len(members) == 1 and not plus and not quantity.invert and unit in {"1", "s", "ratio"}:
        ones.append(_One(members[0].at, slot, SHARE_TOP if unit == "ratio" else LARGEST))
        return
    many.append(_Many(slot, quantity, unit, _groups(members), plus))


def _groups(members: Iterable[_Member]) -> tuple[tuple[int, ...], ...]:
    """Where the series stand; copies of one number together."""
    groups: dict[Apart, list[int]] = defaultdict(list)
    for member in members:
        groups[member.apart].append(member.at)
    return tuple(tuple(group) for group in groups.values())


def _without_old(page: Page, now: float) -> Page:
    """A page without the series whose own time is not now: what a proxy kept is no reading. A time of 0 is none."""
    fresh: list[Series] = []
    bad = list(page.bad)
    for one in page.series:
        off_s = now - one.at if one.at else 0.0
        if abs(off_s) <= OLD_S:
            fresh.append(one)
        else:
            told = f"its own timestamp is {abs(off_s):.0f} s {'old' if off_s > 0 else 'ahead'}"
            bad.append(BadLine(0, "", told, one.name))
    return page if len(fresh) == len(page.series) else replace(page, series=fresh, bad=bad)


def _spoilt(names: Names, page: Page, told: Collection[str]) -> dict[str, tuple[Why, str]]:
    """Quantities that a line which is not used belongs to, with what is wrong with it. `told`: what others tell."""
    out: dict[str, tuple[Why, str]] = {}
    natives = {normalise(one.name) for one in page.natives}
    for name, had in names.quantities.items():
        if isinstance(had, Chosen) and name not in told and normalise(had.family) in natives:
            why = f"{had.family} is a native histogram on this page, which is not judged: have it write classic buckets"
            out[name] = (Why.MISSING, why)
    for line in page.bad:
        if line.name is None:
            continue
        written = normalise(line.name)
        for name, had in names.quantities.items():
            if isinstance(had, Chosen) and any(written == part for part, _ in _parts(name, had)):
                old = (Why.STALE, f"{line.name}: {line.reason}")  # see _without_old
                out.setdefault(name, (Why.BAD_LINE, str(line)) if line.line else old)
    return out
