"""Every rule has a page that helps at 3 a.m.: what it means, how to confirm it, what to do, what it is not.

Every fault has one too: what its drill does, what must hold, and what to do when it left something behind.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperGroup

from agent.__main__ import app
from agent.config import load_all
from agent.signals import CATALOGUE
from drills.config import drills_of
from drills.faults.table import FAULTS

ROOT = Path(__file__).resolve().parents[1]
RUNBOOKS = {path.stem: path.read_text() for path in sorted((ROOT / "runbooks").glob("*.md"))}
CHECKLISTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "runbooks" / "checklists").glob("*.md"))]
RULES = {
    rule["id"]: rule for path in sorted((ROOT / "rules").rglob("*.yaml")) for rule in yaml.safe_load(path.read_text())
}
DRILLS = {f"drill-{fault}" for fault in FAULTS}


def test_every_rule_has_its_runbook_and_every_runbook_its_rule() -> None:
    """The page at 3 a.m. linked to a runbook that nobody had written."""
    assert sorted({*RULES, *DRILLS}) == sorted(RUNBOOKS)


FORM = ["## Meaning", "## Confirm", "## Mitigate now", "## Fix", "## If it returns", "## Do not"]


@pytest.mark.parametrize("name", sorted({*RULES, *DRILLS}))
def test_every_runbook_has_the_same_form(name: str) -> None:
    """Whoever has read one at night finds his way in all others: the same parts, in the same order, none empty."""
    text = RUNBOOKS[name]
    lines = text.splitlines()
    assert lines[0].startswith(f"# {name}: ")
    assert [line for line in lines if line.startswith("## ")] == FORM
    parts = dict(zip(FORM, re.split(r"^## .*$", text, flags=re.MULTILINE)[1:], strict=True))
    assert all(part.strip() for part in parts.values())
    assert re.search(r"^    \S", parts["## Confirm"], flags=re.MULTILINE), "a command to paste"
    assert re.search(r"^(1\. |    \S)", parts["## Mitigate now"], flags=re.MULTILINE), "steps or commands"
    assert all(line.startswith(("- Do not ", "- Never ", "  ")) for line in parts["## Do not"].strip().splitlines())
    assert 30 <= len(lines) <= 62


@pytest.mark.parametrize("drill", sorted(DRILLS))
def test_runbook_of_a_drill_says_what_it_announces_and_how_to_end_it(drill: str) -> None:
    """The drill's page told how it works, and nothing of how to end it."""
    line = RUNBOOKS[drill].splitlines()[2]
    announced = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", line.partition(" · ")[0])
    assert line.startswith("announces ")
    assert set(announced) <= set(RULES)
    assert "What must hold:" in RUNBOOKS[drill]
    assert "    sudo tocsin drill heal " in RUNBOOKS[drill].partition("## Mitigate now")[2]


@pytest.mark.parametrize("rule_id", sorted(RULES))
def test_runbook_of_a_rule_says_what_it_is_not_and_when_it_clears(rule_id: str) -> None:
    """Half of a night's work is to find out that it is something else."""
    meaning = RUNBOOKS[rule_id].partition("## Confirm")[0]
    assert "\nIt is not:\n\n- " in meaning
    assert "\nIt clears: " in meaning


@pytest.mark.parametrize("rule_id", sorted(RULES))
def test_runbook_says_what_the_rule_is(rule_id: str) -> None:
    """The runbook said ticket, the rule paged: number and severity in its first lines are the rule's own."""
    rule = RULES[rule_id]
    number, severity = RUNBOOKS[rule_id].splitlines()[2].split(" · ")[:2]
    assert (number, severity) == (rule["number"], rule["severity"])


@pytest.mark.parametrize("rule_id", RUNBOOKS)
def test_runbook_names_only_runbooks_that_exist(rule_id: str) -> None:
    """'Follow kv-cache-utilisation': there was no such page."""
    text = re.sub(r"\s+", " ", RUNBOOKS[rule_id])
    followed = re.findall(r"(?:[Ff]ollow|go to|see|See) ([a-z0-9]+(?:-[a-z0-9]+)+)", text)
    assert [name for name in followed if name not in RUNBOOKS] == []


@pytest.mark.parametrize("page", [*RUNBOOKS, "README.md", *CHECKLISTS])
def test_every_command_shown_exists(page: str) -> None:
    """Copied at 3 a.m. from the runbook: `No such command`."""
    text = RUNBOOKS.get(page) or (ROOT / page).read_text()
    shown = re.findall(r"(?:^ +(?:\$ )?(?:\S*/)?|`)tocsin ([a-z]+)((?: [a-z][a-z-]*)?)([^\n`#]*)", text,
                       flags=re.MULTILINE)
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for name, sub, rest in shown:
        command = root.commands.get(name)
        assert command is not None, f"tocsin {name}"
        if isinstance(command, TyperGroup) and (sub or not command.invoke_without_command):  # `tocsin alerts`
            command = command.commands.get(sub.strip())
            assert command is not None, f"tocsin {name}{sub}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"--[a-z0-9-]+", rest)) <= known | {"--config"}, f"tocsin {name}{sub}{rest}"


def test_the_readme_s_configuration_is_one(tmp_path: Path) -> None:
    """Copied from the README, and refused: the example had a key that was renamed long ago."""
    blocks = re.findall(r"\n\n((?:    .*\n)+)", (ROOT / "README.md").read_text())
    shown = [textwrap.dedent(block) for block in blocks if block.startswith(("    engines:", "    drills:"))]
    file = tmp_path / "tocsin.yaml"
    file.write_text("".join(shown))

    config, rules = load_all(file, {}, CATALOGUE)

    assert [drill.fault for drill in drills_of(config, rules.rules)] == ["process-kill", "packet-loss"]
