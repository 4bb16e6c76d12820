"""Rules are data: what cannot fire, what nobody can read and what contradicts itself is refused before it runs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.config import ConfigErrors, load_all, load_config, rules_for
from agent.model import Rule, SignalSpec, Slo
from agent.signals import SIGNALS
from rules import RulesConfig, RuleSet, burn_factor, highest_burn, load_rules, severity_of

CATALOGUE = {
    spec.id: spec
    for spec in (
        SignalSpec("queue_age", "s", "engine", ""),
        SignalSpec("kv_cache_utilization", "ratio", "engine", ""),
        SignalSpec("gpu_temperature", "celsius", "gpu", ""),
        SignalSpec("preemptions", "count", "engine", "", windowed=True),
        SignalSpec("slow", "ratio", "target", "", windowed=True, counted=True, params={"limit": "slo"}),
        SignalSpec("burn", "of limit", "target", "", params={"pairs": "pairs"}),
        SignalSpec("stuck", "of limit", "engine", "", params={"flat": "duration", "part": "ratio", "late": "number"}),
    )
}
REAL = {id_: row[0] for id_, row in SIGNALS.items()}
KV = "- {id: kv, signal: kv_cache_utilization, fires: '>= 0.85', severity: ticket}\n"
# error-burn-fast as in the Google SRE workbook for 30 days: 2 % in 1 h, 5 % in 6 h
BURN = """- id: burn-fast
  signal: burn
  fires: "> 1"
  params: {pairs: [{budget: 2%, long: 1h, short: 5m}, {budget: 5%, long: 6h, short: 30m}]}
  severity: page
"""
SLOW_BURN = """- id: burn-slow
  signal: burn
  fires: "> 1"
  params: {pairs: [{budget: 10%, long: 1d, short: 2h}, {budget: 10%, long: 3d, short: 6h}]}
  severity: ticket
"""
DAY_S = 86400.0


def load(tmp_path: Path, builtin: str, *, slo: Slo | None = None, rules: str = "", **users: str) -> RuleSet:
    """Rules from a text that is built in, files of a user, and the `rules:` of a tocsin.yaml."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for directory in (ours, theirs):
        directory.mkdir(exist_ok=True)
    (ours / "built-in.yaml").write_text(builtin)
    for name, text in users.items():
        (theirs / f"{name}.yaml").write_text(text)
    (tmp_path / "tocsin.yaml").write_text(f"rules:\n  dirs: [{theirs}]\n{rules}")
    config = load_config(tmp_path / "tocsin.yaml", {})
    return load_rules(config.rules, slo or Slo(), CATALOGUE, ours)


def faults(tmp_path: Path, builtin: str, **more: Any) -> list[str]:
    """What is said of them, without the directory's name."""
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, builtin, **more)
    return [str(fault).replace(f"{tmp_path}/", "") for fault in caught.value.faults]


def one(tmp_path: Path, fires: str, signal: str = "kv_cache_utilization", more: str = "") -> Rule:
    """One rule with this comparison."""
    text = f"- {{id: a, signal: {signal}, fires: {fires}, severity: page{more}}}\n"
    return load(tmp_path, text).rules[0]


# ---- burn: case C075 ----


def test_c075_a_the_factor_of_the_workbook() -> None:
    """14.4 for an hour spends 2 % of 30 days: the number that everyone copies is right there, and only there."""
    assert burn_factor(0.02, 30 * DAY_S, 3600) == pytest.approx(14.4)
    assert burn_factor(0.05, 30 * DAY_S, 6 * 3600) == pytest.approx(6)
    assert burn_factor(0.10, 30 * DAY_S, DAY_S) == pytest.approx(3)
    assert burn_factor(0.10, 30 * DAY_S, 3 * DAY_S) == pytest.approx(1)


def test_c075_b_a_window_of_7_days_has_its_own_factors(tmp_path: Path) -> None:
    """With 7 days the copied 14.4 would spend 8.57 % in an hour; 2 % of them is a factor of 3.36."""
    rules = load(tmp_path, BURN, slo=Slo(window=7 * DAY_S)).rules

    assert burn_factor(0.02, 7 * DAY_S, 3600) == pytest.approx(3.36)
    assert burn_factor(0.0857142857, 7 * DAY_S, 3600) == pytest.approx(14.4)
    assert [pair["factor"] for pair in rules[0].params["pairs"]] == [pytest.approx(3.36), pytest.approx(1.4)]


def test_c075_c_a_burn_that_no_outage_reaches_is_refused(tmp_path: Path) -> None:
    """At 50 % availability a total outage burns at 2: a page that waits for 14.4 never comes."""
    said = faults(tmp_path, BURN, slo=Slo(availability=0.5))

    assert highest_burn(0.5) == 2
    assert len(said) == 2
    assert said[0] == (
        "ours/built-in.yaml:4: burn-fast.params.pairs[0]: a burn of 14.4 over 1 h can never be reached: with "
        "slo.availability 0.5 it is at most 2; promise a higher availability, lower this pair's budget, or disable "
        "burn-fast"
    )
    assert "pairs[1]: a burn of 6 over 6 h" in said[1]


def test_c075_the_highest_burn_itself_is_not_reached() -> None:
    """A burn is compared with >, and its lower bound lies under the measured ratio: exactly the most is too much."""
    assert highest_burn(0.75) == 4
    with pytest.raises(ConfigErrors, match="can never be reached"):
        # 0.4 x 1 d / 2.4 h = 4
        _load_burn(Slo(availability=0.75, window=DAY_S), budget="40%", long="144m")


def test_c075_just_under_the_highest_burn_is_kept() -> None:
    """0.39 x 1 d / 2.4 h = 3.9 can be reached at 75 %."""
    assert _load_burn(Slo(availability=0.75, window=DAY_S), budget="39%", long="144m").notes == ()


def _load_burn(slo: Slo, budget: str, long: str, engine_slos: Mapping[str, Slo] | None = None) -> RuleSet:
    with tempfile.TemporaryDirectory() as directory:
        text = BURN.replace("{budget: 2%, long: 1h, short: 5m}, {budget: 5%, long: 6h, short: 30m}", "PAIR")
        text = text.replace("PAIR", f"{{budget: {budget}, long: {long}, short: 5m}}")
        (Path(directory) / "a.yaml").write_text(text)
        return load_rules(RulesConfig(), slo, CATALOGUE, Path(directory), engine_slos=engine_slos)


def test_c075_an_engine_s_own_promise_counts() -> None:
    """The node promises 99.9 %, one batch engine 90 %: there a burn of 14.4 is impossible (at most 10)."""
    with pytest.raises(ConfigErrors, match=r"with the availability of batch 0\.9 it is at most 10"):
        _load_burn(Slo(), "2%", "1h", engine_slos={"batch": Slo(availability=0.9)})


def test_a_pair_under_1_is_dropped_and_said(tmp_path: Path) -> None:
    """On 7 days, 10 % a day is a burn of 0.7, within the budget: it would fire in good order."""
    both = load(tmp_path, BURN + SLOW_BURN, slo=Slo(window=7 * DAY_S))

    assert [rule.id for rule in both.rules] == ["burn-fast"]
    assert [re.sub(r"^\S+ ", "", note) for note in both.notes] == [
        ("burn-slow drops its pair over 24 h: with slo.window 7 d its factor is 0.7, and a burn under 1 is within "
        "the budget"),
        ("burn-slow drops its pair over 72 h: with slo.window 7 d its factor is 0.233, and a burn under 1 is within "
        "the budget"),
        "burn-slow has no pair left and cannot fire: it is off",
    ]


@pytest.mark.parametrize("window_d", [1 / 24, 1, 2])
def test_the_rules_that_ship_load_with_a_short_slo_window(window_d: float) -> None:
    """`slo: {window: 1d}`: a pair over 3 d in a file that is ours is no fault of the user's; it is off, and said."""
    slo = Slo(window=window_d * DAY_S)
    known = load_rules(RulesConfig(dirs=()), slo, {name: spec for name, (spec, _) in SIGNALS.items()})

    assert "error-burn-slow" not in {rule.id for rule in known.rules}
    assert any("error-burn-slow drops its pair over 72 h" in note for note in known.notes)


def test_a_factor_of_exactly_1_is_kept(tmp_path: Path) -> None:
    """10 % of 30 days in 3 days is the budget's own pace, and the last pair of the workbook."""
    assert [pair["factor"] for pair in load(tmp_path, SLOW_BURN).rules[0].params["pairs"]] == [3, 1]


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("{budget: 2%, long: 1h}", "a pair has budget, long and short"),
        ("{budget: 2%, long: 1h, short: 5m, factor: 14.4}", "and no other keys"),
        ("{budget: 2%, long: 60, short: 5m}", "missing unit in duration 60; write 60s, 60ms or 60m"),
        ("{budget: 2, long: 1h, short: 5m}", "'2' is over 100 %; write 2%"),
        ("{budget: 0%, long: 1h, short: 5m}", "a budget of 0 fires always"),
        ("{budget: 2%, long: 5m, short: 1h}", "windows must rise"),
        ("1h", "a pair has budget, long and short"),
    ],
)
def test_pairs_that_are_none(pair: str, said: str, tmp_path: Path) -> None:
    """What people write instead of a pair."""
    text = f"- {{id: a, signal: burn, fires: '> 1', severity: page, params: {{pairs: [{pair}]}}}}\n"

    assert said in faults(tmp_path, text)[0]


# ---- comparisons ----


@pytest.mark.parametrize(
    ("signal", "fires", "want"),
    [
        ("kv_cache_utilization", "'>= 0.85'", (">=", 0.85, None)),
        ("kv_cache_utilization", "'>=85%'", (">=", 0.85, None)),
        ("kv_cache_utilization", "< 0.5", ("<", 0.5, None)),
        ("gpu_temperature", "'> 85'", (">", 85.0, None)),
        ("gpu_temperature", "'<= -5'", ("<=", -5.0, None)),
        ("queue_age", "'>= 250ms'", (">=", 0.25, None)),
        ("queue_age", "'> 0'", (">", 0.0, None)),
        ("queue_age", "'>= 0.5 * slo.ttft_p99'", (">=", 0.5, "ttft_p99")),
        ("queue_age", "'> slo.itl_p99'", (">", 1.0, "itl_p99")),
        ("kv_cache_utilization", "'< slo.availability'", ("<", 1.0, "availability")),
    ],
)
def test_comparisons(signal: str, fires: str, want: tuple[str, float, str | None], tmp_path: Path) -> None:
    """Every form of the contract, in the signal's own unit."""
    rule = one(tmp_path, fires, signal)

    assert (rule.op, rule.factor, rule.slo) == want
    assert rule.needs_slo == (want[2] is not None)


@pytest.mark.parametrize(
    ("signal", "fires", "said"),
    [
        ("queue_age", "'>= 5'", "missing unit in duration 5; write 5s, 5ms or 5m"),
        ("queue_age", "'>= 5%'", "'5%' is not a duration"),
        ("queue_age", "'>= slo.ttft'", "slo.ttft is unknown; did you mean ttft_p99?"),
        ("queue_age", "'>= slo.availability'", "slo.availability is in ratio, the signal queue_age in s"),
        ("kv_cache_utilization", "'>= slo.ttft_p99'", "slo.ttft_p99 is in s"),
        ("kv_cache_utilization", "'>= 85'", "and 85 is 8500 %; write 85%"),
        ("gpu_temperature", "'> 85C'", "takes a plain number, not 85C; write 85"),
        ("gpu_temperature", "'> 8.5.1'", "takes a plain number"),
        ("gpu_temperature", "'= 85'", "'= 85' is not a comparison; write it as"),
        ("gpu_temperature", "'== 85'", "is not a comparison"),
        ("gpu_temperature", "85", "'85' is not a comparison"),
        ("gpu_temperature", "'> 85 or > 90'", "is not a comparison"),
        ("gpu_temperature", "'>'", "is not a comparison"),
        ("queue_age", "'> 0.5 slo.ttft_p99'", "is not a comparison"),
        ("queue_age", "'> 0.5 *'", "is not a comparison"),
        ("queue_age", "'> 500ms * slo.ttft_p99'", "the factor before slo.* takes a plain number, not 500ms"),
        ("queue_age", "{a: 1}", "wanted a comparison, as \">= 0.85\", found a mapping"),
    ],
)
def test_comparisons_that_are_none(signal: str, fires: str, said: str, tmp_path: Path) -> None:
    """A limit that would be read otherwise than it was meant is refused with what to write."""
    text = f"- {{id: a, signal: {signal}, fires: {fires}, severity: page}}\n"

    assert said in faults(tmp_path, text)[0]


def test_an_unquoted_comparison_is_told_to_be_quoted(tmp_path: Path) -> None:
    """`fires: >= 0.85` begins a block of text in YAML: the riddle gets its answer."""
    said = faults(tmp_path, "- id: a\n  fires: >= 0.85\n")

    assert said == [
        ("ours/built-in.yaml:2: broken YAML: an unquoted > or | begins a block of text; "
        'quote the value, as fires: ">= 0.85"')
    ]


# ---- params, counts, windows ----


def test_params_are_numbers_in_base_units(tmp_path: Path) -> None:
    """Durations are seconds, shares ratios; a limit keeps its SLO by name, so that each engine's own counts."""
    text = """
- {id: a, signal: slow, fires: "> 1%", severity: page, params: {limit: 1.5 * slo.e2e_p99}, window: 5m, min_count: 100}
- {id: b, signal: slow, fires: "> 1%", severity: page, params: {limit: slo.ttft_p99}}
- {id: c, signal: slow, fires: "> 1%", severity: page, params: {limit: 500ms}}
- {id: d, signal: stuck, fires: ">= 1", severity: page, params: {flat: 2m, part: 1%, late: 3}}
"""
    a, b, c, d = load(tmp_path, text).rules

    assert (a.params, a.window_s, a.min_count, a.needs_slo) == ({"limit": (1.5, "e2e_p99")}, 300, 100, True)
    assert (b.params, b.needs_slo) == ({"limit": (1, "ttft_p99")}, True)
    assert (c.params, c.needs_slo) == ({"limit": 0.5}, False)
    assert d.params == {"flat": 120, "part": 0.01, "late": 3}
    assert d.where == f"{tmp_path}/ours/built-in.yaml:5"


def test_every_fault_of_a_rule_at_once(tmp_path: Path) -> None:
    """A new rule written in a hurry: one run of `tocsin config check` says all that is wrong with it."""
    text = """
- id: Queue_Age
  signal: queue_age
  fires: "> 1s"
  severity: page
- id: a
  signal: stuck
  fires: "> 1"
  severity: page
  window: 5m
  min_bad: 3
  params:
    flat: 120
    prat: 1%
    late: 3s
  causes: [kv, queue-aeg, a]
- id: kv
  signal: kv_cache_usage
  fires: "> 1"
  severty: page
- id: b
  signal: kv_cache_utilisation
  fires: "> 1"
  severity: pager
"""
    assert faults(tmp_path, text) == [
        ("ours/built-in.yaml:2: [0].id: 'Queue_Age' is not a rule id; write small letters, digits and single dashes, "
        "as gpu-too-hot"),
        "ours/built-in.yaml:10: a.window: the signal stuck has no window; remove the key",
        "ours/built-in.yaml:11: a.min_bad: the signal stuck counts nothing; remove the key",
        "ours/built-in.yaml:12: a.params: the param part of the signal stuck is missing; add part: …",
        "ours/built-in.yaml:13: a.params.flat: missing unit in duration 120; write 120s, 120ms or 120m",
        "ours/built-in.yaml:14: a.params.prat: unknown param; did you mean part?",
        "ours/built-in.yaml:15: a.params.late: wanted a number; write a plain number, without quotes or unit",
        "ours/built-in.yaml:16: a.causes[1]: the rule queue-aeg is unknown; known rules: a, b, kv",
        "ours/built-in.yaml:16: a.causes[2]: a rule cannot explain itself; remove it",
        "ours/built-in.yaml:17: [2]: the key severity is missing; add severity: …",
        "ours/built-in.yaml:20: [2].severty: unknown key; did you mean severity?",
        ("ours/built-in.yaml:24: [3].severity: wanted one of page, ticket, info, found the text 'pager'; did you mean "
        "page?"),
    ]


def test_an_unknown_signal_gets_the_nearest(tmp_path: Path) -> None:
    """British spelling, or a name from another tool."""
    text = "- {id: a, signal: kv_cache_utilisation, fires: '> 1', severity: page}\n"

    assert faults(tmp_path, text) == [
        "ours/built-in.yaml:1: a.signal: the signal kv_cache_utilisation is unknown; did you mean kv_cache_utilization?"
    ]


def test_c107_durations_of_a_rule(tmp_path: Path) -> None:
    """`for: 60` was nanoseconds somewhere."""
    said = faults(tmp_path, "- {id: a, signal: queue_age, fires: '> 1s', severity: page, for: 60, keep: 2}\n")

    assert said == [
        "ours/built-in.yaml:1: [0].for: missing unit in duration 60; write 60s, 60ms or 60m",
        "ours/built-in.yaml:1: [0].keep: missing unit in duration 2; write 2s, 2ms or 2m",
    ]


def test_c108_a_misspelt_key_of_a_rule(tmp_path: Path) -> None:
    """`treshold` was ignored, so that the limit never applied."""
    text = "- id: a\n  signal: queue_age\n  fires: '> 1s'\n  severity: page\n  wndow: 5m\n  for: 1s\n  for: 2s\n"

    assert faults(tmp_path, text) == [
        "ours/built-in.yaml:5: [0].wndow: unknown key; did you mean window?",
        "ours/built-in.yaml:7: [0].for: duplicate key, first on line 6; keep one of them",
    ]


# ---- more than one file ----


def test_a_user_adds_a_rule(tmp_path: Path) -> None:
    """A site's own rule stands beside the built-in ones and may be explained by them."""
    mine = "- {id: hot, signal: gpu_temperature, fires: '> 80', severity: info, causes: [kv], action: Look at it.}\n"

    assert [rule.id for rule in load(tmp_path, KV, mine=mine).rules] == ["kv", "hot"]


def test_one_id_in_two_files_names_both_places(tmp_path: Path) -> None:
    """Two teams call their rule the same: which of them pages must not depend on the order of files."""
    hot = "- {id: hot, signal: gpu_temperature, fires: '> 80', severity: info}\n"

    assert faults(tmp_path, KV, a=hot, b="\n" + hot) == [
        "theirs/b.yaml:2: hot.id: the rule hot stands at theirs/a.yaml:1 already; rename or remove one of them"
    ]


def test_a_built_in_rule_is_changed_by_override_alone(tmp_path: Path) -> None:
    """A copied built-in rule would hide every later correction of it."""
    assert faults(tmp_path, KV, mine=KV) == [
        ("theirs/mine.yaml:1: kv.id: the rule kv is built in (ours/built-in.yaml:1); change it with rules.override.kv "
        "in tocsin.yaml, or give this one its own id")
    ]


def test_a_faulty_file_does_not_blame_those_who_name_its_rules(tmp_path: Path) -> None:
    """One wrong key in a file is one fault, not one for each place that knows its rule."""
    mine = "- {id: hot, signal: gpu_temperature, fires: '> 80', severity: infos}\n"
    rules = "  disable: [hot]\n  override: {hot: {for: 1s}}\n"

    assert len(faults(tmp_path, KV, mine=mine, rules=rules)) == 1


def test_rules_dirs_that_are_not_there(tmp_path: Path) -> None:
    """The default directory need not exist; one that somebody named must."""
    (tmp_path / "a.yaml").write_text(KV)
    assert load_rules(RulesConfig(), Slo(), CATALOGUE, tmp_path).rules

    (tmp_path / "tocsin.yaml").write_text("rules:\n  dirs:\n    - /nowhere/rules\n")
    config = load_config(tmp_path / "tocsin.yaml", {})
    (tmp_path / "tocsin.yaml").unlink()
    with pytest.raises(ConfigErrors, match=r"tocsin.yaml:3: rules.dirs\[0\]: /nowhere/rules cannot be read: No such"):
        load_rules(config.rules, Slo(), CATALOGUE, tmp_path)


def test_a_rule_file_from_windows_is_read_too(tmp_path: Path) -> None:
    """A limit stood in MINE.YAML, and never applied."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "a.yaml").write_text(KV)
    (tmp_path / "MINE.YAML").write_text("- {id: hot, signal: gpu_temperature, fires: '> 80', severity: info}\n")
    config = RulesConfig(dirs=(tmp_path,))
    assert "hot" in {rule.id for rule in load_rules(config, Slo(), CATALOGUE, tmp_path / "ours").rules}


def test_an_empty_rule_file_is_no_fault(tmp_path: Path) -> None:
    """All of a site's rules are commented out."""
    assert len(load(tmp_path, KV, mine="# - id: x\n").rules) == 1


def test_faults_of_configuration_and_rules_come_together(tmp_path: Path) -> None:
    """`tocsin config check` is run once before a roll-out: it must not hide a broken rule behind a misspelt key."""
    (tmp_path / "mine.yaml").write_text(KV.replace("kv_cache_utilization", "kv_cash_utilization"))
    (tmp_path / "conf").mkdir()
    path = tmp_path / "conf" / "tocsin.yaml"
    path.write_text(f"pol: 5s\nrules:\n  dirs: [{tmp_path}]\n  disable: [queue-aeg]\n")

    with pytest.raises(ConfigErrors) as caught:
        load_all(path, {}, REAL)

    assert [str(fault).replace(f"{tmp_path}/", "") for fault in caught.value.faults] == [
        "conf/tocsin.yaml:1: pol: unknown key; did you mean poll?",
        "conf/tocsin.yaml:4: rules.disable[0]: the rule queue-aeg is unknown; did you mean queue-age?",
        "mine.yaml:1: kv.signal: the signal kv_cash_utilization is unknown; did you mean kv_cache_utilization?",
    ]


# ---- override and disable ----


def test_an_override_lies_over_the_rule(tmp_path: Path) -> None:
    """The acceptance test's own: a quicker cache alarm and a short memory for preemptions."""
    builtin = KV + "- {id: pre, signal: preemptions, fires: '> 0', window: 60m, severity: ticket, required: true}\n"
    rules = """  override:
    kv: {fires: ">= 0.90", for: 20s, keep: 1m, severity: page}
    pre: {window: 2m}
"""
    kv, pre = load(tmp_path, builtin, rules=rules).rules

    assert (kv.factor, kv.for_s, kv.keep_s, kv.severity) == (0.9, 20, 60, "page")
    assert (pre.window_s, pre.required) == (120, True)


def test_an_override_of_one_param_keeps_the_others(tmp_path: Path) -> None:
    """Params are laid over one by one."""
    text = "- {id: a, signal: stuck, fires: '> 1', severity: page, params: {flat: 2m, part: 1%, late: 3}}\n"

    rule = load(tmp_path, text, rules="  override: {a: {params: {flat: 30s}}}\n").rules[0]

    assert rule.params == {"flat": 30, "part": 0.01, "late": 3}


def test_faults_of_an_override_stand_in_tocsin_yaml(tmp_path: Path) -> None:
    """The line to mend is the person's own, not the built-in rule's."""
    rules = """  disable: [kv-cache]
  override:
    kv:
      fires: ">= 85"
      window: 5m
    kvv: {for: 1s}
    pre: {causes: [kv]}
"""
    pre = "- {id: pre, signal: preemptions, fires: '> 0', severity: ticket}\n"
    (tmp_path / "broken").mkdir()
    assert "unknown key; known keys here: fires, for," in faults(tmp_path / "broken", pre, rules=rules)[0]

    assert faults(tmp_path, KV, rules=rules.replace("    pre: {causes: [kv]}\n", "")) == [
        "tocsin.yaml:3: rules.disable[0]: the rule kv-cache is unknown; known rules: kv",
        ("tocsin.yaml:6: rules.override.kv.fires: the signal kv_cache_utilization is a ratio, and 85 is 8500 %; "
        "write 85%"),
        "tocsin.yaml:7: rules.override.kv.window: the signal kv_cache_utilization has no window; remove the key",
        "tocsin.yaml:8: rules.override.kvv: the rule kvv is unknown; did you mean kv?",
    ]


def test_an_override_does_not_turn_a_rule_around(tmp_path: Path) -> None:
    """`< 0.9` was a slip of the finger: every healthy cache was told, and no full one. > beside >= is no such slip."""
    turned = "  override: {kv: {fires: '< 0.9'}}\n"

    assert faults(tmp_path, KV, rules=turned) == [
        ("tocsin.yaml:3: rules.override.kv.fires: kv fires where the number is >=, and this turns it around; "
         "write it with >, or a rule of your own")]
    assert load(tmp_path, KV, rules=turned.replace("<", ">")).rules[0].op == ">"


@pytest.mark.parametrize(("rule", "fires", "said"), [
    ("error-rate", "> 5", "the signal error_rate is a ratio, and 5 is 500 %; write 5%"),
    ("kv-cache-utilization", ">= 1.5", "the signal kv_cache_utilization is a ratio, and 1.5 is 150 %; write 1.5%"),
    ("kv-cache-utilization", "> 100%", "the signal kv_cache_utilization is never over 100 %; write a limit that"),
    ("error-rate", "> 1", "the signal error_rate is never over 100 %; write a limit that it can pass"),
    ("prefix-cache-hit-rate", "< 5", "the signal prefix_cache_hit_rate is a ratio, and 5 is 500 %; write 5%"),
    ("gpu-temperature", "> 185", "the signal gpu_temperature is never over 126; write a limit that it can pass"),
])
def test_a_limit_that_nothing_passes_is_refused(rule: str, fires: str, said: str, tmp_path: Path) -> None:
    """`error-rate: > 5` was 500 %: the rule was there, green, and could never fire. 185 are degrees Fahrenheit."""
    (tmp_path / "tocsin.yaml").write_text(f"rules: {{override: {{{rule}: {{fires: '{fires}'}}}}}}\n")
    with pytest.raises(ConfigErrors, match=re.escape(said)):
        load_all(tmp_path / "tocsin.yaml", {}, REAL)


@pytest.mark.parametrize(("rule", "fires"), [
    ("kv-cache-utilization", ">= 100%"), ("prefix-cache-hit-rate", "< 100%"), ("qps-change", "> 2"),
    ("rank-straggler", "> 1.5"), ("gpu-temperature", "> 120")])
def test_a_limit_that_can_be_passed_is_not(rule: str, fires: str, tmp_path: Path) -> None:
    """Traffic trebles, and a rank may take more than double: those are shares of no whole."""
    (tmp_path / "tocsin.yaml").write_text(f"rules: {{override: {{{rule}: {{fires: '{fires}'}}}}}}\n")
    assert load_all(tmp_path / "tocsin.yaml", {}, REAL)


def test_a_disabled_rule_is_gone_and_still_known(tmp_path: Path) -> None:
    """Others may still name it as what they explain."""
    mine = "- {id: hot, signal: gpu_temperature, fires: '> 80', severity: info, causes: [kv]}\n"

    found = load(tmp_path, KV, mine=mine, rules="  disable: [kv]\n")

    assert [rule.id for rule in found.rules] == ["hot"]
    assert found.disabled == ("kv",)


# ---- severity ----

RULE = Rule("a", "queue_age", ">=", 1.0, "page", number="H1", needs_slo=True)


@pytest.mark.parametrize(
    ("story", "rule", "written", "profile", "want"),
    [
        ("a promise was made", RULE, True, "latency", "page"),
        ("a default wakes nobody", RULE, False, "latency", "ticket"),
        ("heat needs no promise", replace(RULE, number="H9", needs_slo=False), False, "latency", "page"),
        ("a ticket stays one", replace(RULE, severity="ticket"), False, "latency", "ticket"),
        ("an info stays one", replace(RULE, severity="info"), False, "latency", "info"),
        ("a batch engine may queue", RULE, True, "throughput", "info"),
        ("nobody promised, and it is a batch engine", RULE, False, "throughput", "info"),
        ("a batch engine's errors still page", replace(RULE, number="H7"), True, "throughput", "page"),
    ],
)
def test_severity(story: str, rule: Rule, written: bool, profile: str, want: str) -> None:
    """Who is woken depends on what was promised and what the engine is for, never on the moment."""
    assert severity_of(rule, Slo(written=written), profile) == want, story


# ---- the built-in rules ----


def test_the_built_in_rules_load_with_the_defaults(tmp_path: Path) -> None:
    """What we ship starts on an empty configuration, and has nothing to say."""
    (tmp_path / "tocsin.yaml").write_text("")

    found = rules_for(load_config(tmp_path / "tocsin.yaml", {}), REAL)

    assert found.notes == ()
    numbers = {rule.number for rule in found.rules}
    assert {f"H{n}" for n in range(1, 11)} | {f"M{n}" for n in (1, 2, 3, 4, 5, 6, 8)} | {"L1", "L2", "L3"} <= numbers
    assert all(rule.action.endswith(".") for rule in found.rules)


def test_the_contract_s_own_example_loads() -> None:
    """spec/config.md's overrides fit the built-in rules."""
    config = load_config(Path(__file__).parent / "data" / "config" / "contract.good.yaml", {})

    found = {rule.id: rule for rule in rules_for(config, REAL).rules}

    assert "gpu-utilization" not in found
    kv = found["kv-cache-utilization"]
    assert (kv.op, kv.factor, kv.for_s, kv.severity) == (">=", 0.9, 120, "page")


@pytest.mark.parametrize(
    ("rule_id", "want"),
    [
        # id: (op, factor, slo, for, keep, severity, window, min_count, min_bad) from the specification's tables
        ("queue-age", (">=", 0.5, "ttft_p99", 10, 30, "page", None, None, None)),
        ("kv-cache-utilization", (">=", 0.85, None, 60, 120, "ticket", None, None, None)),
        ("preemptions", (">", 0, None, 0, 0, "ticket", 3600, None, None)),
        ("preemption-storm", (">", 60, None, 0, 0, "page", 3600, None, None)),
        ("ttft-p99", (">", 0.01, None, 60, 120, "page", 300, 100, 5)),
        ("itl-p99", (">", 0.01, None, 60, 120, "page", 300, 300, 30)),
        ("rank-straggler", (">", 0.15, None, 120, 120, "page", 300, None, None)),
        ("gpu-temperature", (">", 85, None, 30, 120, "ticket", None, None, None)),
        ("gpu-thermal-limit", ("<=", 0, None, 30, 120, "page", None, None, None)),
        ("prefix-cache-hit-rate", ("<", 0.5, None, 600, 600, "ticket", 600, 10_000, None)),
        ("qps-change", (">", 0.5, None, 120, 300, "ticket", 60, 100, None)),
        ("error-rate", (">", 0.01, None, 60, 120, "ticket", 300, None, 5)),
        ("error-rate-high", (">", 0.1, None, 60, 120, "page", 300, None, 10)),
        ("spec-decode-acceptance", ("<", 0.5, None, 600, 600, "ticket", 600, 1000, None)),
        ("blind", (">", 0, None, 300, 60, "ticket", None, None, None)),
    ],
)
def test_built_in_numbers(rule_id: str, want: tuple[Any, ...]) -> None:
    """The numbers that wake people are the specification's, one by one."""
    rule = {rule.id: rule for rule in load_rules(RulesConfig(), Slo(), REAL).rules}[rule_id]

    found = (rule.op, rule.factor, rule.slo, rule.for_s, rule.keep_s, rule.severity)
    assert (*found, rule.window_s, rule.min_count, rule.min_bad) == want


def test_built_in_burn_factors() -> None:
    """With 30 days: 14.4 and 6 page, 3 and 1 are a ticket."""
    rules = {rule.id: rule for rule in load_rules(RulesConfig(), Slo(), REAL).rules}

    factors = {id_: [pair["factor"] for pair in rules[id_].params["pairs"]] for id_ in rules if "error-burn" in id_}
    assert factors["error-burn-fast"] == [pytest.approx(14.4), pytest.approx(6)]
    assert factors["error-burn-slow"] == [pytest.approx(3), pytest.approx(1)]
    assert rules["error-burn-fast"].needs_slo
