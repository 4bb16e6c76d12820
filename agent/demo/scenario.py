"""A scenario: what happens to the demo's node, step after step, and what is expected to be seen of it. As YAML, strict.

    name: A fan fails
    steps:
      - {after: 10s, say: "A fan slows down.", cooling: {gpu: 3, share: 15%}}
      - {ask: "What pages?", answer: "The GPU, once.", expect: {fires: gpu-thermal-limit, within: 60s}}
      - {say: "It is replaced.", cooling: {gpu: 3, share: 100%}}
      - {expect: {quiet: true, within: 90s}}
      - {drill: llama-b}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Struct, field

from agent.demo.gpus import COUNT
from agent.strict import (
    ConfigErrors,
    Decoded,
    Duration,
    Fault,
    Parse,
    Places,
    PositiveDuration,
    Share,
    above_zero,
    cut,
    did_you_mean,
    load,
    rate_per_s,
)

ENGINES = ("llama-a", "llama-b")
STORY = Path(__file__).with_name("story.yaml")
TELLS = ("page", "ticket")  # the severities that are expected, and that may fire where `quiet` is not
ACTIONS = ("cooling", "xid", "reset", "users", "kill", "drill")
EXPECTED = ("fires", "resolves", "quiet", "healthy")
UserRate = Annotated[float, above_zero(rate_per_s, "a rate, as 6/s")]
Text = Annotated[str, Parse(str)]  # as it is written: a story may begin with a number


class _Form(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the file."""


class Cooling(_Form, frozen=True):
    """`cooling`: the share of its air that a GPU gets."""

    gpu: int
    share: Share


class Xid(_Form, frozen=True):
    """`xid`: a line of the driver's in the kernel log; with 79 the GPU is gone, and the engine on it ends."""

    gpu: int
    number: int
    text: Text = "pid=4242, name=vllm, simulated by tocsin demo"


class Expect(_Form, frozen=True):
    """`expect`: exactly one of these, within so many seconds.

    `resolves`: it fired in this play, and does no more. `quiet`: neither page nor ticket fires. `healthy`: the verdict
    is, so that nothing required is unknown either.
    """

    fires: str | None = None
    resolves: str | None = None
    quiet: bool = False
    healthy: bool = False
    within: PositiveDuration = 60.0  # s


class Step(_Form, frozen=True):
    """One of `steps`; each begins when the one before is done. At most one action."""

    after: Duration = 0.0  # s
    say: Text = ""
    ask: Text = ""
    answer: Text = ""
    cooling: Cooling | None = None
    xid: Xid | None = None
    reset: int | None = None  # a GPU, which comes back cool
    users: UserRate | None = None  # requests a second from now on
    kill: str | None = None  # an engine, unannounced
    drill: str | None = None  # an engine, by the real drilld
    expect: Expect | None = None


class Scenario(_Form, frozen=True):
    """The file, whole."""

    name: Text
    steps: tuple[Step, ...]
    seed: int = field(default=7)
    users: UserRate = 6.0  # requests a second


def read(path: Path, rules: Mapping[str, str]) -> Scenario:
    """A scenario, checked. `rules`: each id with its severity. Raises ConfigErrors with every fault."""
    found: Decoded[Scenario] = load(path, Scenario)
    faults = list(found.faults)
    if found.value is not None:
        places = Places(found.file, found.lines)
        for number, step in enumerate(found.value.steps):
            at = f"steps[{number}]"
            faults += [fault for fault in _faults(step, at, places, rules)
                       if not any(fault.key.startswith(known.key) for known in found.faults)]
        if not found.value.steps and not faults:
            faults.append(places.fault("steps", "nothing happens", "write at least one step, as - {say: \"…\"}"))
    if faults or found.value is None:
        raise ConfigErrors(faults)
    return found.value


def _faults(step: Step, at: str, places: Places, rules: Mapping[str, str]) -> Iterator[Fault]:
    given = [name for name in ACTIONS if getattr(step, name) is not None]
    if len(given) > 1:
        yield places.fault(f"{at}.{given[1]}", f"{given[0]} and {given[1]} in one step", "make two steps of it")
    if bool(step.ask) != bool(step.answer):
        yield places.fault(at, "ask and answer belong together", f"add {'answer' if step.ask else 'ask'}: \"…\"")
    named = {"cooling.gpu": None if step.cooling is None else step.cooling.gpu,
             "xid.gpu": None if step.xid is None else step.xid.gpu, "reset": step.reset}
    for name, gpu in named.items():
        if gpu is not None and not 0 <= gpu < COUNT:
            yield places.fault(f"{at}.{name}", f"there is no GPU {gpu}", f"write 0 to {COUNT - 1}")
    for name in ("kill", "drill"):
        engine = getattr(step, name)
        if engine is not None and engine not in ENGINES:
            yield places.fault(f"{at}.{name}", f"engine {cut(engine)!r} is unknown", did_you_mean(engine, ENGINES))
    if step.expect is not None:
        yield from _expect_faults(step.expect, f"{at}.expect", places, rules)
    if step == Step(after=step.after):
        yield places.fault(at, "nothing happens in this step", f"add say, expect, or one of {', '.join(ACTIONS)}")


def _expect_faults(expect: Expect, at: str, places: Places, rules: Mapping[str, str]) -> Iterator[Fault]:
    given = [name for name in EXPECTED if getattr(expect, name)]
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        yield places.fault(at, f"exactly one of {', '.join(EXPECTED)} is wanted, and there is {said}", "write one")
    for name in ("fires", "resolves"):
        rule = getattr(expect, name)
        if rule is not None and rule not in rules:
            yield places.fault(f"{at}.{name}", f"rule {cut(rule)!r} is unknown", did_you_mean(rule, rules, "rules"))
        elif rule is not None and rules[rule] not in TELLS:
            yield places.fault(f"{at}.{name}", f"rule {cut(rule)!r} is of severity {rules[rule]}, which tells nobody",
                               "write a rule that pages or is a ticket")


