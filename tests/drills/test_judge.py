"""What a run proves: every number here is from the specification or counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from drills.judge import (
    Alarm,
    Counts,
    Delivery,
    Evidence,
    Restart,
    Routed,
    Traffic,
    amplification,
    arrived,
    binomial_tail,
    counts_of,
    judge,
    k_of_n,
)
from drills.model import Drill, Holds, Load, Outcome, Request, Row, Verdict

PASS, FAIL, UNSURE, UNKNOWN = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.SKIPPED
T = 10_000.0  # the injection; the fault lasts 300 s, the baseline 120 s, the recovery 600 s
LOAD = Load("http://router/v1")  # 5/s


def request(at: float, outcome: Outcome = "ok", ttft_s: float = 0.1, took_s: float = 1.0, **more: Any) -> Request:
    """One request that was sent at `at`."""
    first_at = at + ttft_s if outcome == "ok" else None
    more.setdefault("itl_s", (0.03,) * 10 if outcome == "ok" else ())
    return Request(str(at), at, at, first_at, at + took_s, outcome, **more)


def traffic(change: Callable[[float], Mapping[str, Any]] = lambda s: {}) -> list[Request]:
    """5 a second from baseline to recovery; `change` of the seconds from the injection says what is otherwise."""
    return [request(T + k / 5, **change(k / 5)) for k in range(-600, 4500)]


def lasting(start_s: float, end_s: float, **what: Any) -> Callable[[float], Mapping[str, Any]]:
    """Otherwise between two seconds from the injection."""
    return lambda s: what if start_s <= s < end_s else {}


ALARM = Alarm("engine-down", 30.0, True, T + 4, T + 34, T + 36, T + 150)
BACK = Restart(600.0, T + 0.3, T + 40, T + 85, T + 86, gpu_free=True)
GOOD = Evidence(
    Drill("loss", "process-kill", load=LOAD), (T - 120, T), (T, T + 300), (T + 300, T + 900), 0.5, 0.15, True,
    "exit status -9 of process 4242", traffic(), alarms=(ALARM,), delivery=Delivery(has_echo=True, failures=0.0),
    restart=BACK, counts=Counts([(T + s, 5.0 * s, 5.0 * s) for s in range(-120, 900)]),
)  # fmt: skip


def rows_of(evidence: Evidence) -> dict[str, Row]:
    """By name."""
    return {row.name: row for row in judge(evidence).rows}


def test_a_drill_that_held() -> None:
    """All rows PASS, and the four times are those of a stop watch."""
    found = judge(GOOD)
    assert [row for row in found.rows if row.verdict is not PASS] == []
    assert found.verdict is PASS
    assert found.times == {"detect_s": 34.0, "deliver_s": 36.0, "mitigate_s": 0.0, "recover_s": 86.0}
    assert {row.name for row in found.rows} == {
        "fault_proven", "load_kept", "telemetry_fresh", "not_ended_early", "goodput", "ttft_p99", "itl_p99",
        "error_ratio", "no_other_stream_cut", "restart", "no_orphans", "gpu_memory_free", "no_retry_storm",
        "alarm.engine-down.fired", "alarm.engine-down.delivered", "alarm.engine-down.resolved", "nothing_unexpected",
    }  # fmt: skip


# --- k of n ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(0, 299), (1, 473), (2, 628), (5, 1049), (8, 1441)])
def test_fewest_requests_that_prove_one_percent(k: int, n: int) -> None:
    """Three drills of 50 requests each "proved" a p99. The table is the specification's."""
    assert k_of_n(k, n) is PASS
    assert k_of_n(k, n - 1) is UNSURE


@pytest.mark.parametrize(
    ("story", "k", "n", "want"),
    [
        ("nothing was asked", 0, 0, UNSURE),
        ("one request, answered", 0, 1, UNSURE),
        ("one request, failed: 1 % of such runs are a chance", 1, 1, FAIL),
        ("all failed", 50, 50, FAIL),
        ("exactly 1 %: neither is sure", 10, 1000, UNSURE),
        # By fractions: P(X >= 15) = 0.082 and P(X >= 16) = 0.048 of 1,000 at 1 %.
        ("15 of 1,000 may be a chance", 15, 1000, UNSURE),
        ("16 of 1,000 are none", 16, 1000, FAIL),
        ("a million gaps between tokens, 1.1 %", 11_000, 1_000_000, FAIL),
        ("a million gaps between tokens, 0.9 %", 9_000, 1_000_000, PASS),
    ],
)
def test_k_of_n(story: str, k: int, n: int, want: Verdict) -> None:
    """Too few requests are no success, and one failure is no failure of the service."""
    assert k_of_n(k, n) is want, story


def test_binomial_tail_by_hand() -> None:
    """Two coins: none, at most one, at most two heads."""
    assert [round(binomial_tail(k, 2, 0.5), 12) for k in (0, 1, 2)] == [0.25, 0.75, 1.0]
    assert (binomial_tail(0, 5, 0.0), binomial_tail(3, 5, 1.0), binomial_tail(5, 5, 1.0)) == (1.0, 0.0, 1.0)


# --- which judgement outranks which ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "change", "want", "why"),
    [
        ("a page of the survivors ended it", {"ended_early": "ttft-p99 on engine:b paged"}, FAIL,
         "ended early: ttft-p99 on engine:b paged"),
        ("a page that nothing announced", {"aborted": "gpu-lost on gpu:0"}, Verdict.ABORTED, "gpu-lost on gpu:0"),
        ("an injection that did nothing", {"proven": False, "proof": "dropped 0 of 812"}, Verdict.INVALID,
         "the fault is not proven: dropped 0 of 812"),
        ("a table that stayed", {"left": ["table inet tocsin_1"], "aborted": "x", "proven": False}, Verdict.ORPHANED,
         "left in the world: table inet tocsin_1"),
        ("the agent was silent", {"stale": ["the agent was silent for 41 s"]}, UNSURE,
         "telemetry_fresh: the agent was silent for 41 s (asked: fresh throughout)"),
        ("the prober was late", {"late_p99_s": 1.4}, UNSURE,
         "load_kept: 100% of them, p99 1.400 s late (asked: 5 requests/s, at most 1 s late)"),
        ("the prober sent too little", {"sent_ratio": 0.9}, UNSURE,
         "load_kept: 90% of them, p99 0.000 s late (asked: 5 requests/s, at most 1 s late)"),
        ("somebody else's page", {"unexpected": ["xid-fatal on gpu:1"]}, FAIL,
         "nothing_unexpected: xid-fatal on gpu:1 (asked: no page that was not announced)"),
    ],
)  # fmt: skip
def test_verdicts(story: str, change: Mapping[str, Any], want: Verdict, why: str) -> None:
    """A drill whose fault was never in once passed, as every client was well."""
    found = judge(replace(GOOD, **change))
    assert (found.verdict, found.why) == (want, why), story


def test_a_failure_outranks_what_could_not_be_told() -> None:
    """The alarm never rang, and the prober was late: the alarm is the news."""
    assert judge(replace(GOOD, late_p99_s=3.0, alarms=(replace(ALARM, firing_at=None),))).verdict is FAIL


def test_c096_a_steady_state_without_a_fault_is_no_pass() -> None:
    """The kernel lacked a module, nothing was put in, all was well: shown as a drill that was passed."""
    hint = "the kernel has no nftables: Error: Could not process rule: No such file or directory"
    found = judge(replace(GOOD, proven=False, proof=hint, alarms=()))
    assert found.verdict is Verdict.INVALID
    assert hint in found.why


def test_c094_c097_what_is_left_outranks_a_good_result() -> None:
    """The drill held, and its loss stayed in: the node was found days later."""
    left = ["table inet tocsin_0badcafe in /run/netns/a", "a proxy that does not end"]
    found = judge(replace(GOOD, left=left))
    assert found.verdict is Verdict.ORPHANED
    assert all(one in found.why for one in left)


# --- traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "requests", "want", "took_s"),
    [
        ("nothing was lost", traffic(), PASS, 0.0),
        ("fail-over after 20 s", traffic(lasting(0, 20, outcome="refused")), PASS, 20.0),
        ("the first 5 s still went well", traffic(lasting(5, 25, outcome="http_5xx")), PASS, 25.0),
        ("back after 40 s: 290 of 300 s were good, and yet it was late", traffic(lasting(0, 40, outcome="reset")), FAIL,
         40.0),
        ("gone again for 10 s", traffic(lasting(200, 210, outcome="refused")), FAIL, 210.0),
        ("one bad step of 5 s is a hiccup", traffic(lasting(200, 205, outcome="refused")), PASS, 0.0),
        ("half of the replicas gone for good", traffic(lambda s: {"outcome": "refused"} if s * 5 % 2 > 0 else {}),
         FAIL, None),
    ],
)  # fmt: skip
def test_goodput(story: str, requests: Sequence[Request], want: Verdict, took_s: float | None) -> None:
    """95 % of the whole were answered, and the first 40 s not at all: an average hides an outage."""
    row = rows_of(replace(GOOD, requests=requests))["goodput"]
    assert (row.verdict, row.detail["took_s"]) == (want, took_s), story


def test_goodput_counts_what_was_asked_not_what_was_sent() -> None:
    """A client that waits for its answers asks less, and every answer it gets is good."""
    halted = [r for r in traffic() if not T + 60 <= r.sent_at < T + 200]
    row = rows_of(replace(GOOD, requests=halted))["goodput"]
    assert (row.verdict, row.during) == (FAIL, "48.1%")  # 130 of 270 s
    assert rows_of(replace(GOOD, requests=halted, sent_ratio=0.6))["goodput"].verdict is UNSURE  # our own fault then


def test_goodput_of_a_fault_that_is_shorter_than_its_time() -> None:
    """`for: 20s` cannot show what is reached within 30 s."""
    assert rows_of(replace(GOOD, fault=(T, T + 20)))["goodput"].verdict is UNSURE


@pytest.mark.parametrize(
    ("story", "requests", "row", "want"),
    [
        ("first tokens took 600 ms for 10 s: 50 of 4,500", traffic(lasting(0, 10, ttft_s=0.6)), "ttft_p99", UNSURE),
        ("for 6 s: 30 of 4,500", traffic(lasting(0, 6, ttft_s=0.6)), "ttft_p99", PASS),
        ("for 60 s", traffic(lasting(0, 60, ttft_s=0.6)), "ttft_p99", FAIL),
        ("tokens came every 200 ms for 60 s", traffic(lasting(0, 60, itl_s=(0.2,) * 10)), "itl_p99", FAIL),
        ("who gave up waited longest", traffic(lasting(0, 60, outcome="timeout", took_s=30.0)), "ttft_p99", FAIL),
        ("slow before the injection only", traffic(lasting(-120, -2, ttft_s=0.6)), "ttft_p99", PASS),
    ],
)  # fmt: skip
def test_latency(story: str, requests: Sequence[Request], row: str, want: Verdict) -> None:
    """Overload looked fast: those who gave up before the first token were not in its p99."""
    assert rows_of(replace(GOOD, requests=requests))[row].verdict is want, story


def test_p99_is_back() -> None:
    """The fault was over and the queue was not: the service recovers when its latency does."""
    found = judge(replace(GOOD, requests=traffic(lasting(10, 400, ttft_s=2.0))))
    assert next(r for r in found.rows if r.name == "ttft_p99").detail["slow_until"] == T + 400
    assert found.times["recover_s"] == 400.0
    assert judge(replace(GOOD, requests=traffic(lasting(10, 900, ttft_s=2.0)))).times["recover_s"] is None


@pytest.mark.parametrize("fault", ["packet-loss", "upstream-timeout"])
def test_slowness_that_is_the_fault_is_reported_not_judged(fault: str) -> None:
    """5 s more in each answer is what upstream-timeout is; what fails the drill is that it stays."""
    drill = Drill("slow", fault, load=LOAD)
    slow = replace(GOOD, drill=drill, restart=None, requests=traffic(lasting(0, 300, ttft_s=5.1)))
    row = rows_of(slow)["ttft_p99"]
    assert (row.verdict, row.during) == (PASS, "p99 5100 ms of 1504")  # 4 ran already when it came
    assert row.asked == "p99 <= 500 ms from 120 s after the fault"
    stays = replace(slow, requests=traffic(lasting(0, 500, ttft_s=5.1)))
    assert rows_of(stays)["ttft_p99"].verdict is FAIL
    asked = replace(slow, drill=replace(drill, holds=Holds(ttft_p99=1.0)))
    assert rows_of(asked)["ttft_p99"].verdict is FAIL  # who writes a limit wants it judged
    short = replace(slow, recovery=(T + 300, T + 400))
    assert rows_of(short)["ttft_p99"].verdict is UNSURE


def test_without_streaming_nobody_sees_a_first_token() -> None:
    """The whole answer was taken for its first token, and every drill of a batch service failed."""
    whole = replace(GOOD, drill=replace(GOOD.drill, load=replace(LOAD, streaming=False)))
    rows = rows_of(whole)
    assert (rows["ttft_p99"].verdict, rows["itl_p99"].verdict) == (UNKNOWN, UNKNOWN)
    assert judge(whole).verdict is PASS


def test_errors_and_streams_on_the_victim() -> None:
    """A kill cuts the streams that ran on it: they are told apart; a stream that is cut later is another matter."""
    requests = traffic(lasting(-0.7, 0.1, outcome="broken"))  # those sent at -0.6, -0.4, -0.2 and 0 s
    rows = rows_of(replace(GOOD, requests=requests))
    assert rows["error_ratio"].verdict is PASS
    assert rows["error_ratio"].got == "0 of 4500 failed, beside 4 streams cut on the victim (4 broken)"
    assert rows["no_other_stream_cut"].got == "0 others, 4 on the victim"
    later = rows_of(replace(GOOD, requests=traffic(lasting(100, 100.1, outcome="broken"))))
    assert (later["error_ratio"].verdict, later["no_other_stream_cut"].verdict) == (PASS, FAIL)


@pytest.mark.parametrize(("gone_s", "want"), [(22.0, PASS), (30.0, FAIL), (10.0, FAIL), (None, FAIL)])
def test_streams_on_a_pod_that_went_later(gone_s: float | None, want: Verdict) -> None:
    """Its preStop slept 20 s, while its Service still sent to it: what it cut then was called another engine's."""
    assert GOOD.restart is not None
    steps = {} if gone_s is None else {"gone": GOOD.fault[0] + gone_s}
    cut = replace(GOOD, requests=traffic(lasting(19.9, 20.5, outcome="broken")),
                  restart=replace(GOOD.restart, steps=steps))
    assert rows_of(cut)["no_other_stream_cut"].verdict is want


@pytest.mark.parametrize(
    ("story", "end_s", "want"),
    [("4 of 200 s refused", 4, PASS), ("10 s refused", 10, UNSURE), ("60 s refused", 60, FAIL)],
)
def test_error_ratio(story: str, end_s: float, want: Verdict) -> None:
    """1 % of 4,500: 20 failed are sure to be less, 300 sure to be more, 50 neither."""
    assert rows_of(replace(GOOD, requests=traffic(lasting(0, end_s, outcome="refused"))))["error_ratio"].verdict is want


# --- restart, storm, degradation -------------------------------------------------------------------------------------


def test_restart_is_split() -> None:
    """It took 86 s: 0.3 to go, 40 to listen, 85 to be Ready, 86 to answer."""
    row = rows_of(GOOD)["restart"]
    assert row.got == "first completion after 86.0 s (down 0.3 s, port 40.0 s, ready 85.0 s, completion 86.0 s)"


@pytest.mark.parametrize(
    ("story", "change", "bad"),
    [
        ("it never answered", {"completion_at": None}, {"restart": FAIL}),
        ("Ready is not answered", {"completion_at": T + 601}, {"restart": FAIL}),
        ("its worker lived on and held the GPU", {"orphans": ["VLLM::Worker_TP0 (4243)"], "gpu_free": False},
         {"restart": FAIL, "no_orphans": FAIL, "gpu_memory_free": FAIL}),
        ("no GPU to ask", {"gpu_free": None}, {"gpu_memory_free": UNKNOWN}),
        ("it asks for a key", {"completion_at": None, "wants_key": True}, {"restart": UNSURE}),
    ],
)  # fmt: skip
def test_restart(story: str, change: Mapping[str, Any], bad: Mapping[str, Verdict]) -> None:
    """vLLM's core and worker outlive a killed API server: the new one found no memory, and the drill had passed."""
    rows = rows_of(replace(GOOD, restart=replace(BACK, **change)))
    assert {name: row.verdict for name, row in rows.items() if row.verdict is not PASS} == bad, story


def test_the_hardware_is_as_before() -> None:
    """The engine was back and answered, on a GPU whose next reset was due: the drill had passed."""
    assert "as_before" not in rows_of(GOOD)
    assert rows_of(replace(GOOD, not_as_before=[]))["as_before"].verdict is PASS
    row = rows_of(replace(GOOD, not_as_before=["the driver asks for: GPU Reset"]))["as_before"]
    assert (row.verdict, row.got) == (FAIL, "the driver asks for: GPU Reset")


@pytest.mark.parametrize(
    ("fired", "want"), [(("rank-clock-spread",), PASS), (("itl-p99", "rank-spread"), FAIL), ((), FAIL)]
)
def test_a_slow_rank_must_be_named(fired: Sequence[str], want: Verdict) -> None:
    """Each of its alerts may be blind; that all are is what the drill is for."""
    rules = ("rank-spread", "rank-straggler", "rank-clock-spread", "itl-p99")
    alarms = [Alarm(rule, 120.0, True, None, T + 130 if rule in fired else None, None, None) for rule in rules]
    drill = replace(GOOD.drill, fault="slow-rank", expects=())
    rows = rows_of(replace(GOOD, drill=drill, alarms=alarms))
    assert rows["rank_named"].verdict is want
    assert rows["alarm.rank-straggler.fired"].verdict is UNKNOWN  # it may fire, and need not
    assert "rank_named" not in rows_of(replace(GOOD, drill=replace(drill, expects=("itl-p99",)), alarms=alarms))


def counts(ratio: Callable[[float], float]) -> Counts:
    """5 requests a second, each so often tried."""
    attempts, rows = 0.0, []
    for s in range(-120, 900):
        rows.append((T + s, 5.0 * (s + 120), attempts))
        attempts += 5.0 * ratio(s)
    return Counts(rows)


@pytest.mark.parametrize(
    ("story", "told", "want"),
    [
        ("each once", counts(lambda s: 1.0), PASS),
        ("some twice while it lasts", counts(lambda s: 1.4 if 0 <= s < 300 else 1.0), PASS),
        ("10 s of 1.6", counts(lambda s: 1.6 if 20 <= s < 30 else 1.0), FAIL),
        ("1.3 two minutes after the fault", counts(lambda s: 1.3 if 0 <= s < 500 else 1.0), FAIL),
        ("1.3 as ever", counts(lambda s: 1.3), PASS),
        ("a baseline of 0.5, 0.7 for good", counts(lambda s: 0.5 if s < 0 else 0.7), FAIL),
        ("a router without counters", Counts(), UNKNOWN),
    ],
)
def test_retry_storm(story: str, told: Counts, want: Verdict) -> None:
    """The fault was over and the retries kept the service down for an hour."""
    assert rows_of(replace(GOOD, counts=told))["no_retry_storm"].verdict is want, story


def test_a_diverted_page_proves_nothing_of_on_call() -> None:
    """The drill's page went to a test channel for a year; on the day, on-call's own route was broken."""
    row = rows_of(replace(GOOD, drill=replace(GOOD.drill, route_to="webhook-2")))["on_call_route"]
    assert (row.verdict, row.got) == (UNKNOWN, "on-call route not proven: route_to sent it to webhook-2 alone")


def test_arrivals_between_two_reads_are_spread() -> None:
    """Read at 0 s (10), 5 s (20) and 15 s (20): 4 in [1, 3], none after 5 s; beyond the reads nothing is known."""
    rows = [(0.0, 10.0), (5.0, 20.0), (15.0, 20.0)]
    assert [arrived(rows, *span) for span in ((1.0, 3.0), (5.0, 15.0), (-50.0, 99.0), (20.0, 30.0))] == [4, 0, 10, 0]
    assert [arrived([], 0.0, 9.0), arrived([(3.0, 7.0)], 0.0, 9.0)] == [0, 0]


def test_attempts_are_the_routers_else_the_engines() -> None:
    """Two routers: the busier one counts. It tells its attempts, or what arrived at the engines is told instead."""
    steps = [5.0 * i for i in range(13)]
    busy, idle = [(at, 5.0 * at) for at in steps], [(at, 0.0) for at in steps]
    tells = Traffic({}, {"idle": Routed(idle, idle), "busy": Routed(busy, [(at, 8.0 * at) for at in steps])})
    assert counts_of(tells).rows[-1] == (60.0, 300.0, 480.0)
    engines = {name: [(at + 2.0, 100.0 + 2.5 * (at + 2.0)) for at in steps] for name in ("a", "b")}
    ratios = amplification(counts_of(Traffic(engines, {"busy": Routed(busy)})), (5.0, 60.0))
    assert [round(ratio, 6) for ratio in ratios] == [1.0] * 11
    assert counts_of(Traffic(engines, {})) == Counts()


def test_an_engine_that_hung_and_goes_on_is_no_storm() -> None:
    """It hung for 30 s, then counted 150 first tokens in one read: that many a second nobody had asked for."""
    steps = [5.0 * i for i in range(13)]
    hung = [(at, 5.0 * at if at <= 15 else 75.0 if at < 45 else 5.0 * at) for at in steps]
    found = counts_of(Traffic({"a": hung}, {"edge": Routed([(at, 5.0 * at) for at in steps])}))
    assert [round(ratio, 6) for ratio in amplification(found, (0.0, 60.0))] == [1.0] * 12


def test_a_router_that_restarts_is_no_storm() -> None:
    """Counters began anew: less than nothing was tried, and then everything at once."""
    rows = [(T + s, 5.0 * (s if s < 50 else s - 50), 5.0 * (s if s < 50 else s - 50)) for s in range(300)]
    assert rows_of(replace(GOOD, counts=Counts(rows)))["no_retry_storm"].verdict is PASS


@pytest.mark.parametrize(
    ("story", "by", "change", "want"),
    [
        ("the small model answers from 1 s on", {"model": "small"}, lasting(1, 300, model="small"), PASS),
        ("from 3 s on", {"model": "small"}, lasting(3, 300, model="small"), FAIL),
        ("a header with its value", {"header": "X-Degraded: 1"}, lasting(0, 300, headers={"x-degraded": "1"}), PASS),
        ("a header, whatever it says", {"header": "x-degraded"}, lasting(0, 300, headers={"X-Degraded": "1"}), PASS),
        ("another value", {"header": "x-degraded: yes"}, lasting(0, 300, headers={"x-degraded": "no"}), FAIL),
        ("it was on before: that proves nothing", {"model": "small"}, lasting(-60, 300, model="small"), FAIL),
        ("never", {"model": "small"}, lasting(0, 0), FAIL),
        ("nobody was answered", {"model": "small"}, lasting(0, 300, outcome="refused"), UNSURE),
        ("failed ones have no model", {"model": "small"},
         lambda s: {} if not 0 <= s < 300 else {"outcome": "http_5xx"} if s % 2 < 1 else {"model": "small"}, PASS),
    ],
)  # fmt: skip
def test_degradation(story: str, by: Mapping[str, str], change: Callable[[float], Mapping[str, Any]],
                     want: Verdict) -> None:
    """`degraded: {within: 2s}` was believed of a flag in a dashboard; it is the answers that show it."""
    drill = Drill("slow", "upstream-timeout", load=LOAD, holds=Holds(degraded={"within_s": 2.0, "by": by}))
    rows = rows_of(replace(GOOD, drill=drill, restart=None, requests=traffic(change)))
    assert rows["degraded"].verdict is want, story


def test_nobody_waits_until_the_client_gives_up() -> None:
    """A slow upstream: the gateway waited longer than its clients, and all the work was for nobody."""
    drill = Drill("slow", "upstream-timeout", load=LOAD)
    late = replace(GOOD, drill=drill, restart=None, requests=traffic(lasting(0, 60, outcome="timeout", took_s=30.0)))
    assert rows_of(late)["deadline_respected"].verdict is FAIL
    assert rows_of(replace(late, requests=traffic()))["deadline_respected"].verdict is PASS


def test_what_users_see_without_load() -> None:
    """A drill without load passed by defaults of `holds` that nobody had judged."""
    blind = replace(GOOD, drill=replace(GOOD.drill, load=None), requests=())
    row = rows_of(blind)["user_seen"]
    assert (row.verdict, row.asked) == (UNSURE, "goodput, ttft_p99, itl_p99, error_ratio hold")
    assert judge(blind).verdict is UNSURE
    nothing = Holds(goodput=None, ttft_p99=None, itl_p99=None, error_ratio=None)
    assert judge(replace(blind, drill=replace(blind.drill, holds=nothing))).verdict is PASS


def test_a_way_back_that_nobody_could_watch() -> None:
    """The target was a bare pid: it never came back, and its drill had passed."""
    blind = replace(GOOD, restart=None, unwatched_restart=True)
    assert rows_of(blind)["restart"].verdict is UNSURE
    assert judge(blind).verdict is UNSURE


# --- the alarm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "alarm", "delivery", "bad"),
    [
        ("never fired", {"firing_at": None}, {}, {"fired": FAIL}),
        ("the rule is disabled", {"enabled": False, "firing_at": None}, {}, {"fired": FAIL}),
        ("after 91 s, where 60 + 30 are allowed", {"firing_at": T + 91, "delivered_at": T + 92}, {}, {"fired": FAIL}),
        ("at the receiver after 17 s, where 1 + 15 are allowed", {"delivered_at": T + 51}, {}, {"delivered": FAIL}),
        ("a dead receiver behind a living Alertmanager", {"delivered_at": None}, {}, {"delivered": FAIL}),
        ("no receiver to ask", {"delivered_at": None}, {"has_echo": False}, {"delivered": UNSURE}),
        ("no receiver to ask, and Alertmanager failed", {"delivered_at": None}, {"has_echo": False, "failures": 3.0},
         {"delivered": FAIL}),
        ("it did not resolve", {"resolved_at": None}, {}, {"resolved": FAIL}),
        ("resolved 601 s after the fault", {"resolved_at": T + 901}, {}, {"resolved": FAIL}),
    ],
)  # fmt: skip
def test_alarm(story: str, alarm: Mapping[str, Any], delivery: Mapping[str, Any], bad: Mapping[str, Verdict]) -> None:
    """Alertmanager showed the alert as active for a year; its webhook had been dead for eleven months."""
    evidence = replace(GOOD, alarms=(replace(ALARM, **alarm),), delivery=replace(GOOD.delivery, **delivery))
    rows = {name: row.verdict for name, row in rows_of(evidence).items() if row.verdict is not PASS}
    assert rows == {f"alarm.engine-down.{name}": verdict for name, verdict in bad.items()}, story
    assert judge(evidence).verdict is (UNSURE if UNSURE in bad.values() else FAIL)


@pytest.mark.parametrize(("failures", "got"), [(0.0, "accepted by Alertmanager"), (None, "unknown")])
def test_accepted_is_said_only_of_what_was_asked(failures: float | None, got: str) -> None:
    """A report said "accepted by Alertmanager" on a node that had none."""
    evidence = replace(GOOD, alarms=(replace(ALARM, delivered_at=None),), delivery=Delivery(failures=failures))
    assert rows_of(evidence)["alarm.engine-down.delivered"].got == f"{got}; no receiver can be asked (`echo:`)"


def test_an_alarm_of_a_real_incident_is_not_the_drill_s() -> None:
    """The engine had begun to die 25 s before the drill killed it: 5 s to detect is nobody's merit.

    What was pending, and fired no sooner than a breach of the drill's own, is the drill's.
    """
    early = replace(ALARM, pending_at=None, firing_at=T + 5, delivered_at=T + 6, was_on=True)

    found = judge(replace(GOOD, alarms=(early,)))

    rows = {row.name: row for row in found.rows}
    assert rows["alarm.engine-down.fired"].verdict is Verdict.INCONCLUSIVE
    assert "for what was there before the fault" in rows["alarm.engine-down.fired"].got
    assert (found.verdict, found.times["detect_s"], found.times["deliver_s"]) == (Verdict.INCONCLUSIVE, None, None)
    assert judge(replace(GOOD, alarms=(replace(ALARM, was_on=True),))).verdict is PASS


def test_a_receiver_whose_clock_is_behind() -> None:
    """The page had arrived 9 s before it fired, and was delivered 25 s after the injection, detected after 34 s."""
    found = judge(replace(GOOD, alarms=(replace(ALARM, delivered_at=T + 25),)))

    row = next(row for row in found.rows if row.name == "alarm.engine-down.delivered")
    assert (row.verdict, row.detail["took_s"]) == (PASS, 0.0)
    assert row.got == "after 0.0 s: the receiver's clock is 9.0 s behind at least"
    assert found.times["deliver_s"] == found.times["detect_s"] == 34.0


def test_what_packet_loss_announces_may_fire() -> None:
    """TCP hides 10 % loss from most clients: an alarm that need not ring is no failure, one that is expected is."""
    silent = (Alarm("user-ttft-p99", 30.0), Alarm("user-itl-p99", 30.0, enabled=False))
    drill = Drill("loss", "packet-loss", load=LOAD)
    quiet = replace(GOOD, drill=drill, restart=None, alarms=silent)
    assert judge(quiet).verdict is PASS
    assert rows_of(quiet)["alarm.user-ttft-p99.fired"].got == "it never fired; it may fire, and need not"
    assert judge(replace(quiet, drill=replace(drill, expects=("user-ttft-p99",)))).verdict is FAIL


def test_what_may_fire_may_fire_late() -> None:
    """At 10 % loss the threshold was crossed only after 130 s: users were told all the same, and the drill FAILed."""
    late = (replace(ALARM, rule="user-ttft-p99", firing_at=T + 190, delivered_at=T + 191, resolved_at=T + 330),)
    seen = replace(GOOD, drill=Drill("loss", "packet-loss", load=LOAD), restart=None, alarms=late)
    row = rows_of(seen)["alarm.user-ttft-p99.fired"]
    assert (row.verdict, row.got) == (PASS, "after 190.0 s")
    expected = replace(seen, drill=replace(seen.drill, expects=("user-ttft-p99",)))
    assert rows_of(expected)["alarm.user-ttft-p99.fired"].verdict is FAIL
    answered = replace(seen, alarms=(Alarm("user-error-rate", 0.0),),
                       drill=Drill("503", "upstream-timeout", load=LOAD, params={"mode": "status"}))
    assert rows_of(answered)["alarm.user-error-rate.fired"].verdict is UNKNOWN  # the router answered from another


def test_a_restart_that_was_cut_short_is_unknown() -> None:
    """Aborted after 10 s: "never answered" and "still held" became actions that were carried over for months."""
    cut = replace(GOOD, aborted="by root", fault=(T, T + 10), recovery=(T + 12, T + 12),
                  restart=replace(BACK, completion_at=None, gpu_free=False))
    rows = rows_of(cut)
    assert {name: rows[name].verdict for name in ("restart", "gpu_memory_free")} == {
        "restart": UNKNOWN, "gpu_memory_free": UNKNOWN}


def test_alarms_of_a_run_that_ended_before_their_time() -> None:
    """Aborted after 10 s: the report blamed the alarm, which had 90 s to ring, and called all recovered."""
    early = replace(GOOD, aborted="by root", fault=(T, T + 10), recovery=(T + 12, T + 12))
    rows = rows_of(replace(early, alarms=(replace(ALARM, firing_at=None),)))
    assert rows["alarm.engine-down.fired"].verdict is UNKNOWN
    rows = rows_of(replace(early, alarms=(replace(ALARM, firing_at=T + 9, delivered_at=None, resolved_at=None),)))
    assert {rows[f"alarm.engine-down.{name}"].verdict for name in ("delivered", "resolved")} == {UNKNOWN}
    assert judge(early).times["recover_s"] is None


def test_c102_times_of_a_run() -> None:
    """Injected 08:00Z, alert 08:30Z, recovered 08:59Z: 30 and 59 minutes, whatever zones they were written in."""
    evidence = replace(GOOD, requests=(), drill=Drill("x", "process-kill"), fault=(T, T + 3600.0),
                       alarms=(replace(ALARM, firing_at=T + 1800.0),), restart=replace(BACK, completion_at=T + 3540.0))
    times = judge(evidence).times
    assert (times["detect_s"], times["recover_s"]) == (1800.0, 3540.0)


def test_impact() -> None:
    """60 of 4,500 failed within 15 minutes: 0.2 minutes of the 43.2 that 99.9 % of 30 days leave, 0.46 %."""
    requests = traffic(lasting(0, 12, outcome="refused"))
    impact = judge(replace(GOOD, requests=requests, slo_availability=0.999, slo_window_s=30 * 86400.0)).impact
    assert (impact["requests"], impact["failed"], impact["slow_first_token"]) == (4504, 60, 0)  # 4 ran at T already
    assert round(impact["budget_minutes"], 2) == 0.20
    assert round(impact["budget_share"], 4) == 0.0046
    assert judge(GOOD).impact["budget_share"] is None


def test_a_run_that_ended_before_its_fault() -> None:
    """Aborted in the baseline: nothing is judged that was not there, and nothing divides by it."""
    now = T - 60
    spans: dict[str, Any] = {"baseline": (T - 120, now), "fault": (now, now), "recovery": (now, now)}
    found = judge(replace(GOOD, **spans, requests=(), proven=False, proof="it was never put in",
                          aborted="stopped by uid 0", alarms=(), restart=None))
    assert (found.verdict, found.why) == (Verdict.ABORTED, "stopped by uid 0")
    assert set(found.times.values()) == {None}
