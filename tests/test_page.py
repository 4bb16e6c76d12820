"""What wakes a person: the title on the phone, the body with this engine's numbers, and the page of every rule."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from agent import page, spark
from agent.binds import Bound
from agent.incidents import Incident, Member
from agent.model import Alert, Book, Rule, Signal
from agent.node import Node
from agent.page import LOAD, About, Gpu
from agent.signals import SIGNALS
from agent.spark import SLOT_S, SLOTS, Sparks
from tests.make_pages import ENGINE, GOLDEN, HOT, STORIES, document, made, told
from tests.scenes import T0, built_in

HEAT = Rule("gpu-temperature", "gpu_temperature", ">", 85.0, "ticket", action="Look at cooling and airflow.")
TTFT = Rule("ttft-p99", "ttft_slow_share", ">", 0.01, "page", action="Look at prefill scheduling.")
SLOW = {"p99_s": 1.25, "p99_over": False, "n": 400.0, "slow": 12.0, "possibly_slow": 15.0, "slo_s": 0.5}


def about(rule: Rule, value: float | None, limit: float | None, evidence: dict[str, Any] | None = None,
          **more: Any) -> About:
    """An alert that fires, and its signal."""
    unit = more.pop("unit", SIGNALS[rule.signal][0].unit)
    state, why = more.pop("state", "value"), more.pop("why", None)
    place = more.pop("place", "llama on gpu-17")
    signal = Signal(rule.signal, "llama", state, T0, value, unit, evidence=evidence or {}, why=why)
    alert = Alert(rule.id, more.pop("subject", "llama"), "firing", rule.severity, T0, T0, value=value, limit=limit)
    return About(rule, alert, signal, unit, place, "llama", "gpu-17", **more)


# --- the title --------------------------------------------------------------------------------------------------------


def test_a_title_says_where_what_how_bad_and_since_when() -> None:
    """The line on the phone, value and limit with their units."""
    hot = about(HEAT, 91.0, 85.0, place="GPU 3 on gpu-17")
    assert page.title(hot, "4 min") == "GPU 3 on gpu-17: 91 °C, limit 85 °C, 4 min"
    assert page.title(about(TTFT, 0.017, 0.01, SLOW), "60 s") == "llama on gpu-17: TTFT p99 1.25 s (SLO 500 ms), 60 s"
    over = about(TTFT, 0.017, 0.01, SLOW | {"p99_over": True})
    assert page.phrase(over) == "TTFT p99 over 1.25 s (SLO 500 ms)"


def test_a_title_names_what_it_brought_as_far_as_there_is_room() -> None:
    """The cause first; the second effect would not fit into 100 characters."""
    hot = about(HEAT, 91.0, 85.0, place="GPU 3 on gpu-17")
    itl = about(built_in()["itl-p99"], 0.02, 0.01, SLOW | {"p99_s": 0.212, "slo_s": 0.15})
    rank = about(built_in()["rank-straggler"], 0.22, 0.15, {"slow_rank": "3"})
    title = page.title(hot, "4 min", [itl, rank, about(TTFT, 0.017, 0.01, SLOW)])
    assert title == "GPU 3 on gpu-17: 91 °C, limit 85 °C; ITL p99 212 ms (SLO 150 ms), 4 min"
    assert len(title) <= 100 < len(title) + len("; TTFT p99 1.25 s (SLO 500 ms)")
    heat = {"gpu_temp_c": 91.0, "own_limit_c": 89.0, "slowed": True}
    assert page.phrase(about(built_in()["gpu-thermal-limit"], -2.0, 0.0, heat)) == "91 °C, its limit 89 °C, slowed"


@pytest.mark.parametrize("place", ["GPU 3 on gpu-17", "größter-knoten-überall-µ/7 on rechner-äöü-ß-17",
                                   "x" * 90 + " on gpu-17"])
def test_a_title_fits_a_phone_and_keeps_the_place(place: str) -> None:
    """A long list of what is lost is cut, not the place: whoever reads must know where to go."""
    lost = {f"signal_{i} of llama-70b-größe": f"vllm:métrique_{i} fehlt\nzeile" for i in range(9)}
    title = page.title(about(built_in()["blind"], 9.0, 0.0, {"lost": lost}, place=place), "6 min")
    assert len(title) <= 100
    assert "\n" not in title
    assert "…" in title
    assert place in title or len(place) > 80


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_the_room_in_the_kv_cache() -> None:
    """432,000 tokens, 32 at once on 93 %: 12,555 tokens each, and 0.85 × 32 ÷ 0.93 = 29.2 fit."""
    full = about(built_in()["kv-cache-utilization"], 0.93, 0.85,
                 facts={"running": 32.0, "kv_usage": 0.93, "capacity_tokens": 432_000.0}, kind="vllm", engine="llama")
    assert page.kv_room(full) == ("The cache holds 432,000 tokens; 32 run at once on average, 12,555 tokens each: 29 of"
                                  " that length fit under 85 %.")
    assert "--max-num-seqs to at most 29" in page.steps(full)[1]
    assert page.kv_room(replace(full, facts={})) == ""


def test_how_much_of_the_first_token_is_queue() -> None:
    """0.9 of 1.2 s: three quarters. Unknown stays unsaid."""
    late = about(TTFT, 0.03, 0.01, SLOW, facts={"ttft_s": 1.2, "queue_s": 0.9})
    assert page.ttft_split(late).startswith("Of the mean 1.2 s to the first token 75 % is queue and 25 % prefill")
    assert "mostly queue" in page.steps(late)[-1]
    assert "mostly prefill" in page.steps(replace(late, facts={"ttft_s": 1.2, "queue_s": 0.2}))[-1]
    assert page.ttft_split(replace(late, facts={"ttft_s": 1.2, "queue_s": None})) == ""


@pytest.mark.parametrize(("others", "want"), [
    ([63.0, 64.0], "The other GPUs are at 63 to 64 °C: this card or its slot, not the room."),
    ([84.0, 64.0], "Others are hot, too (GPU 0 84 °C): the chassis or the inlet, not one card."), ([], "")])
def test_one_card_or_the_chassis(others: list[float], want: str) -> None:
    """What the person goes to look at depends on the neighbours."""
    gpus = [Gpu(n, f"GPU-{n}", temp_c) for n, temp_c in enumerate(others)]
    hot = about(HEAT, 91.0, 85.0, subject="GPU-x", gpus=[*gpus, Gpu(9, "GPU-x", 91.0)])
    assert page.neighbours(hot) == want


def test_a_slow_rank_names_its_gpu_and_what_holds_it_back() -> None:
    """Which GPU, its clock, its temperature, the throttle bit in words."""
    rule = built_in()["rank-straggler"]
    gpu = Gpu(3, HOT, 91.0, None, 1110.0, 1980.0, 0x40)
    slow = about(rule, 0.22, 0.15, {"slow_rank": "3", "slow_gpu": HOT}, gpus=[gpu], engine="llama", ranks=(0, 1, 2, 3))
    assert page.phrase(slow) == "rank 3 (GPU 3) 22 % slower, limit 15 %"
    assert page.details(slow) == ["GPU 3: 91 °C, SM clock 1110 of 1980 MHz, held back by hardware thermal slowdown."]
    assert "hardware thermal slowdown" in page.steps(slow)[1]
    well = replace(slow, gpus=[replace(gpu, reasons=0)])
    assert page.steps(well)[1].startswith("Nothing holds GPU 3's clock back")
    assert page.throttles(0x84) == "power brake of the server, power cap"


def test_what_binds_gives_the_knob() -> None:
    """The page of a queue turns the knob of what binds, and says what would not help."""
    bound = Bound("llama", "sequence-cap", "7 wait and exactly 16 run", "--max-num-seqs over 16", "more KV blocks")
    late = about(built_in()["queue-age"], 1.24, 0.25, bound=bound, engine="llama")
    assert page.binding(late) == "What binds llama: sequence cap, 7 wait and exactly 16 run."
    assert page.steps(late)[1] == "Then, at its next restart: --max-num-seqs over 16. Would not help: more KV blocks."


# --- the body ---------------------------------------------------------------------------------------------------------


def test_a_body_has_its_parts_in_this_order() -> None:
    """Cause, trend, effect, what is fine, what to do, what to type, runbook, silence, the ten."""
    hot = about(HEAT, 91.0, 85.0, subject=HOT, trend="▁█ 63 °C → 91 °C")
    text = page.body(hot, [("", about(TTFT, 0.017, 0.01, SLOW)), ("engine-down as it was", None)],
                     fine="Still fine: no errors", ten="The ten: …", runbook="https://t/runbooks/gpu-temperature")
    starts = [re.split(r"[: ]", line)[0] for line in text.splitlines() if not line.startswith((" ", "-"))]
    assert starts == ["Cause", "Last", "Effect", "Still", "Do", "1.", "2.", "3.", "On", "Runbook", "Silence", "The"]
    assert "- TTFT p99 1.25 s (SLO 500 ms) (ttft-p99)\n- engine-down as it was\n" in text
    assert f'Silence: tocsin silence gpu-temperature {HOT} --for 2h --why "…"' in text


def test_a_body_without_a_number_says_why_there_is_none() -> None:
    """The alert still fires, its value is the last one known, and the text says that it is not of now."""
    gone = about(HEAT, 91.0, 85.0, state="gap", why="last told 20 s ago")
    assert page.cause(gone)[1] == "No number now: last told 20 s ago. What stands here is the last that was known."


def test_a_limit_that_nobody_promised_is_left_out() -> None:
    """No ", limit –"."""
    text = page.body(about(HEAT, 91.0, None)) + page.title(about(HEAT, 91.0, None), "1 s")
    assert "–" not in text


def test_data_of_others_is_no_command() -> None:
    """What a subject is called stands quoted where it is pasted into a shell."""
    odd = about(HEAT, 91.0, 85.0, subject="x; rm -rf /")
    assert "tocsin silence gpu-temperature 'x; rm -rf /' --for" in page.silence(odd)


def test_how_an_incident_ended_is_one_line() -> None:
    """Resolved when, after how long, and where each number stands now."""
    said = page.resolved(T0, T0 + 29 * 60, ["GPU 3: 74 °C", "llama: ITL p99 96 ms"])
    assert said == "resolved at 02:15 UTC after 29 min; GPU 3: 74 °C; llama: ITL p99 96 ms"  # T0 is 01:46:40
    itl = about(built_in()["itl-p99"], 0.0, 0.01, {"p99_s": 0.096, "slo_s": 0.15})
    assert page.standing(itl) == "llama: ITL p99 96 ms"
    assert page.standing(about(HEAT, 74.0, 85.0, place="GPU 3 on gpu-17")) == "GPU 3: 74 °C"
    assert page.standing(about(HEAT, None, 85.0, state="gap", why="x")) == ""


def test_an_incident_that_is_over_tells_the_numbers_of_now() -> None:
    """Nobody should have to open a dashboard to go back to sleep."""
    here = made()
    at = here.scene.now
    over = Incident("gpu-17/gpu-temperature/1", at - 1740, ("gpu-temperature", HOT),
                    (Member("gpu-temperature", HOT, at - 1800, "hot", at),), at)
    told_ = here.incident_message(over)
    first = told_.annotations["description"].splitlines()[0]
    assert re.fullmatch(r"resolved at \d\d:\d\d UTC after 29 min; GPU 3: 63 °C", first)


def test_what_is_fine_has_its_numbers() -> None:
    """A stranger at night wants to know what need not be looked at."""
    rows = made().check()["signals"]
    fine = page.still_fine(rows)
    assert fine.startswith("Still fine: queue 0 s, TTFT p99 ")
    assert fine.endswith("(SLO 150 ms), no errors, KV cache 52 %, GPUs at most 65 °C")
    hot = [row | {"state": "BREACH"} if row["rule"] == "gpu-temperature" else row for row in rows]
    assert "GPU" not in page.still_fine(hot)
    assert page.still_fine([]) == ""


def test_nothing_is_fine_of_a_dead_engine_and_no_errors_where_requests_fail() -> None:
    """"Nobody can reach it", and under it "TTFT p99 475 ms, no errors": the last numbers of a dead engine."""
    rows = made().check()["signals"]
    down = about(built_in()["engine-down"], 4.0, 3.0, subject=ENGINE)
    assert page.still_fine(rows, [down]) == "Still fine: GPUs at most 65 °C"
    assert page.still_fine(rows, [about(built_in()["engine-stuck"], 1.0, 1.0, subject=f"{ENGINE}/1")]) == \
        "Still fine: GPUs at most 65 °C"
    failing = page.still_fine(rows, [about(built_in()["error-rate-high"], 0.174, 0.1)])
    assert "errors" not in failing
    assert "KV cache 52 %" in failing


def test_traffic_says_which_way_it_went() -> None:
    """61 of usually 210 in a minute: 71 % under. The nearer baseline counts: 61 is 22 % over yesterday's 50."""
    qps = built_in()["qps-change"]
    fell = about(qps, 0.7095, 0.5, {"requests": 61.0, "30 min before": 210.0})
    assert page.phrase(fell) == "traffic 71 % under its usual: 61 requests in 60 s, usually 210"
    rose = about(qps, 1.5, 0.5, {"requests": 500.0, "30 min before": 200.0, "yesterday": 100.0})
    assert page.phrase(rose) == "traffic 150 % over its usual: 500 requests in 60 s, usually 200"
    assert page.phrase(about(qps, 1.5, 0.5)) == "traffic 150 % off its usual, limit 50 %"


@pytest.mark.parametrize(("reasons", "want"), [
    ([0, 0], "No other GPU is: look at this card's power cables first."),
    ([0x80, 0], "So are GPU 0: the supply or the feed of the whole server."),
    ([0x80, 0x84], "So are GPU 0, 1: the supply or the feed of the whole server.")])
def test_one_card_without_power_or_the_whole_server(reasons: list[int], want: str) -> None:
    """All cards at 64 °C and one braked read "others are hot, too: the chassis": nobody looked at the power."""
    gpus = [Gpu(n, f"GPU-{n}", 64.0, reasons=bits) for n, bits in enumerate(reasons)]
    braked = about(built_in()["gpu-power-brake"], 0.78, 0.6, subject=HOT, gpus=[*gpus, Gpu(3, HOT, 64.0, reasons=0x80)])
    assert page.details(braked) == ["GPU 3: 64 °C, held back by power brake of the server.", want]
    over = replace(braked, gpus=[*gpus, Gpu(3, HOT, 64.0, reasons=0)])
    assert page.details(over) == ["GPU 3: 64 °C."]


def test_a_page_whose_cause_is_over_still_says_what_goes_on() -> None:
    """GPU 3 was cool again, ITL was not: the page that was sent again had no body, and a title of the past."""
    here = made(hot=True)
    alert = Alert("itl-p99", ENGINE, "firing", "page", T0 + 400, T0 + 400, value=0.02, limit=0.01)
    here.book = Book({("itl-p99", ENGINE): alert}, here.book.resolved_at)
    left = Incident("gpu-17/gpu-thermal-limit/1", T0 + 300, ("gpu-thermal-limit", HOT), (
        Member("gpu-thermal-limit", HOT, T0 + 300, "GPU 3 on gpu-17: 91 °C, its limit 89 °C, 60 s", T0 + 500),
        Member("itl-p99", ENGINE, T0 + 400, "llama-70b on gpu-17: ITL p99 212 ms (SLO 150 ms), 30 s")))
    told_ = here.incident_message(left)
    assert told_.annotations["summary"].startswith("llama-70b on gpu-17: ITL p99 ")
    first, second = told_.annotations["description"].splitlines()[:2]
    assert first == "It began with this, which is over: GPU 3 on gpu-17: 91 °C, its limit 89 °C, 60 s"
    assert second.startswith("Cause: llama-70b: ITL p99 ")


# --- ten minutes ------------------------------------------------------------------------------------------------------


def test_ten_minutes_are_twenty_values_however_often_it_is_asked() -> None:
    """The last of each half minute; what is older is forgotten, and so is who is no longer told."""
    sparks, key = Sparks(), ("r", "s")
    for n in range(4000):
        sparks.take(T0 + n * 5.0, {key: float(n)})
    values = sparks.values(key)
    assert len(values) == SLOTS
    assert values == sorted(values)
    assert values[-1] == 3999.0
    for n in range(int(SLOTS * SLOT_S / 5) + 6):
        sparks.take(T0 + (4000 + n) * 5.0, {})
    assert sparks.values(key) == []
    assert not sparks._slots


def test_a_gap_is_a_gap_and_a_clock_that_steps_back_begins_anew() -> None:
    """Two minutes unwatched are four spaces, no line drawn through them."""
    sparks, key = Sparks(), ("r", "s")
    sparks.take(T0, {key: 1.0})
    sparks.take(T0 + 150, {key: 2.0})
    values = sparks.values(key)
    assert (values[0], values[-1], [math.isnan(v) for v in values[1:-1]]) == (1.0, 2.0, [True] * 4)
    assert spark.line(values) == "▁    █"
    sparks.take(T0 - 900, {key: 5.0})
    assert sparks.values(key) == [5.0]
    assert [spark.line([]), spark.line([3.0, 3.0]), spark.line([0.0, 7.0])] == ["", "▄▄", "▁█"]


# --- the page of every rule -------------------------------------------------------------------------------------------


def test_every_page_is_as_it_was_read() -> None:
    """Whoever changes a rule or a word reads the page as a stranger at night: `python -m tests.make_pages`."""
    assert document() == GOLDEN.read_text(), "python -m tests.make_pages, then read the difference"


@cache
def scenes(busy: bool) -> Node:
    """A node for all stories: each leaves it as it was."""
    return made(busy=busy)


@pytest.mark.parametrize("rule_id", sorted(STORIES))
def test_a_person_who_knows_nothing_can_act_on_it(rule_id: str) -> None:
    """What it means in a sentence, what to do, what to type; the title fits, no wall of words."""
    rule = built_in()[rule_id]
    title, body = told(scenes(rule.signal in LOAD), rule)
    lines = body.splitlines()
    assert len(title) <= 100
    assert page.MEANS[rule.signal] in lines[0]
    assert "1. " in lines[lines.index("Do now:") + 1]
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 330, max(lines, key=len)
    assert re.search(r"^    \S+", body, flags=re.MULTILINE)
    assert lines[-1].startswith("The ten: ")


def test_a_drill_says_so_first() -> None:
    """Its page goes the normal way, and nobody runs for it."""
    here = made()
    here.learned.announced["r"] = {"run": "r", "drill": "process-kill", "rules": ["engine-down"], "until": T0 + 900,
                                   "subjects": [ENGINE], "loads": False, "route_to": None}
    title, _ = told(here, built_in()["engine-down"])
    assert title.startswith("DRILL  engine-down on gpu-17, as announced by process-kill (until ")
