"""The gray-release guard: what proves that a release is worse, what does not, and the way back fired once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent import release
from agent.__main__ import Failure, command_of
from agent.model import Batch, Gap, Slo, Why
from agent.release import END, LOOK, Group, Tally, judge
from agent.release_watch import Plan, Watch, number_in, roll_back
from agent.sources.fetch import Answer
from tests.agent_process import ROOT
from tests.page_server import PageServer
from tests.receiver import Receiver, Reply, wait_until
from tests.scenes import samples

SLO = Slo(ttft_p99=0.5, itl_p99=0.15, written=True)  # so the limits are 750 and 225 ms
INF = float("inf")


def buckets(n: float, slow: float, bound: float = 0.75) -> list[tuple[float, float]]:
    """So many observations, of which so many over the bound."""
    return [(bound, n - slow), (INF, n)]


def served(n: float = 10_000.0, *, slow: float = 0.0, errors: float = 0.0, itl_slow: float = 0.0,
           business: Sequence[float | None] = (), answered_at: float | None = 100.0) -> Group:
    """A group of one engine that served n requests, of 30 tokens each."""
    return Group(1, 1, 10, 0, 0, n, errors, answered_at, 0.0, (),
                 {"ttft": buckets(n, slow), "itl": buckets(30 * n, itl_slow, 0.225), "e2e": []},
                 [(float(i), value) for i, value in enumerate(business)])


def states(old: Group, new: Group, sure: release.Certainty = END, now: float = 101.0) -> dict[str, str]:
    """Each criterion's state but for those that are not judged, and the verdict."""
    found = judge(old, new, SLO, sure, now)
    return {row.name: row.state for row in found.rows if row.state != "N/A"} | {"": found.verdict}


FINE = {"answers": "OK", "ttft_p99": "OK", "itl_p99": "OK", "errors": "OK", "": "pass"}


@pytest.mark.parametrize(
    ("story", "old", "new", "want"),
    [
        ("all is as before", served(), served(500), {}),
        ("3 % of first tokens over 1.5 × the SLO, 0.2 % in the old group", served(slow=20), served(1000, slow=30),
         {"ttft_p99": "BAD", "": "fail"}),
        ("the same, and the old group is as slow: it is not the release", served(slow=300), served(1000, slow=30),
         {"ttft_p99": "UNKNOWN", "": "unknown"}),
        ("4 of 200 failed, 2 %: not proven yet", served(), served(200, errors=4),
         {"errors": "UNKNOWN", "ttft_p99": "UNKNOWN", "": "unknown"}),
        ("50 of 2,000 failed", served(errors=10), served(2000, errors=50), {"errors": "BAD", "": "fail"}),
        ("2 % of gaps between tokens are slow", served(), served(1000, itl_slow=600), {"itl_p99": "BAD", "": "fail"}),
        ("99 requests say nothing", served(), served(99), {"ttft_p99": "UNKNOWN", "errors": "UNKNOWN", "": "unknown"}),
        ("the old group served nobody", served(0.0), served(2000, errors=50), {"errors": "BAD", "": "fail"}),
        ("267 without an error are not proof of 1 %, 268 are", served(), served(267),
         {"ttft_p99": "UNKNOWN", "errors": "UNKNOWN", "": "unknown"}),
        ("see above", served(), served(268), {}),
    ],
)
def test_what_proves_a_release_worse(story: str, old: Group, new: Group, want: dict[str, str]) -> None:
    """Each with its numbers; whatever is not named is as it should be."""
    assert states(old, new) == FINE | want, story


def test_a_look_asks_for_more_than_the_end() -> None:
    """19 of 1,000 is over 1 % with 95 %, not with 99.95 %: looked at 50 times a day, chance alone would show it."""
    assert states(served(), served(1000, slow=19))["ttft_p99"] == "BAD"
    assert states(served(), served(1000, slow=19), LOOK)["ttft_p99"] == "UNKNOWN"


def test_a_limit_inside_a_bucket_is_not_decided() -> None:
    """Buckets at 0.5 and 1 s know nothing of 750 ms: 5 % between them may be well or not."""
    rough = Group(1, 1, 1, 0, 0, 1000.0, 0.0, 100.0, 0.0, (), {
        "ttft": [(0.5, 950.0), (1.0, 1000.0), (INF, 1000.0)], "itl": [], "e2e": []})
    row = next(r for r in judge(served(), rough, SLO, END, 101.0).rows if r.name == "ttft_p99")
    assert row.state == "UNKNOWN"
    assert "the limit lies inside a bucket, 500 ms to 1 s" in row.why


def test_a_new_group_that_answers_no_more_fails_and_one_of_which_nobody_knows_does_not() -> None:
    """Crashed on its first big prompt, it told no error: silence for over 2 min while the old group answers."""
    assert states(served(answered_at=400.0), served(answered_at=279.0), now=400.0)["answers"] == "BAD"
    assert states(served(answered_at=400.0), served(answered_at=281.0), now=400.0)["answers"] == "OK"
    silent = Group(1, 0, 0, 9, 0, since=0.0, silent=[None], latencies={"ttft": [], "itl": [], "e2e": []})
    assert states(silent, served(answered_at=100.0), now=400.0)["answers"] == "UNKNOWN"  # our own network, perhaps
    assert states(served(), silent, now=400.0)["answers"] == "UNKNOWN"  # still loading its weights
    assert states(served(), silent, now=1801.0)["answers"] == "BAD"  # and that is no longer so after half an hour


@pytest.mark.parametrize(("last", "old_last", "now", "want"), [
    ([399.0, 395.0], [399.0], 400.0, "OK"), ([399.0, 100.0], [399.0], 400.0, "UNKNOWN"),
    ([399.0, None], [399.0], 400.0, "UNKNOWN"), ([1999.0, 200.0], [1999.0], 2000.0, "UNKNOWN"),
    ([1999.0, 199.0], [1999.0], 2000.0, "BAD"), ([1999.0, None], [1999.0], 2000.0, "BAD"),
    ([1999.0, None], [1999.0, 199.0], 2000.0, "UNKNOWN"),
])
def test_one_engine_of_the_new_group_is_gone(last: list[float | None], old_last: list[float | None], now: float,
                                             want: str) -> None:
    """One of two never came up with the new configuration, and the other one's numbers passed for both."""
    old, new = (release.group([Tally("", answered_at=at) for at in ats], now=now, late_s=18.5, since=0.0)
                for ats in (old_last, last))
    assert release.down_row(old, new, now).state == want


def test_what_is_compared_with_nobody_is_said() -> None:
    """The old group was gone, and PASS was read as: no worse than before."""
    gone = Group(1, 0, 0, 9, 0, silent=[None])
    assert release.notes(gone, served(), SLO) == [
        "no engine of the old group answers: the new one is judged by its limits alone"]
    assert release.notes(served(), served(), SLO) == []
    assert release.notes(served(), served(), Slo()) == [
        "no `slo:` is written: judged by the defaults; --slo ttft_p99=500ms names yours"]


WAVE = [100.0 + (i % 7) - 3 for i in range(60)]


@pytest.mark.parametrize(
    ("story", "new", "want"),
    [("as much as before", [x * 1.0 for x in WAVE], "OK"), ("8 % down", [x * 0.92 for x in WAVE], "BAD"),
     ("5 % down, give or take", [x * (0.95 + 0.05 * (-1) ** (i // 6)) for i, x in enumerate(WAVE)], "UNKNOWN"),
     ("20 readings", [*WAVE[:20], *[None] * 40], "UNKNOWN")],
)
def test_the_business_number(story: str, new: Sequence[float | None], want: str) -> None:
    """−5 % against the old group's, read at the same moments; a missing reading is none, and never 0."""
    assert states(served(business=WAVE), served(business=new))["business"] == want, story


def test_nothing_to_compare_a_business_number_with() -> None:
    """The old group's is 0: no ratio of it is a number."""
    row = judge(served(business=[0.0] * 60), served(business=WAVE), SLO, END, 101.0).rows[-1]
    assert (row.state, "above zero" in row.why) == ("UNKNOWN", True)


def test_the_statistics_against_their_papers() -> None:
    """Newcombe 1998, table II (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339."""
    assert release.difference_lower(56, 70, 48, 80, 1.959964) == pytest.approx(0.0524, abs=5e-5)
    assert -release.difference_lower(48, 80, 56, 70, 1.959964) == pytest.approx(0.3339, abs=5e-5)
    assert release.wilson_upper(0, 268, 1.6449) == pytest.approx(1.6449**2 / (268 + 1.6449**2))
    # ten batches of one reading: 0.9, 1.1, …: mean 1, standard deviation 0.10541, t 1.833 / sqrt 10
    low, middle, high = release.ratio_bounds([(1.0, 0.9 + 0.2 * (i % 2)) for i in range(10)], 1.833) or (0, 0, 0)
    assert (low, middle, high) == pytest.approx((1 - 0.0611, 1.0, 1 + 0.0611), abs=5e-5)


# --- counting ---------------------------------------------------------------------------------------------------------


def page(at: float, started: float | None = None, **numbers: float) -> Batch:
    """One good read: `finished_stop=3` is finished, key stop."""
    told = {name.replace("_", ".", 1): value for name, value in numbers.items()}
    own = {} if started is None else {"process_start": started}
    return Batch("engine:x", at, 0.0, tuple(samples("x", at, {**told, **own})))


def lost(at: float) -> Batch:
    """One read that brought nothing."""
    return Batch("engine:x", at, 0.0, (Gap("finished", "x", Why.TIMEOUT, "timeout", at),), error="timeout")


def test_restarts_and_missing_reads_cost_only_what_nobody_can_know() -> None:
    """100 on the first page happened before; 40 came while it was not read; after its restart it counts from 0."""
    one = Tally("x")
    for batch in (page(0, 5.0, finished_stop=100), page(5, 5.0, finished_stop=110), lost(10), lost(15),
                  page(20, 5.0, finished_stop=150, finished_error=3), page(25, 900.0, finished_stop=7),
                  page(30, 900.0, finished_stop=9, finished_error=1)):
        one.take(batch)
    whole = release.group([one], now=31.0, late_s=20.0)
    assert (whole.requests, whole.errors) == (10 + 40 + 3 + 7 + 2 + 1, 3 + 1)
    assert (one.scrapes, one.missed, one.restarts, whole.answering) == (5, 2, 1, 1)
    assert release.group([one], now=99.0, late_s=20.0).answering == 0


def test_histograms_of_engines_and_processes_are_added_bound_by_bound() -> None:
    """Two engines, one of them restarted with other bounds: what both have is kept, the whole is in the last."""
    one, two = Tally("x"), Tally("y")
    for numbers in ({"ttft.0.5": 0, "ttft.1.0": 0, "ttft.+Inf": 0}, {"ttft.0.5": 5, "ttft.1.0": 8, "ttft.+Inf": 9}):
        one.take(Batch("e", 0.0, 0.0, tuple(samples("x", 0.0, numbers))))
    one.take(Batch("e", 5.0, 0.0, tuple(samples("x", 5.0, {"ttft.0.5": 2, "ttft.2.0": 3, "ttft.+Inf": 4}))))
    two.take(Batch("e", 0.0, 0.0, tuple(samples("y", 0.0, {"ttft.0.5": 7, "ttft.1.0": 7, "ttft.+Inf": 7}))))
    two.take(Batch("e", 5.0, 0.0, tuple(samples("y", 5.0, {"ttft.0.5": 8, "ttft.1.0": 9, "ttft.+Inf": 10}))))
    assert release.group([one, two]).latencies["ttft"] == [(0.5, 5 + 2 + 1), (INF, 9 + 4 + 3)]


def test_a_tenth_of_the_load_is_said() -> None:
    """A release that looks fine under 5 % of an engine's load (the seed's tension 1)."""
    assert "served 10 % of what one of the old did" in release.notes(served(1000), served(100), SLO)[0]
    assert release.notes(served(1000), served(900), SLO) == []


@pytest.mark.parametrize(
    ("body", "path", "want"),
    [(b"0.42", "", 0.42), (b'{"data": {"result": [{"value": [1, "0.5"]}]}}', "data.result.0.value.1", 0.5),
     (b'{"a": null}', "a", None), (b'{"a": "NaN"}', "a", None), (b"<html>", "", None), (b"{}", "a", None)],
)
def test_a_number_from_an_answer(body: bytes, path: str, want: float | None) -> None:
    """Plain, or Prometheus' own answer by its path; everything else is no reading."""
    answer = Answer(200, {}, body)
    if want is not None:
        assert number_in(answer, path.split(".") if path else []) == want
        return
    with pytest.raises(ValueError, match="no number"):
        number_in(answer, path.split(".") if path else [])


# --- watching ---------------------------------------------------------------------------------------------------------


class Engine:
    """A page that has served `step` requests more at each scrape; so many of a hundred are slow, or failed."""

    def __init__(self, *, slow: int = 0, errors: int = 0, step: int = 100) -> None:
        self.scrapes, self.slow, self.errors, self.step, self.started = 0, slow, errors, step, 1000.0

    def restart(self) -> None:
        """Another process, which counts from 0."""
        self.scrapes, self.started = 0, self.started + 500.0

    def __call__(self) -> str:
        self.scrapes += 1
        n = self.scrapes * self.step
        slow, errors = n * self.slow // 100, n * self.errors // 100
        rows = [f"process_start_time_seconds {self.started}", 'vllm:num_requests_running{model_name="m"} 1',
                'vllm:num_requests_waiting{model_name="m"} 0', 'vllm:kv_cache_usage_perc{model_name="m"} 0.1',
                f'vllm:request_success_total{{finished_reason="stop",model_name="m"}} {n - errors}',
                f'vllm:request_success_total{{finished_reason="error",model_name="m"}} {errors}']
        for bound, count in (("0.75", n - slow), ("2.5", n), ("+Inf", n)):
            rows.append(f'vllm:time_to_first_token_seconds_bucket{{le="{bound}",model_name="m"}} {count}')
        rows += [f'vllm:time_to_first_token_seconds_sum{{model_name="m"}} {n * 0.2}',
                 f'vllm:time_to_first_token_seconds_count{{model_name="m"}} {n}']
        return "\n".join(rows) + "\n"


@pytest.fixture
def serve() -> Iterator[Callable[[Engine], PageServer]]:
    """Serves engines' pages until the test is over."""
    servers: list[PageServer] = []

    def start(engine: Engine) -> PageServer:
        servers.append(PageServer(engine))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def watched(old: str, new: str, for_s: float, between: Callable[[], object] = lambda: None, **more: Any,
            ) -> Mapping[str, Any]:
    """What a watch told; `between` is called with each line of its progress."""

    def tell(line: str, left_s: float | None = None, **_: bool) -> None:
        between()

    return Watch(Plan([old], [new], SLO, for_s, 0.05, **more)).run(threading.Event(), tell)


def test_a_slow_release_is_found_long_before_the_end(serve: Callable[[Engine], PageServer]) -> None:
    """5 % of its first tokens take seconds: proven after a few hundred requests, not after the hour."""
    old, new = serve(Engine()), serve(Engine(slow=5))
    answer = watched(old.url, new.url, 3600.0)
    assert answer["verdict"] == "fail"
    assert answer["why"].startswith("ttft_p99: 5 % of ")
    assert answer["watched_s"] < 60
    assert answer["groups"]["new"]["ttft_p99_s"] > 0.75


@pytest.mark.heavy
def test_a_sound_release_passes_through_a_restart_and_missing_reads(serve: Callable[[Engine], PageServer]) -> None:
    """Both engines restart, the new one refuses for a while: none of that is a verdict."""
    engines = Engine(step=300), Engine(step=300)
    old, new = serve(engines[0]), serve(engines[1])
    seen = 0

    def disturb() -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            new.stop()
        if seen == 8:
            engines[1].restart()
            new.start()

    answer = watched(old.url, new.url, 3.0, disturb)
    assert answer["verdict"] == "pass", answer["why"]
    assert answer["groups"]["new"]["restarts"] == 1
    assert answer["groups"]["new"]["missed"] >= 2
    assert "new group: 1 restart of an engine" in answer["notes"][-1]


def test_the_business_number_of_both_groups(serve: Callable[[Engine], PageServer]) -> None:
    """Its readings are paired: one source that fails at a moment costs that moment."""
    old, new = serve(Engine()), serve(Engine())
    with Receiver(lambda arrival: Reply(body=b'{"sold": 100}' if arrival.path == "/old" else b'{"sold": 90}')) as shop:
        shop.script(Reply(500))
        answer = watched(old.url, new.url, 3600.0, business=(f"{shop.url}/old#sold", f"{shop.url}/new#sold"))
    assert answer["why"] == "business: 90 % of the old group's (90 % to 90 %)"
    assert answer["groups"]["old"]["business_readings"] >= 30


def test_the_way_back_by_webhook_is_one_post_with_the_verdict() -> None:
    """It is told why; a 503 is asked again with the same id, so that who has it does it once."""
    answer = {"verdict": "fail", "why": "errors: 4 % of 500 failed", "started": 100.4, "ended": 200.0}
    with Receiver() as receiver:
        plan = Plan([], [], SLO, 1.0, webhook=f"{receiver.url}/rollback")
        assert roll_back(plan, answer) == {"how": receiver.url, "ok": True, "why": None}
        assert [a.json["why"] for a in receiver.arrivals] == ["errors: 4 % of 500 failed"]
        receiver.script(Reply(404))
        fired = roll_back(plan, answer)
    assert fired is not None
    assert (fired["ok"], "404" in str(fired["why"])) == (False, True)
    assert len({a.json["id"] for a in receiver.arrivals}) == 1
    assert roll_back(Plan([], [], SLO, 1.0), answer) is None


def tocsin(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The real command."""
    (folder / "t.yaml").write_text("node: n\n")
    command = [sys.executable, "-m", "agent", "--config", f"{folder}/t.yaml", "canary", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "COLUMNS": "200"})


@pytest.mark.parametrize("rollback", ["", "/nowhere/roll-back --now", "'unclosed"])
def test_a_way_back_that_cannot_be_started_is_refused_before_the_watch(rollback: str) -> None:
    """`--rollback "$HOOK"` with no HOOK: a day later the release failed, and nothing rolled it back."""
    with pytest.raises(Failure, match="--rollback"):
        command_of(rollback)


def test_the_words_of_a_way_back() -> None:
    """As a shell would read them; none where none is given."""
    assert command_of("sh -c 'exit 7'") == ["sh", "-c", "exit 7"]
    assert command_of(None) == ()


@pytest.mark.heavy
def test_the_command_fires_its_way_back_once_and_exits_1(tmp_path: Path, serve: Callable[[Engine], PageServer]) -> None:
    """Two engines on each side after one --old and one --new; the command gets the verdict on its stdin."""
    bad, good = [serve(Engine(errors=6, step=400)) for _ in range(2)], [serve(Engine(step=400)) for _ in range(2)]
    script = f"sh -c 'cat >> {tmp_path}/fired; echo >> {tmp_path}/fired; echo $TOCSIN_VERDICT >> {tmp_path}/env'"
    done = tocsin(tmp_path, "--old", *[s.url for s in good], "--new", *[s.url for s in bad], "--for", "1h", "--every",
                  "0.5s", "--rollback", script, "--json")
    out, err = done.communicate(timeout=60)
    answer = json.loads(out)
    assert (done.returncode, answer["verdict"]) == (1, "fail")
    assert answer["rollback"] == {"how": "sh", "ok": True, "why": None}
    (line,) = (tmp_path / "fired").read_text().splitlines()
    assert json.loads(line)["why"] == answer["why"]
    assert (tmp_path / "env").read_text() == "fail\n"
    assert answer["groups"]["new"]["engines"] == 2
    assert err == ""


@pytest.mark.heavy
def test_ctrl_c_ends_it_cleanly_with_what_is_known(tmp_path: Path, serve: Callable[[Engine], PageServer]) -> None:
    """Exit 130, a verdict so far, no way back and no traceback."""
    old, new = serve(Engine()), serve(Engine())
    done = tocsin(tmp_path, "--old", old.url, "--new", new.url, "--every", "0.5s", "--rollback", f"touch {tmp_path}/no")
    wait_until(lambda: new.scrapes >= 2, 60, "its first reads")
    time.sleep(0.1)
    done.send_signal(signal.SIGINT)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 130
    assert "UNKNOWN: " in out
    assert "Traceback" not in err
    assert not (tmp_path / "no").exists()
