"""What each engine calls its metrics, through its versions: data in *.yaml, found by name here. Pure but for loading.

Names are compared normalised: Ray's prefix and Prometheus's `_total` off, `:` as `_`, so `ray_vllm_num_preemptions` and
`vllm:num_preemptions_total` are one. Of a quantity's names the first that is on the page wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from agent.model import SAMPLES, Why

Unit = Literal["1", "s", "ms", "us", "ratio", "percent", "ratio or percent"]


class Over(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a name's number is divided by."""

    name: str
    select: Mapping[str, tuple[str, ...]] = {}


class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One name of a quantity. `since`, `hidden` and `gone` are the first versions that have, hide and lack it."""

    name: str
    since: str | None = None
    hidden: str | None = None
    gone: str | None = None
    unit: Unit | None = None  # where it differs from the quantity's
    note: str = ""  # what a person should know of the number
    select: Mapping[str, tuple[str, ...]] | None = None  # where it differs; no series so labelled: the next name
    over: Over | None = None  # the formula name ÷ over
    part: Literal["sum", "count"] | None = None  # of a histogram, where the quantity is a counter
    beside: bool = False  # another way to the same number, not an older name
    at_end: bool = False  # a counter that moves only when a request ends
    drifts: bool = False  # a gauge that may rise for ever: by itself no witness of work


class Also(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another family that counts towards a quantity, where it is on the page."""

    name: str
    key: str | None = None
    as_key: str | None = None
    keys: Mapping[str, str] = {}
    select: Mapping[str, tuple[str, ...]] = {}
    skip: Mapping[str, tuple[str, ...]] = {}


class Quantity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one of agent.model.SAMPLES is had."""

    names: tuple[Alias, ...]  # newest first; none: this engine does not tell it, `absent_means` says why
    of: Literal["engine", "target"] = "engine"
    unit: Unit = "1"  # "ratio or percent": decided once a build, by the first value over 1.5
    merge: Literal["sum", "max"] = "sum"  # series of one subject and key; ratios are never added
    key: str | None = None  # the label that becomes Sample.key
    as_key: str | None = None  # a key of our own, where no label has it
    keys: Mapping[str, str] = {}  # what a label's value is as a key; "*": every other value
    select: Mapping[str, tuple[str, ...]] = {}  # label -> values; other series are not looked at
    skip: Mapping[str, tuple[str, ...]] = {}  # label -> values of series that are not looked at
    lone: Mapping[str, Why] = {}  # key that, alone on a page, is where a bug counts all of them: how that is told
    lone_means: str = ""
    also: tuple[Also, ...] = ()
    label: str | None = None  # the number stands in this label, not in the value
    words: Mapping[str, float] = {}  # what a label's word is as a number
    invert: bool = False  # 1 - value
    sentinels: tuple[float, ...] = (-1.0,)  # "no value" in disguise
    conditional: bool = False  # absent on a healthy engine whose feature is off
    absent_means: str | None = None  # what its absence says; None: it should be there
    remedy: str | None = None
    witnesses: tuple[str, ...] = ()  # families beside which absence means "nothing counted yet"
    zero_beside: tuple[str, ...] = ()  # families beside which absence is the number 0


class Other(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that we do not read, and what to do about it."""

    note: str = ""
    gone: str | None = None
    instead: tuple[str, ...] = ()


class Impostor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Families that prove that a page with an engine's names is none."""

    families: tuple[str, ...]
    means: str


class EngineMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that we know of one engine's page."""

    kind: str
    title: str
    prefix: str  # its own families start so; they show the engine and make the build
    quantities: Mapping[str, Quantity]
    role: Literal["engine", "router"] = "engine"
    is_health_load: bool = False  # its /health says 5xx under mere load: slow, and not down, while its page is served
    detect: tuple[str, ...] = ()  # families that show the engine, too
    bare: tuple[str, ...] = ()  # its own families that some versions write without the prefix
    engine_labels: tuple[str, ...] = ()  # the first that a series has tells engines apart
    breakdowns: tuple[str, ...] = ()  # labels whose series, but for the one without a value, only split that one up
    ranks: tuple[str, ...] = ()  # labels of ranks of one engine: a count is the lowest rank's, a share the largest
    model_label: str | None = None
    versions_of: str | None = None  # whose versions `since`, `hidden` and `gone` are, where not its own
    copies: tuple[str, ...] = ()  # labels whose series repeat one number
    impostors: tuple[Impostor, ...] = ()
    mute_families: tuple[str, ...] = ()  # all that is left when its statistics are off
    muted: str = ""
    unmute: str = ""
    off_by: str = ""
    dating: Mapping[str, str] = {}  # family -> the version that it came with
    others: Mapping[str, Other] = {}
    patterns: Mapping[str, Quantity] = {}  # quantities that only deployment patterns have; see with_patterns
    shows: Mapping[str, int] = {}  # family -> the deployment pattern that its presence shows
    role_label: str | None = None  # tells "prefill" from "decode"

    @property
    def versioned(self) -> str:
        """Whose versions a person is told."""
        return self.versions_of or self.title


class Chosen(NamedTuple):
    """The name by which a quantity is read on this page. `family` is written as there."""

    alias: Alias
    family: str


class Absent(NamedTuple):
    """Why a quantity is not read. `code` None: it is only not counted yet. `is_zero`: its absence is the number 0."""

    code: Why | None
    why: str
    remedy: str | None = None
    is_zero: bool = False


class Names(NamedTuple):
    """What one set of families resolves to."""

    map: EngineMap
    build: str  # of the engine's own families
    at_least: str | None  # the version that the page shows
    quantities: Mapping[str, Chosen | Absent]
    families: frozenset[str]  # its own, normalised


KINDS: tuple[str, ...] = (  # a page that could be of two is of the first; who repeats another's page comes after it
    "vllm", "ray-serve-llm", "sglang", "trtllm-serve", "tgi", "llamacpp", "lmdeploy", "triton", "dynamo",
    "dynamo-worker",
)
ROUTER_KINDS: tuple[str, ...] = (
    "production-stack-router", "vllm-router", "sglang-router", "smg", "gateway-api-epp", "llm-d-router"
)


def load_map(kind: str) -> EngineMap:
    """The map of one engine or router, from the file beside this module.

    Raises:
        KeyError: of a kind that is in neither KINDS nor ROUTER_KINDS.
        msgspec.ValidationError: the file breaks the form above (a fault of ours).
    """
    if kind not in KINDS and kind not in ROUTER_KINDS:
        raise KeyError(f"engine kind {kind!r} is not known; known: auto, {', '.join(KINDS)}")
    return _load(kind)


@cache
def _load(kind: str) -> EngineMap:
    return parse_map(_read(kind))


def _read(kind: str) -> dict[str, Any]:
    """A map's YAML, laid over the one that it `extends`."""
    text = resources.files(__name__).joinpath(f"{kind}.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  (both are safe)
    base = data.pop("extends", None)
    if base is None:
        return dict(data)
    under = _read(base)
    own = data.get("quantities", {})
    return {**under, **data, "quantities": {n: {**q, **own.get(n, {})} for n, q in under["quantities"].items()}}


def parse_map(data: Any) -> EngineMap:
    """A map from its YAML as plain data, checked against the form above and the names of agent.model.

    Raises:
        msgspec.ValidationError: it breaks the form.
    """
    engine_map = msgspec.convert(data, EngineMap)
    unknown = [name for name in (*engine_map.quantities, *engine_map.patterns) if name not in SAMPLES]
    if unknown:
        raise msgspec.ValidationError(f"{engine_map.kind}: agent.model.SAMPLES has no {', '.join(unknown)}")
    return engine_map


def with_patterns(engine_map: EngineMap) -> EngineMap:
    """A map whose pages are read for what deployment patterns have, too; what is not on a page is not spoken of."""
    return msgspec.structs.replace(engine_map, quantities={**engine_map.quantities, **engine_map.patterns})


def shown_patterns(engine_map: EngineMap, families: Collection[str]) -> dict[int, str]:
    """Deployment pattern -> the family on this page that shows it."""
    present = _written(families)
    found: dict[int, str] = {}
    for family, number in engine_map.shows.items():
        if normalise(family) in present:
            found.setdefault(number, family)
    return found


def normalise(name: str) -> str:
    """A family's or sample's name as we compare it: without `ray_` and `_total`, `:` as `_`."""
    return name.removeprefix("ray_").replace(":", "_").removesuffix("_total")


def spellings(maps: Iterable[EngineMap]) -> frozenset[str]:
    """Every way in which the wanted families of these maps may be written on a page, without `_total`."""
    named = (name for m in maps for q in m.quantities.values() for name in _names_of(q))
    plain = {name.removesuffix("_total") for name in named}
    plain |= {name.replace(":", "_") for name in plain}
    return frozenset(plain | {f"ray_{name}" for name in plain})


def _names_of(quantity: Quantity) -> Iterator[str]:
    """Every family that a quantity may be made of."""
    for alias in quantity.names:
        yield alias.name
        if alias.over is not None:
            yield alias.over.name
    yield from (also.name for also in quantity.also)


def _written(families: Iterable[str]) -> dict[str, str]:
    """Normalised name -> as written. A histogram without a TYPE line is known by its buckets."""
    out: dict[str, str] = {}
    for family in families:
        name = family.removesuffix("_bucket")
        out[normalise(name)] = name
    return out


def detect(maps: Iterable[EngineMap], families: Collection[str]) -> tuple[EngineMap | None, str]:
    """Whose page this is, by its families (as written there); else None and what is known against it."""
    present, known_maps = _written(families), tuple(maps)
    plain = {family.removesuffix("_bucket").removesuffix("_total") for family in families}
    for engine_map in known_maps:
        for impostor in engine_map.impostors:
            if any(normalise(family) in present for family in impostor.families):
                return None, impostor.means
        if any(family.startswith(engine_map.prefix) for family in families):
            return engine_map, ""
        if ":" in engine_map.prefix and not plain.isdisjoint(map(normalise, _known(engine_map))):
            return engine_map, ""  # an exporter in between took the colons away
    for engine_map in known_maps:
        if any(normalise(name) in present for name in _known(engine_map)):  # in Ray's spelling
            return engine_map, ""
    return None, ""


def _known(engine_map: EngineMap) -> Iterator[str]:
    """Families that show an engine."""
    yield from engine_map.detect
    for quantity in engine_map.quantities.values():
        yield from (alias.name for alias in quantity.names if alias.name.startswith(engine_map.prefix))


def is_muted(engine_map: EngineMap, families: Collection[str]) -> bool:
    """Are only the web server's and Python's own families left, as where an engine's statistics are off?"""
    present = _written(families)
    return any(normalise(f) in present for f in engine_map.mute_families) and not own(engine_map, families)


def own(engine_map: EngineMap, families: Iterable[str]) -> frozenset[str]:
    """The engine's own families, normalised."""
    prefix, bare = normalise(engine_map.prefix), frozenset(map(normalise, engine_map.bare))
    return frozenset(name for name in _written(families) if name.startswith(prefix) or name in bare)


def resolve(engine_map: EngineMap, families: Collection[str]) -> Names:
    """Which name gives each quantity on a page with these families (as written there)."""
    written = _written(families)
    mine = own(engine_map, families)
    at_least = _at_least(engine_map, written)
    told = any(normalise(alias.name) in mine for quantity in engine_map.quantities.values() for alias in quantity.names)
    quantities: dict[str, Chosen | Absent] = {}
    for name, quantity in engine_map.quantities.items():
        alias = next((a for a in quantity.names if normalise(a.name) in written), None)
        if alias is not None:
            quantities[name] = Chosen(alias, written[normalise(alias.name)])
        elif name not in engine_map.patterns:
            quantities[name] = _absent(engine_map, quantity, written, at_least, is_known=told or at_least is not None)
    build = hashlib.sha256("\n".join(sorted(mine)).encode()).hexdigest()[:12]
    return Names(engine_map, f"{engine_map.kind}-{build}", at_least, quantities, mine)


def _at_least(engine_map: EngineMap, written: Mapping[str, str]) -> str | None:
    dated = [v for family, v in engine_map.dating.items() if normalise(family) in written]
    for quantity in engine_map.quantities.values():
        dated += [a.since for a in quantity.names if a.since is not None and normalise(a.name) in written]
    return max(dated, key=version_key, default=None)


def _absent(
    engine_map: EngineMap, quantity: Quantity, written: Mapping[str, str], at_least: str | None, *, is_known: bool
) -> Absent:
    """`is_known`: the page has a name that we know, so what it lacks dates it."""
    if quantity.names and any(normalise(family) in written for family in quantity.witnesses):
        return Absent(None, f"{quantity.names[0].name} counts nothing yet")
    if not quantity.names or quantity.conditional:
        means = quantity.absent_means or f"{engine_map.title} does not tell it"
        return Absent(Why.NOT_SUPPORTED, means, quantity.remedy)
    newest = quantity.names[0]
    if any(normalise(family) in written for family in quantity.zero_beside):
        return Absent(None, f"{newest.name} is not on the page and so 0: it appears with its first event", None, True)
    if is_muted(engine_map, written.values()):
        return Absent(Why.MISSING, f"{newest.name} is not on the page: {engine_map.muted}", engine_map.unmute)
    names = [a for a in quantity.names if not a.beside]
    dated = [a for a in names if a.since is not None]
    first = min((a.since for a in dated if a.since is not None), key=version_key) if len(dated) == len(names) else None
    if newest.gone is not None and len(names) == 1:  # no version has it any more
        return Absent(Why.NOT_SUPPORTED, quantity.absent_means or f"{newest.name} is gone since {newest.gone}")
    if is_known and first is not None and not any(_is_of(alias, at_least) for alias in names):
        means = quantity.absent_means or f"{engine_map.versioned} tells it since {first}"
        older = "older" if at_least is None or version_key(at_least) < version_key(first) else "of a version in between"
        return Absent(Why.NOT_SUPPORTED, f"{means}; this page is {older}", quantity.remedy)
    former = [a.name for a in quantity.names[1:] if not a.beside]
    nor = f" (nor is {', '.join(former)}, its older name)" if former else ""
    return Absent(Why.MISSING, f"{newest.name} is not on the page{nor}", quantity.remedy)


def _is_of(alias: Alias, version: str | None) -> bool:
    """Whether a version has a name; what is older than every name that dates a page has none of them."""
    if version is None or alias.since is None:
        return False
    return version_key(alias.since) <= version_key(version) and (
        alias.gone is None or version_key(version) < version_key(alias.gone))


def gone_text(engine_map: EngineMap, name: str) -> str | None:
    """What became of a name that is no longer on a page; None where we know nothing of it."""
    wanted = normalise(name)
    for quantity in engine_map.quantities.values():
        for alias in quantity.names:
            if normalise(alias.name) != wanted:
                continue
            newest = quantity.names[0]
            if alias.beside:
                return None
            if alias is not newest:
                return f"{alias.name} is gone; since {alias.hidden or alias.gone or newest.since} it is {newest.name}"
            if alias.gone is not None:
                return f"{alias.name} is gone since {alias.gone}; {quantity.absent_means or 'nothing replaced it'}"
            return None
    for other_name, other in engine_map.others.items():
        if normalise(other_name) == wanted and other.gone is not None:
            instead = f": use {' and '.join(other.instead)}" if other.instead else ""
            note = f" ({other.note})" if other.note else ""
            return f"{other_name} is gone since {other.gone}{instead}{note}"
    return None


def hint(engine_map: EngineMap, name: str) -> str | None:
    """What to tell someone who asks for a metric by a name that is old or another's; None where it is the right one."""
    wanted = normalise(name)
    for quantity in engine_map.quantities.values():
        for alias in quantity.names[1:]:
            if normalise(alias.name) == wanted and not alias.beside:
                newest = quantity.names[0]
                hidden = f"; the old name is hidden since {alias.hidden}" if alias.hidden else ""
                gone = f" and gone by {alias.gone}" if alias.gone else ""
                return f"renamed to {newest.name} (since {newest.since}{hidden}{gone})"
    for other_name, other in engine_map.others.items():
        if normalise(other_name) == wanted:
            gone = f"gone since {other.gone}" if other.gone else ""
            instead = f"use {' and '.join(other.instead)}" if other.instead else ""
            return "; ".join(part for part in (gone, instead, other.note) if part)
    return gone_text(engine_map, name)


def version_key(version: str) -> tuple[int, ...]:
    """Versions in order: "0.9.2" before "0.10"."""
    return tuple(int(part) for part in version.split("."))
