"""The draft of an incident's postmortem, and a quarter's review: every number by hand from tests/told_incident.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent import postmortem
from agent.model import Slo
from agent.review import review
from tests.told_incident import START, notice, record, told

GOLDEN = Path(__file__).parent / "golden" / "incident.md"
DAY_S = 86400.0
SLO = Slo(ttft_p99=0.5, itl_p99=0.15, availability=0.999, written=True)


def test_the_report_reads_as_it_should() -> None:
    """The whole of it, read by people. After a change, read the new one and put it there."""
    assert postmortem.render(told(), "md") == GOLDEN.read_text(encoding="utf-8")


def test_times_and_what_the_numbers_say() -> None:
    """Paged 30 s after the onset, delivered at 125 s: the pager's way is an action, and so is the third of its kind."""
    found = postmortem.view(told())
    assert found["times"] == {"detect_s": 30.0, "deliver_s": 125.0, "recover_s": 630.0, "open_s": 630.0}
    assert found["header"]["lasted_s"] == 600.0
    assert found["findings"] == ["the page was delivered 95 s after the alert fired",
                                 "llama: 36 of 6000 requests failed, 0.15 % of the whole error budget"]
    assert [(one["kind"], one["what"]) for one in found["actions"]] == [
        ("mend", "the cause, gpu-thermal-limit on GPU 3 on gpu-17: Do for gpu-thermal-limit."),
        ("prevent", 'it is number 3 of this cause in 30 d; runbook gpu-thermal-limit, "If it returns"'),
        ("detect", "the way of the page: `tocsin notify test`, and /healthz of the node"),
        ("prevent", "to be filled in")]
    assert [one["incident"] for one in found["comparison"]] == [record(days)["id"] for days in (20, 3, 0)]


def test_the_timeline_is_in_order_and_tells_what_else_happened() -> None:
    """Alerts of others stand there as what happened meanwhile; the worst moment has its row."""
    rows = [(one["offset_s"], one["what"]) for one in postmortem.view(told())["timeline"]]
    assert rows == [
        (0.0, "threshold crossed"), (30.0, "alert firing"), (30.0, "incident opened"),
        (45.0, "meanwhile: alert firing"), (60.0, "alert firing"), (90.0, "worst value"), (120.0, "worst value"),
        (125.0, "firing delivered to pagerduty"), (126.0, "update delivered to pagerduty"),
        (600.0, "alert resolved"), (630.0, "incident over"),
        (631.0, "resolved delivered to pagerduty")]


@pytest.mark.parametrize("form", ["md", "html", "json"])
def test_no_form_tells_a_secret(form: str) -> None:
    """A channel's last error held the webhook's address; the report was mailed to everybody."""
    shown = postmortem.render(told(), form)
    assert "SECRET" not in shown
    assert "hooks.slack.com" in shown


def test_what_others_wrote_is_text_in_html() -> None:
    """A subject called itself <script>: the page runs nothing, and says so."""
    hostile = told()
    hostile["incident"]["members"][0]["place"] = "<script>alert(1)</script>"
    page = postmortem.render(hostile, "html")
    assert "<script" not in page
    assert "default-src 'none'" in page


def test_one_that_is_open_and_was_told_to_nobody() -> None:
    """Asked for at 03:40 with the alarm still ringing nowhere."""
    found = postmortem.view({**told(), "incident": record(over=False), "notices": [notice(30.0, None)], "earlier": []})
    assert found["header"]["state"] == "open"
    assert found["times"]["recover_s"] is None
    assert found["findings"] == ["no channel has accepted this page: nobody was told by Tocsin",
                                 "it is still open, 16 min 10 s after it began to page"]
    assert found["impact"] == []


def test_one_that_is_open_does_not_say_that_its_end_is_unknown() -> None:
    """Nobody has lost it: it has not come."""
    for form in ("md", "html"):
        text = postmortem.render({**told(), "incident": record(over=False)}, form)
        assert text.count("not yet") == 2
        assert "from the onset until now, as" in text
    assert "| fires still |" in postmortem.render({**told(), "incident": record(over=False)}, "md")
    assert "not yet" not in postmortem.render(told(), "md")


def test_a_long_one_says_of_what_its_latencies_are() -> None:
    """After nine hours the histograms of the first eight are forgotten, and the report must not pretend."""
    long = told()
    long["incident"]["impact"] |= {"span_s": 32_400.0, "latency_span_s": 4_200.0}
    assert "in the last 1 h 10 min of it" in postmortem.render(long, "md")
    assert "in the last" not in postmortem.render(told(), "md")


def test_too_short_to_help() -> None:
    """Woken for 100 s: the rule is asked whether it should."""
    short = told()
    short["incident"]["ended_at"] = START + 130.0
    found = postmortem.view(short)
    assert "it was over 100 s after the page: too short for a person to have helped" in found["findings"]
    assert ("detect", "should gpu-thermal-limit wake anybody for so short? A longer `for`, or a ticket") in [
        (one["kind"], one["what"]) for one in found["actions"]]


# --- the review -------------------------------------------------------------------------------------------------------


def days() -> list[dict[str, Any]]:
    """Two days of one target: 1,000,000 requests, 900 of them failed; 0.5 % of first tokens slow, 2 % of the gaps."""
    row = {"target": "llama", "requests": 500_000.0, "errors": 450.0, "ttft": 400_000.0, "ttft_slow": 2_000.0,
           "itl": 1e7, "itl_slow": 2e5}
    return [{"day": 20_000, **row}, {"day": 20_001, **row}]


def test_service_levels_kept_and_budget_spent() -> None:
    """99.91 % of 99.9 %: kept, with 90 % of the budget spent; 98 % of gaps within 150 ms is not a p99 of 150 ms."""
    (row,) = review(days(), [], [], lambda name: SLO, START - 90 * DAY_S, START)["targets"]
    levels = {level["name"]: (round(level["attained"], 6), level["kept"], level["n"]) for level in row["slo"]}
    assert levels == {"availability": (0.9991, True, 1e6), "ttft_p99": (0.995, True, 8e5),
                      "itl_p99": (0.98, False, 2e7)}
    assert row["budget_spent"] == pytest.approx(0.9)
    assert (row["requests"], row["errors"], row["days"]) == (1e6, 900.0, 2)


def test_pages_how_many_and_how_many_for_nothing() -> None:
    """Two of 600 s, one of 120 s, one open for 370 s; a drill's is counted beside them."""
    short = record(1.0) | {"ended_at": START + 30 - DAY_S + 120.0}
    incidents = [record(9.0), record(5.0), short, record(over=False), record(7.0, drill="monthly")]
    found = review([], incidents, [], lambda name: SLO, START - 90 * DAY_S, START + 400.0)
    assert {key: found["pages"][key] for key in ("incidents", "of_drills", "open", "short", "open_s", "longest_s")} == {
        "incidents": 4, "of_drills": 1, "open": 1, "short": 1, "open_s": 1690.0, "longest_s": 600.0}
    assert found["pages"]["unacknowledged"] is None  # and it says why, never 0
    assert found["causes"] == [{"rule": "gpu-thermal-limit", "incidents": 4, "open_s": 1690.0, "errors": 108.0,
                                "last": record()["id"]}]
    assert [one["what"] for one in found["actions"]] == [
        'gpu-thermal-limit: 4 incidents; see "If it returns" in its runbook']


def test_nothing_counted_is_unknown_and_not_kept() -> None:
    """An engine that served nobody for a quarter has kept no promise, and broken none."""
    quiet = [{**days()[0], "requests": 0.0, "errors": 0.0, "ttft": 0.0, "ttft_slow": 0.0, "itl": 0.0, "itl_slow": 0.0}]
    (row,) = review(quiet, [], [], lambda name: SLO, 0.0, START)["targets"]
    assert {level["kept"] for level in row["slo"]} == {None}
    assert row["budget_spent"] is None
    json.dumps(row)
