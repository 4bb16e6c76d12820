"""A deployment against the twelve design principles: facts in, findings out. Pure; agent.lint_facts gathers the facts.

A principle is "kept", "at odds", or one "cannot tell", with what would tell. Limits without a source are those of the
principle in the seed "deployment design principles", section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agent import lint_design as design
from agent import lint_running as running
from agent.advise import BATCH_EVEN, BATCH_GOLDEN, OUTLIERS
from agent.lint_case import LATENCY_SEQS, THROUGHPUT_SEQS, Facts, Verdict, Word
from agent.lint_design import MOST_DROP
from agent.lint_memory import memory

WORST_FIRST: Mapping[Word, int] = {"at odds": 0, "cannot tell": 1, "kept": 2}


class Principle(NamedTuple):
    """One of the twelve. `why`: in our words."""

    number: int
    name: str
    judge: Callable[[Facts], Verdict]
    why: str


PRINCIPLES: tuple[Principle, ...] = (
    Principle(1, "latency or throughput first", design.direction,
              "A step of the engine serves all sequences in it. More of them a step raise tokens a second and lengthen"
              " each one's wait; one number cannot serve both. Declare which comes first, then hold the number of"
              f" sequences to it: up to {LATENCY_SEQS} where a person waits, {THROUGHPUT_SEQS} and more where nobody"
              " does. The seed has chunked prefill and drafting on for the one and off for the other; chunks that are"
              " on are no fault here: vLLM warns against turning them off. Of drafting, principle 7 has more."),
    Principle(2, "memory budget first", memory,
              "Weights, the KV cache of what runs, and temporaries must fit with 20 % to spare. Where all sequences fit"
              " at full length, that is sure. Mostly they do not, and need not: vLLM sets its KV cache aside at its"
              " start, and who finds no room waits; then what was seen decides, the KV cache's peak and preemptions."
              " The KV bytes of a token are 2 × layers × KV heads × head size × bytes of a number. The seed's worked"
              " line for Llama-2-7B does not add up: its printed numbers make 2.1 GB, its own formula with the hidden"
              " size of 4,096 makes 68.7 GB, its text says 8 GB; ours is 68.7 GB for that model, less with fewer KV"
              " heads than heads, and equals what a real engine reports (a test holds it against vLLM)."),
    Principle(3, "processing beside the model", running.hops,
              "Each service between the user and the engine adds a hop to every first token. End-to-end minus"
              " in-engine shows what they cost together."),
    Principle(4, "streaming", running.streaming,
              "People judge by the first token. A streamed answer shows it after the TTFT, a whole one only after the"
              " last token."),
    Principle(5, "the bottleneck's layer", running.bottleneck,
              "A busy GPU says nothing of where the limit is. What binds the engine (memory, seats, compute, bandwidth,"
              " what comes before it, the hardware below) has one knob each, and the others do not help. Something"
              " always binds; at odds is where what binds lies outside the engine, and no flag of it can help."),
    Principle(6, "outliers before quantizing", design.outliers,
              "Activations with a few very large values are cut off by quantizing them. Measure max ÷ mean a layer"
              f" first; over {OUTLIERS:.0f} only weights may be quantized."),
    Principle(7, "speculation by batch size", design.speculation,
              f"Drafting uses compute that small batches leave idle. Up to {BATCH_GOLDEN} sequences at once it pays,"
              f" about {BATCH_EVEN} it is even, beyond it costs; and only where most drafts are accepted."),
    Principle(8, "gray release", running.gray,
              "A new configuration has effects that nobody foresaw. On 5 % of the traffic they hurt few and are undone"
              " fast. The agent remembers each engine's configuration, and `tocsin canary` its verdicts."),
    Principle(9, "monitoring beyond QPS", running.monitoring,
              "Traffic looks the same while latency, cache hits or temperature go wrong. Nine numbers are the least;"
              " one that is lost, or that nobody watches, fails unseen."),
    Principle(10, "failure drills", running.drills,
              "Crash, GPU failure, network partition and upstream timeout will come. Drilled each month, they find the"
              " alarm and the failover tested."),
    Principle(11, "quantization is a trade-off", design.tradeoff,
              "Quantized weights or KV cache lose accuracy, on your own task perhaps more than on public ones. Evaluate"
              f" before and after; under {MOST_DROP:g} point may ship."),
    Principle(12, "end to end", running.end_to_end,
              "Users wait for all of it: network, tokenizer, engine, filter. The engine's own numbers are one part;"
              " measure from the users' side as well, and report both."),
)


def section_of(principle: Principle) -> str:
    """Where the seed has it."""
    return f"deployment design principles, section 2, principle {principle.number}"


def judge(facts: Facts) -> list[dict[str, Any]]:
    """A finding a principle, the worst first; keys are stable."""
    found = []
    for principle in PRINCIPLES:
        said = principle.judge(facts)
        found.append({"number": principle.number, "principle": principle.name, "verdict": said.word,
                      "evidence": list(said.evidence), "costs": said.costs or None, "change": said.change or None,
                      "would_tell": said.would_tell or None, "section": section_of(principle)})
    return sorted(found, key=lambda one: (WORST_FIRST[one["verdict"]], one["number"]))


def explained(number: int) -> list[str]:
    """A principle in our words, and where the seed has it. Raises LookupError: there is no such."""
    principle = next(one for one in PRINCIPLES if one.number == number) if 1 <= number <= len(PRINCIPLES) else None
    if principle is None:
        raise LookupError(f"there is no principle {number}; there are 1 to {len(PRINCIPLES)}")
    return [f"Principle {number}: {principle.name}", principle.why, f"The seed: {section_of(principle)}"]
