"""One node judged step by step: what check says, who is told what and with which labels, what a restart keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from agent import words
from agent.model import (
    Alert,
    AlertMessage,
    Announcement,
    Batch,
    Book,
    EngineFacts,
    Found,
    Gap,
    GpuFacts,
    Rule,
    Sample,
    Signal,
    Slo,
    Transition,
    Why,
    alert_name,
)
from agent.node import Node, Setup, evidence_text, verdict
from agent.signals import Target
from rules import severity_of
from tests.scenes import SLO, T0, built_in, samples

GPU, OTHER_GPU = "GPU-8f6a", "GPU-77aa"
POLL_S = 5.0
ROW_KEYS = {"number", "rule", "subject", "state", "value", "unit", "limit", "method", "age_s", "why"}


def node(*rules: str | Rule, targets: tuple[Target, ...] = (Target("llama", (), SLO, gpus=(0,)),), **more: Any) -> Node:
    """A node called gpu-17 with these rules, by default all that ship."""
    known = built_in()
    chosen = tuple(known[r] if isinstance(r, str) else r for r in rules) or tuple(known.values())
    return Node(Setup("gpu-17", POLL_S, more.pop("slo", SLO), targets, chosen, severity_of, **more))


def engine(at_s: float, numbers: Mapping[str, float | None], target: str = "llama",
           engines: tuple[str, ...] | None = None, closed: tuple[str, ...] = ()) -> Batch:
    """One read of one target, whose engines all tell the same."""
    subjects = (target,) if engines is None else engines
    told = tuple(r for s in subjects for r in samples(s, T0 + at_s, numbers))
    return Batch(f"engine:{target}", T0 + at_s, 0.01, told, EngineFacts(target, subjects, closed=closed))


def full(at_s: float, target: str = "llama") -> Batch:
    """An engine whose KV cache is over its limit while tokens flow."""
    return engine(at_s, {"kv_usage": 0.93, "generation_tokens": 100.0 + at_s}, target)


def gpus(at_s: float, temps_c: Mapping[str, float], **numbers: float) -> Batch:
    """One read of NVML: GPUs with their temperature, and other numbers that all share."""
    told = tuple(r for uuid, c in temps_c.items() for r in samples(uuid, T0 + at_s, {"gpu_temp_c": c, **numbers}))
    facts = tuple(GpuFacts(uuid, i, "H200", f"0000:{i}b:00") for i, uuid in enumerate(temps_c))
    return Batch("nvml", T0 + at_s, 0.01, told, gpus=facts)


def step(here: Node, at_s: float, *batches: Batch, dt_s: float = POLL_S) -> list[Transition]:
    """Take these reads and judge."""
    for batch in batches:
        here.take(batch)
    return here.step(T0 + at_s, dt_s)


def hot(here: Node, uuid: str = GPU, start_s: float = 0.0, **numbers: float) -> Alert:
    """Let a GPU be at 91 °C until its ticket fires."""
    for i in range(20):
        for change in step(here, start_s + i * POLL_S, gpus(start_s + i * POLL_S, {uuid: 91.0}, **numbers)):
            if change.kind == "firing" and change.alert.rule == "gpu-temperature":
                return change.alert
    raise AssertionError("it never fired")


def restarted(before: Node, **more: Any) -> Node:
    """Another process with what the first one saved (but its windows)."""
    fresh = Node(replace(before.setup, **more))
    fresh.restore(before.book, asdict(before.learned))
    return fresh


def row(here: Node, rule: str, subject: str = "llama") -> dict[str, Any]:
    """One signal of check."""
    return next(r for r in here.check()["signals"] if (r["rule"], r["subject"]) == (rule, subject))


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_has_the_keys_of_the_contract() -> None:
    """Scripts read them: none may be missing or have another name."""
    here = node()
    step(here, 0, engine(0, {"kv_usage": 0.42, "running": 1.0, "waiting": 0.0}), gpus(0, {GPU: 61.0}))

    answer = here.check()

    assert (answer["node"], set(answer) >= {"verdict", "node", "signals"}) == ("gpu-17", True)
    assert all(set(r) >= ROW_KEYS for r in answer["signals"])
    kv = row(here, "kv-cache-utilization")
    assert {k: kv[k] for k in ROW_KEYS} == {
        "number": "H2", "rule": "kv-cache-utilization", "subject": "llama", "state": "OK", "value": 0.42,
        "unit": "ratio", "limit": 0.85, "method": "exact", "age_s": 0.0, "why": None}
    assert {r["number"] for r in answer["signals"]} >= {f"H{n}" for n in range(1, 11)} - {"H8"}  # no second rank here


def test_a_number_that_is_not_told_is_null_with_a_why() -> None:
    """Unknown is never 0: value null, and the reason beside it."""
    here = node()
    step(here, 0, engine(0, {"kv_usage": None}))

    kv, graph = row(here, "kv-cache-utilization"), row(here, "graph-fallback")

    assert (kv["state"], kv["value"], kv["why"]) == ("UNKNOWN", None, "kv_usage is nan")
    assert (graph["state"], graph["value"]) == ("N/A", None)
    assert graph["why"]


@pytest.mark.parametrize(("at_end", "state"), [(True, "OK"), (False, "BREACH")])
def test_a_long_answer_is_no_hang_where_tokens_count_at_its_end(at_end: bool, state: str) -> None:
    """trtllm-serve, TGI and old llama.cpp count an answer's tokens when it ends: one of 200 s paged as a hang."""
    here = node("engine-stuck")
    told = (Found("generation_tokens", "llama", "trtllm_generation_tokens_total", at_end=at_end),)
    for i in range(41):
        read = engine(i * POLL_S, {"running": 1.0, "waiting": 0.0, "generation_tokens": 1000.0})
        step(here, i * POLL_S, replace(read, engine=EngineFacts("llama", ("llama",), found=told)))
    assert row(here, "engine-stuck")["state"] == state


def test_states_through_the_life_of_an_alert() -> None:
    """OK, PENDING for its minute, BREACH, and BREACH still while its number is unknown: a Gap resolves nothing."""
    here = node("kv-cache-utilization")
    seen = []
    for i in range(15):
        step(here, i * POLL_S, engine(i * POLL_S, {"kv_usage": 0.5 if i == 0 else 0.93}))
        seen.append(row(here, "kv-cache-utilization")["state"])
    step(here, 75, engine(75, {"kv_usage": None}))

    assert seen == ["OK"] + ["PENDING"] * 12 + ["BREACH"] * 2  # at 5 s 0 s in breach, at 65 s 60 s
    assert row(here, "kv-cache-utilization")["state"] == "BREACH"
    assert here.check()["verdict"] == "ticket"


def test_a_gpu_that_is_full_by_design_is_a_breach_that_wakes_nobody() -> None:
    """vLLM preallocates: 0.96 since 10 minutes after the engine's start is shown, says why, and starts no alert."""
    here = node("gpu-memory")
    memory = {"gpu_mem_used": 96.0, "gpu_mem_total": 100.0}
    changes = []
    for at in range(0, 1200, 5):
        page = engine(at, {"running": 1.0, "process_start": T0})
        changes += step(here, at, page, gpus(at, {GPU: 61.0}, **memory))

    shown = row(here, "gpu-memory", GPU)

    assert changes == []
    assert (shown["state"], shown["value"]) == ("BREACH", 0.96)
    assert shown["why"] == "it was so 10 min after the engine's start"
    assert here.check()["verdict"] == "ticket"


def test_what_a_gpu_held_by_design_is_kept_while_its_engine_is_not_read_yet() -> None:
    """A leak that began since must not become "by design" because Tocsin was restarted."""
    before = node("gpu-memory")
    for at in range(0, 900, 5):
        page = engine(at, {"running": 1.0, "process_start": T0})
        step(before, at, page, gpus(at, {GPU: 61.0}, gpu_mem_used=90.0, gpu_mem_total=100.0))

    after = restarted(before)
    step(after, 9000, gpus(9000, {GPU: 61.0}, gpu_mem_used=97.0, gpu_mem_total=100.0))

    assert after.learned.gpu_full_at_start == {GPU: [T0, 0.9]}
    assert row(after, "gpu-memory", GPU)["why"] is None


def test_what_cannot_be_decided_is_pending() -> None:
    """The queue's age lies between 0 and a wait that began unseen: PENDING, counted as a page, and no alert fires."""
    here = node("queue-age")
    changes = []
    for i in range(8):
        changes += step(here, i * POLL_S, engine(i * POLL_S, {"waiting": 3.0, "ttft.count": 10.0}))

    assert row(here, "queue-age")["state"] in ("PENDING", "BREACH")
    assert here.check()["verdict"] == "page"
    first = node("queue-age")
    step(first, 0, engine(0, {"waiting": 3.0, "ttft.count": 10.0}))
    assert row(first, "queue-age")["state"] == "PENDING"
    assert not any(c.kind == "firing" for c in step(first, 0, dt_s=0.0))


OK, PENDING, BREACH, UNKNOWN = ("OK", "PENDING", "BREACH", "UNKNOWN")


@pytest.mark.parametrize(("story", "rows", "want"), [
    ("all in range", [(OK, "page"), (OK, "ticket")], "healthy"),
    ("page beats ticket", [(BREACH, "ticket"), (BREACH, "page"), (OK, "page")], "page"),
    ("pending counts as its severity", [(PENDING, "page"), (OK, "ticket")], "page"),
    ("ticket beats unknown", [(BREACH, "ticket"), (UNKNOWN, "page")], "ticket"),
    ("unknown beats healthy", [(UNKNOWN, "ticket"), (OK, "page")], "unknown"),
    ("information never counts", [(BREACH, "info"), (PENDING, "info"), (OK, "page")], "healthy"),
    ("information hides no unknown", [(BREACH, "info"), (UNKNOWN, "page")], "unknown"),
    ("nothing was judged", [("IDLE", "page"), ("N/A", "ticket")], "unknown"),
    ("nothing at all", [], "unknown"),
])
def test_the_verdict(story: str, rows: list[tuple[str, str]], want: str) -> None:
    """Page beats ticket beats unknown beats healthy."""
    told = [{"state": state, "severity": severity, "required": True, "signal": "x"} for state, severity in rows]

    assert verdict(told) == want, story


def told_row(state: str, signal: str, *, required: bool = False) -> dict[str, Any]:
    """A row of check as the verdict reads it."""
    return {"state": state, "severity": "ticket", "required": required, "signal": signal}


def test_only_a_required_signal_makes_the_verdict_unknown() -> None:
    """That speculative decoding is not told is no reason for doubt."""
    assert verdict([told_row("UNKNOWN", "swapped"), told_row("OK", "queue_age")]) == "healthy"


def test_blindness_is_unknown_until_it_has_lasted() -> None:
    """Its first five minutes are exit 3, what it is for; then it is a ticket like any other."""
    lost = told_row("UNKNOWN", "queue_age", required=True)

    assert verdict([lost, told_row("PENDING", "blind")]) == "unknown"
    assert verdict([lost, told_row("BREACH", "blind")]) == "ticket"


def test_an_agent_with_nothing_to_watch_is_not_healthy() -> None:
    """That its own sources are in time judges nothing: an empty configuration must not look green."""
    assert verdict([told_row("OK", "watcher"), told_row("OK", "blind"), told_row("IDLE", "error_burn")]) == "unknown"


def test_information_in_breach_that_turns_unknown_is_shown_as_unknown() -> None:
    """A throughput engine's queue is information; that it is no longer told is not."""
    here = node("queue-age", targets=(Target("llama", (), SLO, profile="throughput"),))
    for i in range(8):
        step(here, i * POLL_S, engine(i * POLL_S, {"waiting": 3.0, "ttft.count": 10.0}))
    assert (row(here, "queue-age")["state"], here.check()["verdict"]) == ("BREACH", "unknown")  # nothing else is judged
    step(here, 40, engine(40, {"waiting": None, "ttft.count": 10.0}))

    assert (row(here, "queue-age")["state"], here.check()["verdict"]) == ("UNKNOWN", "unknown")


# --- severities and limits --------------------------------------------------------------------------------------------


def test_a_promise_that_nobody_wrote_pages_nobody() -> None:
    """Without `slo:` the queue's age is a ticket, and its text says that the limit is a default."""
    default = Slo()
    here = node("queue-age", slo=default, targets=(Target("llama", (), default),))
    fired = [c.alert for i in range(8)
             for c in step(here, i * POLL_S, engine(i * POLL_S, {"waiting": 3.0, "ttft.count": 10.0}))
             if c.kind == "firing"]

    assert [a.severity for a in fired] == ["ticket"]
    assert fired[0].labels["severity"] == "ticket"
    assert "no `slo:` is written" in here.message(fired[0]).annotations["description"]


@pytest.mark.parametrize(("rule", "want"), [
    ("queue-age", "info"), ("ttft-p99", "info"), ("itl-p99", "info"), ("kv-cache-utilization", "ticket"),
    ("error-burn-fast", "page")])
def test_throughput_lowers_latency_alone(rule: str, want: str) -> None:
    """An engine that runs batches wakes nobody for its latency, and everybody for its errors."""
    here = node(targets=(Target("batch", (), SLO, profile="throughput"), Target("llama", (), SLO)))
    step(here, 0, engine(0, {"kv_usage": 0.5}, "batch"), engine(0, {"kv_usage": 0.5}))

    assert here.severity_of(built_in()[rule], "batch") == want
    assert here.severity_of(built_in()[rule], "llama") == built_in()[rule].severity


def test_each_engine_is_judged_by_its_own_promise() -> None:
    """0.5 x 2 s for one, 0.5 x 500 ms for the other; an engine that answers under an index has its target's."""
    slow = replace(SLO, ttft_p99=2.0)
    here = node("queue-age", targets=(Target("llama", (), SLO), Target("chat", (), slow)))
    step(here, 0, engine(0, {"waiting": 0.0}), engine(0, {"waiting": 0.0}, "chat", ("chat/0", "chat/1")))

    limits = {r["subject"]: r["limit"] for r in here.check()["signals"]}

    assert limits == {"llama": 0.25, "chat/0": 1.0, "chat/1": 1.0}


# --- labels and texts -------------------------------------------------------------------------------------------------


def test_a_gpus_alert_names_its_one_engine() -> None:
    """All labels of a hot GPU, exactly; no value and no process among them."""
    here = node()
    step(here, 0, engine(0, {"running": 1.0}), dt_s=0)

    alert = hot(here)

    assert alert.labels == {
        "alertname": "GpuTemperature", "rule": "gpu-temperature", "number": "H9", "node": "gpu-17", "subject": GPU,
        "severity": "ticket", "gpu": GPU, "engine": "llama"}


@pytest.mark.parametrize(("targets", "pages"), [
    ((Target("a", (), SLO, gpus=(0,)), Target("b", (), SLO, gpus=(0,))), {"a": ("a",), "b": ("b",)}),
    ((Target("a", (), SLO, gpus=(0,)),), {"a": ("a/0", "a/1")}),
    ((Target("a", (), SLO, gpus=(1,)),), {"a": ("a",)}),
    ((Target("a", (), SLO, gpus=(0,)),), {}),
])
def test_a_gpus_alert_names_no_engine_where_it_is_not_exactly_one(
    targets: tuple[Target, ...], pages: dict[str, tuple[str, ...]],
) -> None:
    """Two targets, two engines of one, none on this GPU, one that was never read: no guess."""
    here = node("gpu-temperature", targets=targets)
    step(here, 0, *(engine(0, {"running": 1.0}, name, engines) for name, engines in pages.items()), dt_s=0)

    assert "engine" not in hot(here).labels


@pytest.mark.parametrize(("rule", "subject", "want"), [
    ("kv-cache-utilization", "llama/1", {"engine": "llama/1", "number": "H2", "alertname": "KvCacheUtilization"}),
    ("ttft-p99", "llama", {"engine": "llama", "number": "H5", "alertname": "TtftP99"}),
    ("node-error-burn-fast", "gpu-17", {"number": "H7", "alertname": "NodeErrorBurnFast"}),
    ("watcher", "source:nvml", {"number": "L5", "alertname": "Watcher"}),
])
def test_labels_of_every_kind_of_subject(rule: str, subject: str, want: dict[str, str]) -> None:
    """Engine, target, node, ourselves: `engine` only where it is the subject, `gpu` never, nothing empty."""
    here = node()
    step(here, 0, engine(0, {"running": 1.0}, engines=("llama/0", "llama/1")))
    spec = built_in()[rule]
    fired = Alert(rule, subject, "firing", spec.severity, T0, T0, value=1.0, limit=0.5)

    labels = here._named(fired).labels

    assert labels == {"rule": rule, "node": "gpu-17", "subject": subject, "severity": spec.severity} | want
    assert all(labels.values())


def test_a_rule_without_a_number_has_no_empty_label() -> None:
    """Alertmanager drops empty labels: then firing and resolved would differ from ours."""
    own = replace(built_in()["gpu-temperature"], id="my-hot-gpu", number=None)
    here = node(own, targets=())
    for i in range(8):
        changes = step(here, i * POLL_S, gpus(i * POLL_S, {GPU: 91.0}))
    labels = next(iter(here.book.alerts.values())).labels

    assert changes == []
    assert labels == {"alertname": "MyHotGpu", "rule": "my-hot-gpu", "node": "gpu-17", "subject": GPU,
                      "severity": "ticket", "gpu": GPU}


@pytest.mark.parametrize(("rule", "name"), [
    ("kv-cache-utilization", "KvCacheUtilization"), ("ttft-p99", "TtftP99"), ("xid", "Xid"), ("a_b.c-9d", "ABC9d")])
def test_alertname_is_the_rule_in_camel_case(rule: str, name: str) -> None:
    """The field's way to write it."""
    assert alert_name(rule) == name


def message(here: Node, alert: Alert, **ended: Any) -> AlertMessage:
    """As a receiver gets it."""
    return here.message(alert, **ended)


def test_a_firing_message_says_everything() -> None:
    """Real start, no end, the agent's page of that alert, the runbook, and texts that name the GPU by its index."""
    here = node("gpu-temperature", external_url="https://tocsin.example/gpu-17")

    told = message(here, hot(here))

    assert (told.key, told.status, told.severity) == (f"gpu-17/gpu-temperature/{GPU}", "firing", "ticket")
    assert (told.starts_at, told.ends_at) == (T0 + 30, None)
    assert told.generator_url == f"https://tocsin.example/gpu-17/alerts/gpu-temperature/{GPU}"
    assert told.annotations == {
        "summary": "GPU 0 on gpu-17: 91 °C, limit 85 °C, 30 s",
        "description": told.annotations["description"],
        "value": "91 °C", "limit": "85 °C", "action": "Look at cooling and airflow; move load away.",
        "runbook_url": "https://tocsin.example/gpu-17/runbooks/gpu-temperature"}
    assert told.annotations["description"].splitlines()[0] == (
        f"Cause: GPU 0 ({GPU}, 0000:0b:00): 91 °C, limit 85 °C. Near its own limit the card lowers its clock, and slows"
        " every rank of its engine.")
    assert "Runbook: https://tocsin.example/gpu-17/runbooks/gpu-temperature" in told.annotations["description"]


def test_without_an_address_there_are_no_links() -> None:
    """A link that no phone can open is worse than none; the commands stand in the text."""
    here = node("gpu-temperature")

    told = message(here, hot(here))

    assert told.generator_url == ""
    assert "runbook_url" not in told.annotations
    assert "Runbook: gpu-temperature (on gpu-17: tocsin check)" in told.annotations["description"]


def test_the_page_of_an_engine_with_an_index_is_quoted() -> None:
    """The slash belongs to the subject, not to the path."""
    here = node(external_url="https://t")
    alert = Alert("kv-cache-utilization", "llama/1", "firing", "ticket", T0, T0)

    assert message(here, alert).generator_url == "https://t/alerts/kv-cache-utilization/llama%2F1"


def test_a_resolved_message_has_the_same_labels_its_end_and_the_last_number() -> None:
    """Back in range after 2 minutes: the text says so with the temperature of now, not of the fire."""
    here = node("gpu-temperature")
    fired = hot(here)
    changes: list[Transition] = []
    at_s = 30.0
    while not changes:
        at_s += POLL_S
        changes = step(here, at_s, gpus(at_s, {GPU: 74.0}))
    [resolved] = changes

    told = message(here, resolved.alert, ended_at=T0 + at_s)

    assert at_s == 155  # 120 s back in range, 0 at the first of them
    assert (told.status, told.starts_at, told.ends_at, told.labels) == ("resolved", T0 + 30, T0 + 155, fired.labels)
    assert told.annotations["summary"] == \
        "GPU 0 on gpu-17: 74 °C, limit 85 °C, back in range after 2.08 min"
    assert told.annotations["description"] == \
        f"gpu-temperature of GPU 0 ({GPU}, 0000:0b:00): back in range after 2.08 min. Last: 74 °C, limit 85 °C."
    assert told.annotations["value"] == "74 °C"


@pytest.mark.parametrize("why", ["subject removed", "no traffic", "asleep"])
def test_a_closed_message_says_why(why: str) -> None:
    """Closed is not mended: the text must not say that it is back in range."""
    here = node("gpu-temperature")

    told = message(here, hot(here), ended_at=T0 + 90, why=why)

    assert told.annotations["description"] == \
        f"gpu-temperature of GPU 0 ({GPU}, 0000:0b:00): closed after 60 s: {why}. Last: 91 °C, limit 85 °C."
    assert told.annotations["summary"].endswith(f"closed after 60 s: {why}")


def test_an_alert_in_a_gap_keeps_its_number_and_says_that_there_is_none_now() -> None:
    """What is told again each minute says since when nothing is known."""
    here = node("gpu-temperature")
    hot(here)
    here.take(Batch("nvml", T0 + 35, 0.0, (Gap("gpu_temp_c", GPU, Why.HUNG, "nvmlX has not returned", T0 + 35),)))
    step(here, 35)

    [told] = here.firing()

    assert told.annotations["value"] == "91 °C"
    assert "No number now: nvmlX has not returned." in told.annotations["description"]


def test_evidence_is_one_line_of_numbers() -> None:
    """Floats short, bounds as a range, what is nested left out."""
    signal = Signal("x", "s", "value", T0, 1.0,
                    evidence={"n": 400.0, "bounds_s": [0.25, 0.5], "why": "x", "lost": {"a": "b"}, "at_start": None})

    assert evidence_text(signal) == "n=400, bounds_s=0.25..0.5, why=x"


# --- alerts as the command line has them ------------------------------------------------------------------------------


def test_alerts_have_the_keys_of_the_contract() -> None:
    """Pending and firing, with times in unix seconds and numbers in base units."""
    here = node("gpu-temperature")
    step(here, 0, gpus(0, {GPU: 91.0}))
    [pending] = here.alerts()
    alert = hot(here, start_s=5)

    [told] = here.alerts()

    assert (pending["state"], pending["since"], pending["until"]) == ("pending", T0, None)
    assert {k: told[k] for k in ("rule", "subject", "state", "severity", "since", "until", "value", "limit", "incident")
            } == {"rule": "gpu-temperature", "subject": GPU, "state": "firing", "severity": "ticket", "since": T0,
                  "until": None, "value": 91.0, "limit": 85.0, "incident": None}
    assert told["summary"] == "GPU 0 on gpu-17: 91 °C, limit 85 °C, 30 s"
    past = here.alert_row(alert, T0 + 500)
    assert (past["state"], past["until"]) == ("resolved", T0 + 500)


# --- what a restart keeps ---------------------------------------------------------------------------------------------


def test_labels_outlive_a_restart_and_a_second_engine_on_the_gpu() -> None:
    """Byte for byte: else the receiver would see another alert, and the first one would never resolve."""
    before = node("gpu-temperature")
    step(before, 0, engine(0, {"running": 1.0}), dt_s=0)
    labels = hot(before).labels
    two = (Target("llama", (), SLO, gpus=(0,)), Target("chat", (), SLO, gpus=(0,)))

    after = restarted(before, targets=two)
    [at_start] = after.firing()
    step(after, 60, engine(60, {"running": 1.0}), engine(60, {"running": 1.0}, "chat"), gpus(60, {GPU: 91.0}), dt_s=0)
    [later] = after.firing()

    assert labels["engine"] == "llama"
    assert at_start.labels == later.labels == labels
    assert at_start.annotations["value"] == "91 °C"
    assert at_start.starts_at == T0 + 30


def test_engines_and_gpus_of_before_are_not_removed_while_their_first_read_is_outstanding() -> None:
    """The first ticks after a restart know no number: alerts wait, none closes."""
    before = node("gpu-temperature", "kv-cache-utilization")
    for i in range(14):
        at = i * POLL_S
        step(before, at, engine(at, {"kv_usage": 0.93}, engines=("llama/0", "llama/1")), gpus(at, {GPU: 91.0}))
    assert len(before.book.alerts) == 3

    after = restarted(before)
    changes = [c for i in range(6) for c in step(after, 70 + i * POLL_S)]

    assert changes == []
    assert after.book.alerts.keys() == before.book.alerts.keys()


def test_half_of_the_wait_before_a_restart_counts() -> None:
    """30 of 60 s in breach, a restart of any length, 30 s more: it fires then, and not before."""
    before = node("kv-cache-utilization")
    for i in range(7):
        step(before, i * POLL_S, engine(i * POLL_S, {"kv_usage": 0.93}))

    after = restarted(before)
    kinds = []
    for i in range(8):
        at = 500 + i * POLL_S
        kinds.append([c.kind for c in step(after, at, engine(at, {"kv_usage": 0.93}), dt_s=POLL_S if i else 0.0)])

    assert kinds == [[]] * 6 + [["firing"]] + [[]]


def test_what_the_configuration_no_longer_has_closes_as_removed() -> None:
    """A target, an engine behind it, all GPUs, a rule: each says which of both it was."""
    two = (Target("llama", (), SLO), Target("chat", (), SLO))
    before = node("gpu-temperature", "kv-cache-utilization", targets=two)
    for i in range(14):
        at = i * POLL_S
        step(before, at, full(at), full(at, "chat"), gpus(at, {GPU: 91.0}))
    assert len(before.firing()) == 3

    after = restarted(before, targets=(Target("chat", (), SLO),), watches_gpus=False)
    changes = step(after, 75, full(75, "chat"), dt_s=0)
    fewer = restarted(before, rules=(built_in()["gpu-temperature"],))
    [dropped, _] = step(fewer, 75, dt_s=0)

    assert {(c.alert.rule, c.alert.subject, c.kind, c.why) for c in changes} == {
        ("kv-cache-utilization", "llama", "resolved", "subject removed"),
        ("gpu-temperature", GPU, "resolved", "subject removed")}
    assert set(after.learned.targets) == {"chat"}
    assert (dropped.alert.rule, dropped.why) == ("kv-cache-utilization", "rule removed")
    told = fewer.message(dropped.alert, T0 + 75, dropped.why)
    assert told.annotations["description"] == "kv-cache-utilization of llama: closed after 15 s: rule removed."
    assert told.labels == dropped.alert.labels


def test_an_engine_that_a_change_of_shape_ended_is_closed() -> None:
    """llama becomes llama/0 and llama/1: the alert of the old subject ends and says so."""
    here = node("kv-cache-utilization")
    for i in range(14):
        step(here, i * POLL_S, full(i * POLL_S))

    changes = step(here, 70, engine(70, {"kv_usage": 0.2}, engines=("llama/0", "llama/1"), closed=("llama",)))

    assert [(c.alert.subject, c.kind, c.why) for c in changes] == [("llama", "resolved", "subject removed")]


def test_a_gpu_that_nvml_no_longer_names_is_closed_after_ten_minutes() -> None:
    """Not at once: a driver reload takes a while. A read that fails as a whole says nothing of who is there."""
    here = node("gpu-temperature", targets=())
    hot(here)
    for at in range(35, 620, 5):
        here.take(Batch("nvml", T0 + at, 0.0, error="nvmlInit: Driver Not Loaded"))
        assert step(here, at) == []
    for at in range(620, 640, 5):  # 30 s + 600 s after it was named last
        changes = step(here, at, gpus(at, {OTHER_GPU: 61.0}))
        assert bool(changes) == (at == 635)

    assert [(c.alert.subject, c.kind, c.why) for c in changes] == [(GPU, "resolved", "subject removed")]
    assert set(here.learned.gpus) == {OTHER_GPU}


def test_a_hot_gpu_that_nvml_hangs_before_after_a_restart_is_not_closed() -> None:
    """NVML hangs at GPU 1 since our restart, so every read names GPU 0 alone: it is not gone, and stays hot."""
    before = node("gpu-temperature", targets=())
    hot(before, OTHER_GPU)
    after = restarted(before)
    hangs = Gap("gpu_temp_c", GPU, Why.HUNG, "nvmlDeviceGetTemperature has not returned", T0)
    one = (GpuFacts(GPU, 0, "H200", "0000:0b:00"),)

    changes = [c for at in range(100, 900, 5)
               for c in step(after, at, Batch("nvml", T0 + at, 2.0, (hangs,), gpus=one, error="it hangs"))]

    assert changes == []
    assert [a.subject for a in after.book.alerts.values() if a.state == "firing"] == [OTHER_GPU]


def test_an_alert_that_closes_with_its_gpu_still_names_its_index() -> None:
    """A card that was taken out: people know GPU 3, not a UUID of 40 letters that pushes the words out of the title."""
    uuid = "GPU-8f6a1a3c-3a11-7be0-9a5e-0d6f6b1f2c3d"
    here = node("gpu-temperature", targets=())
    for at in range(0, 60, 5):
        step(here, at, gpus(at, {OTHER_GPU: 60.0, uuid: 91.0}))
    changes = [c for at in range(60, 700, 5) for c in step(here, at, gpus(at, {OTHER_GPU: 60.0}))]

    (closed,) = [here.message(c.alert, c.at, c.why) for c in changes]

    assert closed.annotations["summary"] == (  # at 30 s, until 660 s
        "GPU 1 on gpu-17: 91 °C, limit 85 °C, closed after 10.5 min: subject removed")
    assert "GPU 1 (" + uuid in closed.annotations["description"]


def test_a_target_that_was_never_understood_says_what_it_answers() -> None:
    """It serves a web page since the first read: every required number has a row, with the reason of its read."""
    here = node()
    why = "/metrics of http://127.0.0.1:8000 fails: this is HTML, no metrics page"
    names = ("waiting", "ttft", "kv_usage", "preemptions", "itl", "finished", "http")
    told: tuple[Sample | Gap, ...] = (Sample("down", "llama", 0.0, T0),)
    told += tuple(Gap(name, "llama", Why.BAD_PAGE, why, T0) for name in names)

    step(here, 0, Batch("engine:llama", T0, 0.01, told, EngineFacts("llama", ()), error=why))

    for rule in ("queue-age", "kv-cache-utilization", "preemptions", "ttft-p99", "itl-p99", "error-burn-fast"):
        assert (row(here, rule)["state"], row(here, rule)["why"]) == ("UNKNOWN", why), rule
    assert here.check()["verdict"] == "unknown"


def test_a_machine_without_gpus_forgets_those_that_it_had() -> None:
    """The cards were taken out while Tocsin was down: NVML says that there is none."""
    before = node("gpu-temperature", targets=())
    hot(before)

    after = restarted(before)
    changes = [c for at in range(5000, 5620, 5) for c in step(after, at, Batch("nvml", T0 + at, 0.0, gpus=()))]

    assert [(c.alert.subject, c.why) for c in changes] == [(GPU, "subject removed")]


def test_an_engine_that_never_answered_may_take_its_time_to_start() -> None:
    """Ten minutes of refused connections are a start, then it is down; one that ran before is down at the third."""
    refused = {"down": 1.0, "slow": 0.0, "rung": 0.0}

    def first_page_s(here: Node) -> int:
        for at in range(0, 700, 5):
            here.take(Batch("engine:llama", T0 + at, 0.0, tuple(samples("llama", T0 + at, refused))))
            if any(c.kind == "firing" and c.alert.rule == "engine-down" for c in here.step(T0 + at, POLL_S)):
                return at
        raise AssertionError("nobody was paged")

    fresh, known = node("engine-down"), node("engine-down")
    known.restore(Book(), {"targets": {"llama": {"first_seen_at": T0 - 9000, "ever_up": True, "engines": ["llama"]}}})

    assert first_page_s(fresh) == 600
    assert first_page_s(known) == 10  # the third in a row


@pytest.mark.parametrize(("rung", "slow", "rule", "want"), [
    (0.0, 0.0, "engine-down", "llama on gpu-17: down: TCP fails, 3 reads in a row, 0 s"),
    (1.0, 0.0, "engine-down", "llama on gpu-17: down: /health fails, 3 reads in a row, 0 s"),
    (1.0, 1.0, "engine-slow", "llama on gpu-17: slow: no answer in time, 3 reads in a row, 0 s"),
])
def test_a_dead_engines_page_says_which_rung_fails(rung: float, slow: float, rule: str, want: str) -> None:
    """"3, limit 3" sends nobody anywhere: is it the process, its /health, or its page?"""
    here = node(rule)
    here.restore(Book(), {"targets": {"llama": {"first_seen_at": T0 - 9000, "ever_up": True, "engines": ["llama"]}}})
    fired = []
    for at in (0, 5, 10):
        told = tuple(samples("llama", T0 + at, {"down": 1.0 - slow, "slow": slow, "rung": rung}))
        fired += [c for c in step(here, at, Batch("engine:llama", T0 + at, 0.0, told)) if c.kind == "firing"]

    [change] = fired
    assert change.alert.annotations["summary"] == want


def test_an_engine_that_answers_too_late_is_slow_at_any_rhythm() -> None:
    """Polled every second, read with a deadline of 3 s: when such a read is told, what it says is 3 s old already."""
    here = node("engine-slow")
    here = Node(replace(here.setup, poll_s=1.0))
    fired = []
    for at in range(30):
        if at >= 3 and at % 4 == 3:  # asked at 0, 4, 8 …
            told = tuple(samples("llama", T0 + at - 3, {"slow": 1.0, "rung": 1.0}))
            here.take(Batch("engine:llama", T0 + at - 3, 3.0, told, error="no whole answer within 3 s"))
        changes = here.step(T0 + at, 1.0)
        fired += [(at, c.alert.rule) for c in changes if c.kind == "firing"]

    assert fired == [(11, "engine-slow")]  # the third


def test_an_announced_alert_says_first_that_it_is_a_drill() -> None:
    """process-kill announced engine-down until 10:04 UTC: labels and severity are as ever, the title says DRILL."""
    here = node()
    down = tuple(Sample(name, "llama", value, 100.0) for name, value in (("down", 1.0), ("slow", 0.0), ("rung", 0.0)))
    here.learned.targets["llama"] = {"first_seen_at": 0.0, "ever_up": True, "engines": ["llama"]}
    here.announce(Announcement("run-1", "process-kill", ("engine-down",), 101040.0 + 86400.0))  # 1970-01-03 04:04 UTC
    transitions = []
    for at in (100.0, 105.0, 110.0):
        here.take(Batch("engine:llama", at, 0.0, tuple(s._replace(at=at) for s in down)))
        transitions += here.step(at, 5.0)

    (fired,) = [t for t in transitions if t.kind == "firing" and t.alert.rule == "engine-down"]
    message = here.message(fired.alert)
    want = "DRILL  engine-down on gpu-17, as announced by process-kill (until 04:04 UTC)"
    assert message.annotations["summary"] == want
    assert message.labels["alertname"] == "EngineDown"
    here.end_announcement("run-1")
    assert not here.message(fired.alert).annotations["summary"].startswith("DRILL")


@pytest.mark.parametrize(("subjects", "is_drill"), [(None, True), (["llama"], True), (["llama2", "gpu-17"], False)])
def test_a_real_outage_while_another_engine_is_drilled_is_no_drill(subjects: list[str] | None, is_drill: bool) -> None:
    """The other engine died by itself in the middle of a drill, its page said DRILL, and nobody came."""
    here = node()
    alert = Alert("engine-down", "llama/0", "firing", "page", 0.0, None, 0.0)
    named = None if subjects is None else tuple(subjects)
    here.announce(Announcement("run-1", "process-kill", ("engine-down",), 1000.0, named))
    assert here.annotations(alert)["summary"].startswith("DRILL") is is_drill


def test_arrivals_that_a_drills_prober_brings_say_so() -> None:
    """qps-change opened a ticket at each drill, and somebody went to look where the users came from."""
    here = node()
    alert = Alert("qps-change", "llama", "firing", "ticket", 0.0, 0.8, 0.5)
    here.announce(Announcement("run-1", "monthly-loss", (), 1000.0, loads=True))
    assert here.annotations(alert)["summary"].endswith("(drill load of monthly-loss)")
    here.end_announcement("run-1")
    assert "drill load" not in here.annotations(alert)["summary"]


def test_what_is_routed_to_one_channel_is_told_to_all_when_the_drill_is_over_and_it_fires_on() -> None:
    """The drill's page went to the test channel; the engine stayed down after the drill, and on-call never heard."""
    here = node()
    here.book = Book({("engine-down", "llama"): Alert("engine-down", "llama", "firing", "page", 0.0, None, 0.0)})
    here.announce(Announcement("run-1", "process-kill", ("engine-down",), 1000.0, route_to="webhook-2"))

    assert here.message(here.book.alerts[("engine-down", "llama")]).annotations["route_to"] == "webhook-2"
    assert here.no_longer_diverted() == []
    here.end_announcement("run-1")
    (told,) = here.no_longer_diverted()
    assert (told.labels, told.status, "route_to" in told.annotations) == ({}, "firing", False)
    assert here.no_longer_diverted() == []  # once


def test_arrivals_of_an_engine_are_its_first_tokens_and_what_waits() -> None:
    """10, then 14 first tokens with 2 that wait: 16 have arrived; a restart counts on."""
    here = node()
    here.learned.targets["llama"] = {"first_seen_at": 0.0, "ever_up": True, "engines": ["llama"]}
    for at, first_tokens, waiting in ((100.0, 10.0, 0.0), (105.0, 14.0, 2.0), (110.0, 3.0, 0.0)):
        here.take(Batch("engine:llama", at, 0.0, (Sample("ttft", "llama", first_tokens, at, "count"),
                                                  Sample("waiting", "llama", waiting, at))))
    here.step(111.0, 5.0)

    rows = here.traffic(0.0)["replicas"]["llama"]
    assert [(at, count - rows[0][1]) for at, count in rows] == [(100.0, 0.0), (105.0, 6.0), (110.0, 7.0)]
    assert [at for at, _ in here.traffic(105.0)["replicas"]["llama"]] == [105.0, 110.0]


def test_attempts_of_a_router_are_what_it_sent_else_requests_and_retries() -> None:
    """10 requests, 3 retries: 13 attempts; one that counts what each replica got says so itself."""
    here = node()
    for router, told in (("retries", (("router_retries", "", 3.0),)),
                         ("shares", (("router_worker_requests", "a", 6.0), ("router_worker_requests", "b", 8.0))),
                         ("neither", ())):
        for at, share in ((100.0, 0.0), (105.0, 1.0)):
            readings = [Sample("router_requests", router, 10.0 * share, at, "")]
            readings += [Sample(name, router, count * share, at, key) for name, key, count in told]
            here.take(Batch(f"router:{router}", at, 0.0, tuple(readings), router=EngineFacts(router, ())))

    found = here.traffic(0.0)["routers"]

    assert {name: rows["requests"][-1] for name, rows in found.items()} == dict.fromkeys(found, (105.0, 10.0))
    assert {name: rows["attempts"][-1:] for name, rows in found.items()} == {
        "retries": [(105.0, 13.0)], "shares": [(105.0, 14.0)], "neither": []}


def test_what_a_prober_counts_at_the_users_address_is_judged_while_it_tells() -> None:
    """30 of 100 requests fail at the users' address: user-error-rate fires, and is gone a minute after the end."""
    here = node()

    def counted(at: float, requests: float, errors: float) -> None:
        told = (("user_requests", requests), ("user_errors", errors))
        here.take_user("llm.internal", [Sample(name, "llm.internal", value, at) for name, value in told], at)

    for i in range(60):
        counted(1000.0 + 5 * i, 10.0 * i, 3.0 * i)
        here.step(1000.0 + 5 * i, 5.0)
    alert = here.book.alerts[("user-error-rate", "llm.internal")]
    assert alert.state == "firing"
    assert alert.severity == "page"
    labels = dict(alert.labels)
    assert labels["subject"] == "llm.internal"
    assert "engine" not in labels

    transitions = here.step(1000.0 + 5 * 59 + 61.0, 5.0)

    ended = [(t.kind, t.why) for t in transitions if t.alert.rule == "user-error-rate"]
    assert ended == [("resolved", "subject removed")]


def test_what_drilld_says_stands_until_it_says_otherwise() -> None:
    """An orphaned run pages with its command in the text, survives a restart, and resolves when healed."""
    here = node()
    here.tell("drill_orphaned", "run-1", "table tocsin_1 is left: nft delete table inet tocsin_1")
    transitions = here.step(100.0, 5.0)
    (fired,) = [t for t in transitions if t.kind == "firing"]
    assert fired.alert.rule == "drill-orphaned"
    assert "nft delete table" in here.message(fired.alert).annotations["description"]

    again = node()
    again.restore(here.book, asdict(here.learned))
    assert again.step(105.0, 5.0) == []
    again.tell("drill_orphaned", "run-1", None)

    assert [t.kind for t in again.step(110.0, 5.0)] == ["resolved"]


# --- incidents --------------------------------------------------------------------------------------------------------


def paged(rule: str, subject: str, at: float) -> Alert:
    """An alert that pages."""
    labels = {"alertname": alert_name(rule), "rule": rule, "node": "gpu-17", "subject": subject, "severity": "page"}
    return Alert(rule, subject, "firing", "page", at, at, labels=labels,
                 annotations={"summary": f"{rule} of {subject} as it was", "action": f"Mend {rule}."})


def test_one_page_names_the_cause_its_effects_and_what_to_do() -> None:
    """engine-down, then ttft-p99 on the same engine: updated, not a second page; ended with the last of them."""
    here = node()
    down, slow = ("engine-down", "llama"), ("ttft-p99", "llama")
    told = []
    for at, alerts in ((100.0, [paged(*slow, 100.0)]), (130.0, [paged(*slow, 100.0), paged(*down, 130.0)]),
                       (400.0, [paged(*slow, 100.0)]), (500.0, [])):
        here.book = Book({(alert.rule, alert.subject): alert for alert in alerts})
        here._group(at)
        told += here.incidents_told([], [])

    assert [(one.change, one.message.key, one.message.status) for one in told] == [
        ("opened", "gpu-17/ttft-p99/100", "firing"), ("updated", "gpu-17/ttft-p99/100", "firing"),
        ("resolved", "gpu-17/ttft-p99/100", "resolved")]
    update = told[1].message
    assert update.labels["rule"] == "engine-down"
    body = update.annotations["description"].splitlines()
    assert body[0].startswith("Cause: llama: down: no number now. Nobody can reach this engine.")
    assert body[body.index("Effect:") + 1].endswith("(ttft-p99)")
    assert body[body.index("Do now:") + 1].startswith("1. See that the router has taken it out")
    assert body[-1].startswith("The ten:")
    assert (told[2].message.ends_at, told[2].message.starts_at) == (500.0, 100.0)
    assert "engine-down of llama as it was" in told[2].message.annotations["description"]


def test_the_end_reaches_whoever_was_told_of_the_first_alert_alone() -> None:
    """PagerDuty wanted engine-down, which ended first; the incident ended with ttft-p99, and stayed open there."""
    here = node()
    down, slow = paged("engine-down", "llama", 100.0), paged("ttft-p99", "llama", 130.0)
    for at, alerts in ((100.0, [down]), (130.0, [down, slow]), (400.0, [slow]), (500.0, [])):
        here.book = Book({(alert.rule, alert.subject): alert for alert in alerts})
        here._group(at)
        told = here.incidents_told([], [])

    (end,) = told
    assert (end.change, [(m.labels["rule"], m.status) for m in end.alerts]) == (
        "resolved", [("engine-down", "resolved"), ("ttft-p99", "resolved")])


def test_a_gpu_that_two_engines_share_is_the_cause_of_both() -> None:
    """Neither owned it alone, so the hot GPU and the slow engines were three pages."""
    here = node(targets=(Target("llama", (), SLO, gpus=(0,)), Target("qwen", (), SLO, gpus=(0, 1)),
                         Target("other", (), SLO, gpus=(1,))))
    step(here, 0, gpus(0, {GPU: 61.0, OTHER_GPU: 61.0}))

    assert [here._related(GPU, engine) for engine in ("llama", "qwen", "other")] == [True, True, False]
    assert here._related(GPU, OTHER_GPU)  # one engine computes on both
    assert not here._related("llama", "qwen")


def test_each_alert_says_of_which_incident_it_is_and_as_what() -> None:
    """Alertmanager gets every alert: what belongs together must be told by annotations, labels never change."""
    here = node()
    alerts = [paged("engine-down", "llama", 100.0), paged("ttft-p99", "llama", 100.0)]
    here.book = Book({(alert.rule, alert.subject): alert for alert in alerts})
    here._group(100.0)

    messages = {m.labels["rule"]: m.annotations for m in here.firing()}
    assert {rule: (texts["incident"], texts["role"]) for rule, texts in messages.items()} == {
        "engine-down": ("gpu-17/engine-down/100", "cause"), "ttft-p99": ("gpu-17/engine-down/100", "symptom")}
    assert {row["incident"] for row in here.alerts()} == {"gpu-17/engine-down/100"}

    again = node()
    again.restore(here.book, msgspec.json.decode(msgspec.json.encode(asdict(here.learned))))
    again._group(105.0)
    assert (list(again.incidents), again.incident_changes) == (["gpu-17/engine-down/100"], [])


def test_the_ten_in_one_line() -> None:
    """The worst of each number, breaches marked, what is not known as such."""
    rows = [{"number": number, "state": state, "value": value, "unit": unit} for number, state, value, unit in (
        ("H1", "OK", 0.1, "s"), ("H2", "OK", 0.4, "ratio"), ("H2", "BREACH", 0.93, "ratio"),
        ("H4", "N/A", None, "ratio"), ("H5", "UNKNOWN", None, "ratio"),
        ("H9", "PENDING", 86.0, "celsius"), (None, "BREACH", 1.0, "count"))]
    assert words.the_ten(rows) == "The ten: queue 100 ms · KV 93 %! · graph n/a · TTFT ? · GPU 86 °C"


def test_whose_address_a_canary_asks_is_known_to_the_signals() -> None:
    """The one at the engine's own address tells `canary_age_s` of it; the one at the users' tells none."""
    here = node()
    here.take(Batch("canary:http://edge:8080", T0, 0.0, tuple(samples("http://edge:8080", T0, {"user_requests": 1.0}))))
    own = [*samples("http://127.0.0.1:8000", T0, {"user_requests": 1.0}), *samples("llama", T0, {"canary_age_s": 0.0})]
    here.take(Batch("canary:http://127.0.0.1:8000", T0, 0.0, tuple(own)))
    here.step(T0, 0.0)
    assert here.scene.canaries == {"http://edge:8080": None, "http://127.0.0.1:8000": "llama"}
