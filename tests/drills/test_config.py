"""`drills:` of tocsin.yaml: the example of the design as Drills, and what is refused at load, with its line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agent.config import Config, load_config
from agent.model import Rule
from agent.strict import ConfigErrors
from drills import cron
from drills.config import announced_by, drills_of
from drills.model import Drill, Holds, Load, Schedule

ENGINES = 'engines: [{name: llama, url: "http://127.0.0.1:8000"}, {url: "http://10.0.0.7:8001"}]\n'
LOAD = 'load: {url: "http://router/v1"}'
RULES = (
    Rule("engine-down", "engine_down", ">=", 3, "page"),
    Rule("engine-stuck", "engine_stuck", ">=", 1, "page", params={"flat": 120.0, "queue": 60.0}),
    Rule("ttft-p99", "ttft_slow_share", ">", 0.01, "page", for_s=60),
    Rule("user-ttft-p99", "user_ttft_slow_share", ">", 0.01, "page", for_s=60),
    Rule("user-itl-p99", "user_itl_slow_share", ">", 0.01, "page", for_s=60),
)


def configured(text: str, tmp_path: Path) -> Config:
    path = tmp_path / "tocsin.yaml"
    path.write_text(ENGINES + text)
    return load_config(path, {})


def drill(text: str, tmp_path: Path, rules: Sequence[Rule] = RULES) -> Drill:
    """The one drill of a text that holds its keys in braces."""
    (found,) = drills_of(configured(f"drills:\n  - {{name: a, {text}}}\n", tmp_path), rules)
    return found


def faults(text: str, tmp_path: Path, rules: Sequence[Rule] = RULES) -> str:
    with pytest.raises(ConfigErrors) as caught:
        drill(text, tmp_path, rules)
    said = str(caught.value)
    assert f"{tmp_path}/tocsin.yaml:3: drills[0]" in said
    return said


def test_a_drill_as_its_owner_writes_it(tmp_path: Path) -> None:
    """Every key once: spans become seconds, shares ratios, an engine its address, the last day one more day off."""
    config = configured(
        """drills:
  - name: monthly-loss
    fault: packet-loss
    target: {engine: llama, netns: /run/netns/llama}
    schedule: {cron: "0 10 * * TUE#1", zone: Europe/Berlin, window: "10:00-16:00", blackouts: [2026-12-20/2027-01-06]}
    load: {url: "https://llm.internal/v1", model: llama-70b, rate: 300/m, streaming: true, retries: 2,
           connections: new, deadline: 20s, max_tokens: 8, prompt: hello, api_key_file: /run/secrets/key}
    for: 5m
    baseline: 1m
    recovery: 3m
    resolve_within: 4m
    expects: [user-ttft-p99]
    holds: {goodput: 90% in 20s, ttft_p99: slo, itl_p99: 200ms, error_ratio: null, restart_within: 10m,
            degraded: {within: 2s, by: {model: small}}, retry_storm: false}
    params: {share: 30%, direction: both, peer: {netns: /run/netns/router}}
    dry_run: true
    route_to: webhook
    echo: "http://127.0.0.1:9000/echo"
    owner: serving
notify: [{webhook: {url: "http://127.0.0.1:9000/hook"}}]
""",
        tmp_path,
    )

    (found,) = drills_of(config, RULES)

    assert found.schedule == Schedule(
        "0 10 * * TUE#1", "Europe/Berlin", (600, 960), (("2026-12-20", "2027-01-07"),), 1_728_000.0, 300.0
    )
    assert found.load == Load(
        "https://llm.internal/v1", "llama-70b", 5.0, True, 2, "new", 20.0, 8, "hello", "/run/secrets/key"
    )
    assert found.holds == Holds(
        0.9, 20.0, "slo", 0.2, None, 600.0, {"within_s": 2.0, "by": {"model": "small"}}, retry_storm=False
    )
    assert (found.for_s, found.baseline_s, found.recovery_s, found.resolve_within_s) == (300, 60, 180, 240)
    assert found.params == {"share": 0.3, "direction": "both", "peer": {"netns": "/run/netns/router"}}
    assert found.expects == ("user-ttft-p99",)
    assert (found.enabled, found.dry_run, found.owner) == (True, True, "serving")
    assert found.route_to == "webhook"
    assert found.echo == "http://127.0.0.1:9000/echo"
    assert found.target == {
        "engine": "llama",
        "url": "http://127.0.0.1:8000",
        "port": 8000,
        "address": "127.0.0.1",
        "netns": "/run/netns/llama",
        "state_dir": "/var/lib/tocsin",
    }


def test_what_is_left_out_has_the_defaults_of_the_nouns(tmp_path: Path) -> None:
    """A drill of three keys is a drill."""
    found = drill(f"fault: process-kill, target: {{port: 8001}}, {LOAD}", tmp_path)

    assert found.load == Load("http://router/v1")
    assert found.holds == Holds()
    assert (found.schedule, found.params, found.for_s) == (None, {}, 300.0)
    assert (found.target["engine"], found.target["address"]) == ("10.0.0.7:8001", "10.0.0.7")


@pytest.mark.parametrize(
    ("text", "params", "target"),
    [
        (
            f"fault: upstream-timeout, target: {{upstream: 10.0.0.9:443}}, {LOAD}, params: {{delay: 2s, mode: hang}}",
            {"delay_s": 2.0, "mode": "hang"},
            {"address": "10.0.0.9", "port": 443},
        ),
        (
            f"fault: upstream-timeout, target: {{port: 8000}}, {LOAD}, params: {{mode: status, status: 429}}",
            {"mode": "status", "status": 429},
            {"port": 8000},
        ),
        (
            "fault: disk-full, target: {path: /var/log}, params: {leave: 2GiB}",
            {"path": "/var/log", "leave_bytes": 2147483648.0},
            {"path": "/var/log", "state_dir": "/var/lib/tocsin"},
        ),
        (f"fault: engine-hang, target: {{engine: llama, part: all}}, {LOAD}", {}, {"part": "all"}),
        (
            f"fault: pod-kill, target: {{namespace: llm, selector: app=vllm}}, {LOAD}, params: {{mode: evict}}",
            {"mode": "evict"},
            {"namespace": "llm", "selector": "app=vllm"},
        ),
    ],
)
def test_each_fault_gets_its_own_numbers(text: str, params: object, target: dict[str, object], tmp_path: Path) -> None:
    """Plain values with their units in their names, as the faults ask for them."""
    found = drill(text, tmp_path)

    assert found.params == params
    assert target.items() <= found.target.items()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fault: pod-kill, target: {selector: app=vllm}", "selector without a namespace; add namespace"),
        (f"fault: pod-kill, target: {{namespace: llm, selector: app=vllm}}, {LOAD}, params: {{mode: turn}}",
         "pod-kill has no mode turn; write delete or evict"),
        ("fault: process-kill, target: {engine: llama, namespace: llm}", "a namespace without a selector; add one"),
        (f"fault: pod-kill, target: {{namespace: llm, selector: ' '}}, {LOAD}", "chooses every pod of the namespace"),
        (f"fault: pod-kill, target: {{namespace: '', selector: app=vllm}}, {LOAD}", "'' is no name of a namespace"),
        (f"fault: pod-kill, target: {{namespace: a/../b, selector: app=x}}, {LOAD}", "is no name of a namespace"),
        ("fault: gpu-reset, target: {gpu: GPU-1}, params: {mode: reset}", "which engine does it hit?"),
        ("fault: gpu-reset, target: {gpu: GPU-1}", "no rule that is on sees a line of an Xid"),
        ("fault: gpu-reset, target: {engine: llama}, expects: [engine-down]", "name target.gpu by its UUID"),
        ("fault: gpu-reset, target: {gpu: GPU-1}, params: {mode: hang}", "has no mode hang; write synthetic or reset"),
        ("fault: gpu-reset, target: {engine: llama, part: core}, params: {mode: reset}", "gpu-reset has no parts"),
        ("fault: upstream-timeout, target: {port: 8000}, params: {mode: reset}", "upstream-timeout has no mode reset"),
        ("fault: slow-rank, target: {gpu: GPU-1}", "slow-rank has no target gpu; write one of engine"),
        ("fault: slow-rank, target: {engine: llama}, params: {mode: reset}", "slow-rank takes no mode; remove it"),
        ("fault: disk-full, target: {port: 8000}", "disk-full has no target port; write one of path"),
        ("fault: disk-full, target: {path: /x, part: all}", "target.part: disk-full has no parts"),
        (f"fault: process-kill, target: {{port: 8000}}, {LOAD}, params: {{share: 10%}}", "takes no share; remove it"),
        (f"fault: packet-loss, target: {{port: 8000}}, {LOAD}, params: {{leave: 1GiB}}", "it takes share, direction"),
        (f"fault: upstream-timeout, target: {{port: 1}}, {LOAD}, params: {{status: 503}}", "write mode: status"),
        (f"fault: process-kill, target: {{port: 8000}}, {LOAD}, route_to: slack", "no channel 'slack' is under notify"),
        (f"fault: process-kill, target: {{port: 8000}}, {LOAD}, expects: [engine-donw]", "did you mean engine-down?"),
    ],
)
def test_what_does_not_belong_together(text: str, said: str, tmp_path: Path) -> None:
    """A number that the fault does not take was read by nobody, and the drill passed."""
    assert said in faults(text, tmp_path)


def test_a_port_that_two_engines_have(tmp_path: Path) -> None:
    """Engine a ran on another machine, b here, both on port 8000: `port: 8000` announced a's alerts, and killed b."""
    path = tmp_path / "tocsin.yaml"
    path.write_text('engines: [{name: a, url: "http://10.0.0.8:8000"}, {name: b, url: "http://127.0.0.1:8000"}]\n'
                    "drills: [{name: kill, fault: process-kill, target: {port: 8000}}]\n")

    with pytest.raises(ConfigErrors, match=r"port 8000 is that of 2 engines: a, b; name one of them: target\.engine"):
        drills_of(load_config(path, {}), RULES)
    path.write_text(path.read_text().replace("{port: 8000}", "{port: 8000, address: 127.0.0.1}"))
    assert [drill.name for drill in drills_of(load_config(path, {}), RULES)] == ["kill"]


def test_a_drill_on_a_gpu_of_an_engine(tmp_path: Path) -> None:
    """The GPU by its UUID, of the engine that has it; the engine's GPUs in the order of its ranks."""
    text = "fault: gpu-reset, target: {engine: llama, gpu: GPU-1}, params: {mode: reset}"
    found = drill(text, tmp_path)
    assert found.params == {"mode": "reset"}
    expected = {"gpu": "GPU-1", "engine": "llama", "url": "http://127.0.0.1:8000", "gpus": []}
    assert expected.items() <= found.target.items()
    assert found.target["socket"] == "/run/tocsin/tocsin.sock"
    assert found.target["other_watchers_ok"] == []
    slow = drill("fault: slow-rank, target: {engine: llama, part: 'rank:1'}, params: {share: 60%}", tmp_path)
    assert (slow.params, slow.target["part"]) == ({"share": 0.6}, "rank:1")


def test_c083_a_day_that_no_month_has_is_a_configuration_error(tmp_path: Path) -> None:
    """C083 b: 30 February is refused at once, not looked for in all eternity."""
    started = time.monotonic()

    said = faults('fault: disk-full, target: {path: /x}, schedule: {cron: "0 0 30 2 *"}', tmp_path)

    assert "drills[0].schedule.cron: '0 0 30 2 *' never matches; no month has such a day" in said
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ('cron: "0 10 * * XYZ"', "bad day-of-week"),
        ('cron: "61 10 * * *"', "bad minute"),
        ('cron: "0 10 32 * *"', "bad day-of-month"),
        ('cron: "0 0 31 2,4,6,9,11 *"', "never matches"),
        ('cron: "30 3 * * *", window: "10:00-16:00"', "due at 03:30, which is never inside the window 10:00-16:00"),
        ('cron: "0 16 * * *", window: "10:00-16:00"', "never inside"),
        ('cron: "0 12 * * *", window: "22:00-06:00"', "never inside"),
    ],
)
def test_a_drill_that_would_never_run(schedule: str, said: str, tmp_path: Path) -> None:
    """For a year nobody noticed that the drill's hour was outside its window."""
    assert said in faults(f"fault: disk-full, target: {{path: /x}}, schedule: {{{schedule}}}", tmp_path)


def test_a_blackout_for_ever(tmp_path: Path) -> None:
    """`9999-12-31` is how people write for ever: no day comes after it, and the whole configuration was refused."""
    text = 'fault: disk-full, target: {path: /data}, schedule: {cron: "0 3 * * *", blackouts: [2026-12-20/9999-12-31]}'

    schedule = drill(text, tmp_path).schedule

    assert schedule is not None
    later = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
    assert cron.closed(schedule, later).startswith("2100-01-01 is in the blackout")
    assert cron.closed(schedule, datetime(2026, 12, 19, tzinfo=UTC).timestamp()) == ""


@pytest.mark.parametrize("window", ["10:00-16:00", "22:00-10:01", "00:00-24:00"])
def test_windows_that_hold_the_hour(window: str, tmp_path: Path) -> None:
    """Also over midnight."""
    schedule = f'schedule: {{cron: "0 10 * * TUE#1", window: "{window}"}}'

    assert drill(f"fault: disk-full, target: {{path: /x}}, {schedule}", tmp_path).schedule is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # 0 + 2 x 5 + 30; 60 + 40; 120 without progress + 40
        (f"fault: process-kill, target: {{port: 8000}}, {LOAD}, for: 39s", "for engine-down to fire|write for: 40s"),
        (f"fault: packet-loss, target: {{port: 8000}}, {LOAD}, for: 99s", "for user-ttft-p99 to fire|write for: 100s"),
        (f"fault: engine-hang, target: {{port: 8000}}, {LOAD}, for: 159s", "for engine-stuck to fire|write for: 160s"),
        # 473 requests: at 5/s 94.6 s, in 60 s 7.9/s
        (f"fault: process-kill, target: {{port: 8000}}, {LOAD}, for: 60s", "5/s for 60 s are 300 requests|rate: 8/s"),
        (f"fault: process-kill, target: {{port: 8000}}, {LOAD}, for: 94s", "are 470 requests|or for: 95s"),
    ],
)
def test_a_fault_too_short_to_judge(text: str, said: str, tmp_path: Path) -> None:
    """A drill of a minute ended before its alarm could ring; it said so a month later."""
    found = faults(text, tmp_path)

    assert all(part in found for part in said.split("|")), found


def test_a_fault_just_long_enough(tmp_path: Path) -> None:
    """95 s at 5/s are 475 requests."""
    assert drill(f"fault: process-kill, target: {{port: 8000}}, {LOAD}, for: 95s", tmp_path).for_s == 95


def test_a_missing_replica_lasts_as_long_as_it_is_away(tmp_path: Path) -> None:
    """A pod was killed for 40 s, and another alarm, of 30 s, that only might fire had to have its time as well."""
    rules = (*RULES, Rule("replicas-missing", "replicas_missing", ">", 0, "ticket", for_s=30))
    text = 'fault: pod-kill, target: {namespace: llm, selector: app=vllm}, load: {url: "http://r/v1", rate: 20/s}'

    assert drill(f"{text}, for: 40s", tmp_path, rules).for_s == 40
    expected = faults(f"{text}, for: 40s, expects: [replicas-missing]", tmp_path, rules)
    assert "40 s are too short for replicas-missing to fire" in expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fault: packet-loss, target: {port: 8000}", "no signal can see packet-loss: an engine's own latency begins"),
        (f"fault: upstream-timeout, target: {{port: 1}}, {LOAD}, expects: [ttft-p99]", "ttft-p99 cannot see upstream"),
        (f"fault: upstream-timeout, target: {{port: 8000}}, {LOAD}, params: {{delay: 300ms}}",
         "a delay of 0.3 s is inside the SLO of 0.5 s: user-ttft-p99 cannot fire"),
        ("fault: upstream-timeout, target: {port: 8000}, load: {url: 'http://r/v1', streaming: false}",
         "without streaming nobody sees a first token: user-ttft-p99 cannot fire"),
        (f"fault: process-kill, target: {{port: 9}}, {LOAD}", "at port 9: the agent watches no engine there"),
        ("fault: engine-hang, target: {port: 8000}", "no signal can see a hung engine without work in flight"),
    ],
)
def test_a_fault_that_no_signal_can_see(text: str, said: str, tmp_path: Path) -> None:
    """The engine's own TTFT starts behind the proxy: the alarm of this drill could never have rung."""
    assert said in faults(text, tmp_path)


@pytest.mark.parametrize(
    ("mode", "want"),
    [("turn", ("user-ttft-p99",)), ("chunk", ("user-ttft-p99", "user-itl-p99")), ("hang", ("user-error-rate",)),
     ("status", ("user-error-rate",))],
)
def test_what_a_mode_announces(mode: str, want: tuple[str, ...], tmp_path: Path) -> None:
    """A 503 brings no late first token: the drill waited for an alarm that could not ring."""
    text = f"drills: [{{name: a, fault: upstream-timeout, target: {{port: 8000}}, {LOAD}, params: {{mode: {mode}}}}}]\n"
    (written,) = configured(text, tmp_path).drills
    assert announced_by(written) == want


def test_a_rule_that_is_off_is_no_typing_error(tmp_path: Path) -> None:
    """Whether the alarm rings is what the drill is for: it runs, and fails."""
    text = f"drills: [{{name: a, fault: process-kill, target: {{port: 8000}}, {LOAD}, expects: [engine-down]}}]"
    config = configured(f"rules: {{disable: [engine-down]}}\n{text}\n", tmp_path)

    (found,) = drills_of(config, [rule for rule in RULES if rule.id != "engine-down"])

    assert found.expects == ("engine-down",)


def test_every_fault_of_every_drill_at_once(tmp_path: Path) -> None:
    """Two faulty drills: one look mends both."""
    text = (
        'drills:\n  - {name: a, fault: disk-full, target: {path: /x}, schedule: {cron: "0 0 30 2 *"}}\n'
        "  - {name: b, fault: disk-full, target: {path: /x}, expects: [engine-donw]}\n"
    )

    with pytest.raises(ConfigErrors) as caught:
        drills_of(configured(text, tmp_path), RULES)

    assert [(fault.line, fault.key) for fault in caught.value.faults] == [
        (3, "drills[0].schedule.cron"),
        (4, "drills[1].expects[0]"),
    ]


def test_what_is_asked_for_users_needs_load(tmp_path: Path) -> None:
    """`holds: {error_ratio: 0.1%}` stood there without load: nobody judged it, and the drill passed each month."""
    said = faults("fault: process-kill, target: {engine: llama}, holds: {error_ratio: 0.1%}", tmp_path)
    assert "holds.error_ratio: without load nobody can tell" in said
    assert drill("fault: process-kill, target: {engine: llama}, holds: {error_ratio: null}", tmp_path).load is None
