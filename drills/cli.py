"""`tocsin drill …`, `tocsin report`, `tocsin drilld`. What a command needs is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from agent.config import Config
    from drills.model import Drill, Left, Plan

ORPHANED, REFUSED = 7, 6
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]
app = typer.Typer(help="Failure drills: plan, run, abort, heal.", no_args_is_help=True, rich_markup_mode=None)


def fail(text: str, code: int = 2) -> NoReturn:
    """A sentence for stderr that says what to do next, and the exit code."""
    sys.stderr.write(f"tocsin drill: {text}\n")
    raise typer.Exit(code)


def settings(context: typer.Context, path: Path | None) -> tuple[Path | None, Config, list[Drill]]:
    """The configuration and its drills; faults end the command."""
    from agent.config import load_all
    from agent.signals import CATALOGUE
    from agent.strict import ConfigErrors
    from drills.config import drills_of

    path = path or context.find_root().obj
    try:
        config, rules = load_all(path, os.environ, CATALOGUE)
        return path, config, drills_of(config, rules.rules)
    except ConfigErrors as errors:
        sys.stderr.write(f"{errors}\n")
        raise typer.Exit(2) from errors


def named(drills: list[Drill], name: str) -> Drill:
    """A drill by its name."""
    found = next((drill for drill in drills if drill.name == name), None)
    if found is None:
        known = ", ".join(drill.name for drill in drills) or "none; write one under `drills:`"
        fail(f"{name}: no such drill; there are: {known}")
    return found


def write(text: str) -> None:
    """Text to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def show_json(told: object) -> None:
    """JSON to stdout."""
    import msgspec

    write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())


@app.command("list")
def list_(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the drills: fault, target, schedule, when last and how."""
    from drills import daemon, history

    _, settings_, drills = settings(context, config)
    last = {row["drill"]: row for row in history.runs(daemon.root_of(settings_))}
    rows = [{"drill": d.name, "fault": d.fault, "target": {k: v for k, v in d.target.items() if k != "reserved"},
             "cron": d.schedule.cron if d.schedule else None, "zone": d.schedule.zone if d.schedule else None,
             "enabled": d.enabled, "last": last.get(d.name, {}).get("verdict"),
             "last_ended": last.get(d.name, {}).get("ended")} for d in drills]
    if as_json:
        show_json(rows)
    elif not rows:
        write("No drill is configured. The README's section \"Drills\" has an example.")
    for row in rows if not as_json else ():
        when = f"{row['cron']} {row['zone']}" if row["cron"] else "by hand"
        write(f"{row['drill']:30} {row['fault']:18} {when:24} last: {row['last'] or 'never'}")


@app.command()
def plan(context: typer.Context, name: str, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Show targets, guards, exact commands and undo of a drill, and touch nothing. Exit 0, or 6 where it is refused."""
    import time
    from dataclasses import replace

    from drills import daemon, guards, in_pod, schedule
    from drills.faults.table import FAULTS
    from drills.model import Refused
    from drills.targets import reserved_ports

    _, settings_, drills = settings(context, config)
    drill = named(drills, name)
    drill = replace(drill, target={**drill.target, "reserved": reserved_ports(settings_)})
    run = schedule.run_id(name, time.time(), settings_.node or "")
    try:
        drill = in_pod.resolve(drill, run)
        planned = in_pod.counted(FAULTS[drill.fault].plan(drill, run), drill)
    except Refused as no:
        fail(f"{name} is refused: {no}", REFUSED)
    facts = guards.collect(settings_, drill, planned, root=daemon.root_of(settings_), run=run, now=time.time(),
                           accept_unknown_budget=False, planning=True)
    checks = guards.before(drill, planned, facts)
    if as_json:
        show_json({"plan": planned, "guards": checks})
    else:
        write(plan_text(drill, planned, [(c.name, c.ok, c.why) for c in checks]))
    raise typer.Exit(0 if all(check.ok for check in checks) else REFUSED)


def plan_text(drill: Drill, planned: Plan, checks: list[tuple[str, bool, str]]) -> str:
    """A plan for people."""
    lines = [f"{drill.name}: {drill.fault}, for {drill.for_s:g} s after a baseline of {drill.baseline_s:g} s", "",
             "Targets", *(f"  {t}" for t in planned.targets), "",
             "Would do", *(f"  {c.text}{f'   # {c.why}' if c.why else ''}" for c in planned.commands), "",
             "Undo", *([f"  {c.text}{f'   # {c.why}' if c.why else ''}" for c in planned.undo] or
                       ["  ends with the process that holds it"]), ""]
    if planned.exemptions:
        lines += ["Never touched", *(f"  {e}" for e in planned.exemptions), ""]
    if planned.notes:
        lines += ["Notes", *(f"  {n}" for n in planned.notes), ""]
    lines += [f"Announces  {', '.join(drill.expects or planned.expects) or 'nothing'}", "", "Guards",
              *(f"  {'yes' if ok else 'NO '}  {name}: {why}" for name, ok, why in checks)]
    return "\n".join(lines)


@app.command("run")
def run_(
    context: typer.Context, name: str, config: ConfigFile = None, as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan, and touch nothing.")] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Without drilld, in this process.")] = False,
    accept_unknown_budget: Annotated[
        bool, typer.Option("--accept-unknown-budget", help="Run although the error budget is not known yet.")] = False,
) -> None:
    """Run a drill now and wait for its verdict.

    Exit 0 PASS, 1 FAIL, 4 INCONCLUSIVE or INVALID, 5 ABORTED, 6 SKIPPED or DEFERRED, 7 ORPHANED.
    """
    from drills import daemon, record, runner

    if dry_run:
        plan(context, name, config, as_json)
    path, settings_, drills = settings(context, config)
    drill = named(drills, name)
    if foreground:
        folder = run_here(path, settings_, drill, accept_unknown_budget)
    else:
        asked = {"name": name, "accept_unknown_budget": accept_unknown_budget}
        told = ask_drilld(settings_, "/run", asked)
        folder = daemon.root_of(settings_) / "runs" / told["run"]
        wait_for(folder)
    found = record.load(folder)
    if found is None:
        fail(f"{folder.name} left no record; `tocsin drill heal` looks after it", ORPHANED)
    show_verdict(found, as_json)
    raise typer.Exit(runner.EXIT[found["verdict"]])


def run_here(path: Path | None, settings_: Config, drill: Drill, accept_unknown_budget: bool) -> Path:
    """Run a drill in this process."""
    import getpass
    import time
    import traceback

    from drills import daemon, runner, schedule

    run = schedule.run_id(drill.name, time.time(), settings_.node or "")
    try:
        folder = runner.create(daemon.root_of(settings_), drill, run, started_by=f"{getpass.getuser()}, by hand",
                               config_path=path)
        runner.execute(folder, accept_unknown_budget=accept_unknown_budget)
    except FileExistsError:
        fail(f"there is a run {run} already; start it a second later")
    except OSError as error:
        fail(f"{error.filename or daemon.root_of(settings_)}: {error.strerror}; drills need root, or their own user")
    except Exception:  # of ours: its record says ABORTED or ORPHANED, and what it left is looked for at once
        traceback.print_exc()
        daemon.heal_all(settings_)
    return folder


def wait_for(folder: Path) -> None:
    """Wait for a run's end, with its states on stderr as they come; Ctrl-C leaves it running."""
    import time

    from drills import record

    seen = None
    try:
        while True:
            found = record.load(folder)
            if found is not None and found["state"] != seen:
                seen = found["state"]
                sys.stderr.write(f"{folder.name}: {seen}\n")
            if found is not None and found["ended_at"] is not None:
                return
            time.sleep(0.5)
    except KeyboardInterrupt:
        fail(f"{folder.name} goes on; `tocsin drill abort` ends it", 130)


def show_verdict(found: Mapping[str, Any], as_json: bool) -> None:
    """How a run ended."""
    from drills import history

    if as_json:
        show_json(history.row_of(dict(found)))
        return
    write(f"{found['verdict']}: {found['why']}")
    for row in found["rows"]:
        write(f"  {row['verdict']:12} {row['name']}: {row['got']} (asked: {row['asked']})")
    write(f"Report: tocsin report {found['run']}")


@app.command()
def abort(context: typer.Context, config: ConfigFile = None) -> None:
    """End the run under way, in good order."""
    _, settings_, _ = settings(context, config)
    told = ask_drilld(settings_, "/abort", {})
    write(f"{told['run']} ends" if told["run"] else "no run is under way")


@app.command()
def heal(
    context: typer.Context, config: ConfigFile = None, as_json: AsJson = False,
    release: Annotated[bool, typer.Option("--release", help="Let the lock go although something is left.")] = False,
) -> None:
    """Undo whatever any ledger or tag says, offline; a live run is ended first. Exit 0 clean, 7 not."""
    from drills import daemon, lock
    from drills.model import Refused

    _, settings_, _ = settings(context, config)
    root = daemon.root_of(settings_)
    left = daemon.heal_all(settings_)
    try:
        released = lock.release(root) if release else []
    except Refused as no:
        fail(str(no), REFUSED)
    if as_json:
        show_json({"left": left, "released": released})
    else:
        write(heal_text(left, released))
    raise typer.Exit(ORPHANED if left else 0)


def heal_text(left: list[Left], released: list[str]) -> str:
    """What heal found."""
    lines = ["Clean: nothing of a drill is left."] if not left else ["Still left; run these:"]
    lines += [f"  {one.command}   # {one.what}" for one in left]
    lines += [f"Released: {run}" for run in released]
    return "\n".join(lines)


@app.command("history")
def history_(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List past runs: when, how they ended, and how long it took to detect, deliver, mitigate, recover."""
    from datetime import UTC, datetime

    from drills import daemon, history

    _, settings_, _ = settings(context, config)
    rows = history.runs(daemon.root_of(settings_))
    if as_json:
        show_json(rows)
    elif not rows:
        write("No drill has been run yet.")
    for row in rows if not as_json else ():
        at = datetime.fromtimestamp(row["planned"], UTC)
        took = ", ".join(f"{k.removesuffix('_s')} {v:.1f} s" for k, v in row["times"].items() if v is not None)
        write(f"{at:%Y-%m-%d %H:%MZ}  {row['verdict']:12}  {row['run']}  {took or row['why']}")


@app.command()
def unit(
    context: typer.Context, config: ConfigFile = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write there [default: print].")] = None,
) -> None:
    """Write the systemd drop-in that the enabled faults need: their capabilities, and no more."""
    from drills.unit import drop_in

    _, settings_, drills = settings(context, config)
    text = drop_in(drills, settings_.drill_group)
    if output is None:
        write(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    write(f"{output}: written; `systemctl daemon-reload && systemctl restart tocsin-drilld`")


def ask_drilld(settings_: Config, path: str, body: Mapping[str, Any]) -> Any:
    """A POST to drilld's socket."""
    from agent import client
    from drills import daemon

    socket = daemon.socket_of(settings_)
    try:
        return client.ask(socket, path, "POST", body)
    except client.NotRunning:
        fail(f"no drilld answers on {socket}; start it (`systemctl start tocsin-drilld`), or use --foreground")
    except client.NotPermitted:
        fail(f"{socket}: permission denied; drills are root's, and the drill_group's: use sudo")
    except client.AgentError as error:
        text = str(error)
        fail(json.loads(text[text.index("{"):])["error"] if "{" in text else text)


def report(
    context: typer.Context, run: str, config: ConfigFile = None,
    format_: Annotated[str, typer.Option("--format", help="md, html, json or junit.")] = "md",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write there [default: print].")] = None,
) -> None:
    """Print a drill's postmortem (RUN: a run, or a drill)."""
    from drills import daemon, history, record
    from drills import report as reports

    _, settings_, _ = settings(context, config)
    root = daemon.root_of(settings_)
    known = [row["run"] for row in history.runs(root) if run in (row["run"], row["drill"])]
    found = record.load(root / "runs" / known[-1]) if known else None
    if found is None:
        fail(f"{run}: no such run; `tocsin drill history` lists them")
    if format_ not in reports.FILES:
        fail(f"--format {format_}: there are {', '.join(reports.FILES)}")
    text = reports.render(found, root / "runs" / known[-1], format_)
    if output is None:
        write(text)
    else:
        output.write_text(text)


def drilld(context: typer.Context, config: ConfigFile = None) -> None:
    """Run the drill daemon in the foreground."""
    path = config or context.find_root().obj
    os.execv(  # noqa: S606  (no shell is what is wanted)
        sys.executable, [sys.executable, "-m", "drills.daemon", *(["--config", str(path)] if path else [])])
