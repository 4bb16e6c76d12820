"""`tocsin drill …`, `tocsin report`, `tocsin drilld`. What a command needs is imported when it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from agent.client import AgentError
    from agent.config import Config
    from agent.progress import Progress
    from drills.model import Drill, Left, Plan

ORPHANED, REFUSED = 7, 6
CONFLICT = 409  # drilld's no
ANSWERED_WITHIN_S = 30.0  # it may just write a report
HEALED_WITHIN_S = 300.0  # it ends a run in good order before
DRILLD_BACK_WITHIN_S = 60.0
LOOK_EVERY_S = 0.5  # at a run under way
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


def log_to_stderr() -> None:
    """What is done here is logged beside the answer, which may be JSON."""
    import structlog

    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


def show_json(told: object) -> None:
    """JSON to stdout."""
    import msgspec

    write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())


@app.command("list")
def list_(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the drills: fault, target, schedule, when last and how."""
    _, settings_, drills = settings(context, config)
    last = {row["drill"]: row for row in past_runs(settings_)}
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
    from drills import runner

    if dry_run:
        plan(context, name, config, as_json)
    path, settings_, drills = settings(context, config)
    drill = named(drills, name)
    if foreground:
        told = told_here(run_here(path, settings_, drill, accept_unknown_budget))
    else:
        asked = {"name": name, "accept_unknown_budget": accept_unknown_budget}
        told = wait_for(settings_, ask_drilld(settings_, "/run", asked)["run"], drill)
    row = told["row"]
    if row is None:
        fail(f"{told['run']} left no record; `tocsin drill heal` looks after it", ORPHANED)
    show_verdict(row, told["rows"], as_json)
    raise typer.Exit(runner.EXIT[row["verdict"]])


def run_here(path: Path | None, settings_: Config, drill: Drill, accept_unknown_budget: bool) -> Path:
    """Run a drill in this process."""
    import getpass
    import time
    import traceback

    from agent.progress import Progress
    from drills import daemon, runner, schedule

    log_to_stderr()
    run = schedule.run_id(drill.name, time.time(), settings_.node or "")
    try:
        folder = runner.create(daemon.root_of(settings_), drill, run, started_by=f"{getpass.getuser()}, by hand",
                               config_path=path, node=settings_.node)
        with Progress() as progress, following(folder, Course(drill, run, progress)):
            runner.execute(folder, accept_unknown_budget=accept_unknown_budget)
    except FileExistsError:
        fail(f"there is a run {run} already; start it a second later")
    except OSError as error:
        fail(f"{error.filename or daemon.root_of(settings_)}: {error.strerror}; drills need root, or their own user")
    except Exception:  # of ours: its record says ABORTED or ORPHANED, and what it left is looked for at once
        traceback.print_exc()
        daemon.heal_all(settings_)
    return folder


class Course:
    """The states of a run as they come, each a line that stays, and how long it can still take as its owner planned."""

    def __init__(self, drill: Drill, run: str, progress: Progress) -> None:
        self._drill, self._run, self._progress = drill, run, progress
        self._seen: str | None = None

    def see(self, state: str | None) -> None:
        """It is in this state."""
        if state is None or state == self._seen:
            return
        self._seen = state
        self._progress(f"{self._run}: {state}", lasting=True)
        self._progress(state, left_s(self._drill, state) or None, at_most=True)


def left_s(drill: Drill, state: str) -> float:
    """The longest that a run can still take when it has just come into a state: what of its planned spans is left."""
    from drills.model import State

    recovery_s = max(drill.recovery_s, drill.resolve_within_s, drill.holds.restart_within_s or 0.0)
    if state in (State.REVERTING, State.REVERTED):
        return recovery_s
    if state in (State.ARMED, State.INJECTING, State.PROVEN, State.OBSERVING):
        return drill.for_s + recovery_s
    if state in (State.PLANNED, State.LOCKED, State.PREFLIGHT, State.BASELINE):
        return drill.baseline_s + drill.for_s + recovery_s
    return 0.0


@contextmanager
def following(folder: Path, course: Course) -> Iterator[None]:
    """While a run goes on in this process, tell its states as its record has them."""
    import threading

    from drills import record

    over = threading.Event()

    def follow() -> None:
        while not over.wait(LOOK_EVERY_S):
            course.see((record.load(folder) or {}).get("state"))

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        course.see((record.load(folder) or {}).get("state"))


def told_here(folder: Path) -> Mapping[str, Any]:
    """How a run in a folder of ours ended, as drilld would tell it."""
    from drills import history, record

    found = record.load(folder)
    if found is None:
        return {"run": folder.name, "row": None, "rows": []}
    return {"run": folder.name, "row": history.row_of(found), "rows": found["rows"]}


def wait_for(settings_: Config, run: str, drill: Drill) -> Mapping[str, Any]:
    """Wait for a run's end, as drilld tells it, with its states on stderr as they come; Ctrl-C leaves it running.

    A drilld that is started anew is waited for.
    """
    from agent.progress import Progress, in_order

    try:
        with in_order(), Progress() as progress:
            return _waited(settings_, run, Course(drill, run, progress))
    except KeyboardInterrupt:
        fail(f"{run} goes on; `tocsin drill abort` ends it", 130)


def _waited(settings_: Config, run: str, course: Course) -> Mapping[str, Any]:
    import time

    from agent import client
    from drills import daemon

    socket, folder = daemon.socket_of(settings_), daemon.root_of(settings_) / "runs" / run
    heard_at = time.monotonic()
    while True:
        try:
            told: dict[str, Any] = client.ask(socket, f"/runs/{run}")
        except (client.NotRunning, client.AgentError) as error:
            here = told_here(folder)  # which root may read
            if here["row"] is not None and here["row"]["ended"] is not None:
                return here
            if getattr(error, "status", None) is not None or time.monotonic() - heard_at > DRILLD_BACK_WITHIN_S:
                fail(f"drilld on {socket} tells no more of {run}; `tocsin drill history` tells how it ends")
        else:
            heard_at = time.monotonic()
            course.see(told["state"])
            if told["over"]:
                return told
        time.sleep(LOOK_EVERY_S)


def show_verdict(row: Mapping[str, Any], judged: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """How a run ended."""
    if as_json:
        show_json(row)
        return
    write(f"{row['verdict']}: {row['why']}")
    for one in judged:
        write(f"  {one['verdict']:12} {one['name']}: {one['got']} (asked: {one['asked']})")
    write(f"Report: tocsin report {row['run']}")


@app.command()
def abort(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """End the run under way, in good order."""
    _, settings_, _ = settings(context, config)
    told = ask_drilld(settings_, "/abort", {})
    if as_json:
        show_json({"run": told["run"]})
    else:
        write(f"{told['run']} ends" if told["run"] else "no run is under way")


@app.command()
def heal(
    context: typer.Context, config: ConfigFile = None, as_json: AsJson = False,
    release: Annotated[bool, typer.Option("--release", help="Let the lock go although something is left.")] = False,
) -> None:
    """Undo whatever any ledger or tag says, without drilld too; a live run is aborted first. Exit 0 clean, 7 not."""
    from drills.model import Left

    _, settings_, _ = settings(context, config)
    is_root = os.geteuid() == 0
    told = heal_there(settings_, release and not is_root)
    if told is None or (is_root and (told["left"] or release)):  # root may do what drilld's own user may not
        told = heal_here(settings_, release)
    left = [Left(one["what"], one["command"]) for one in told["left"]]
    if as_json:
        show_json({"left": left, "released": told["released"]})
    else:
        write(heal_text(left, told["released"]))
    raise typer.Exit(ORPHANED if left else 0)


def heal_there(settings_: Config, release: bool) -> Mapping[str, Any] | None:
    """Have drilld heal, which aborts its own run; None where none answers, or not us: then it is done here."""
    from agent import client
    from drills import daemon

    socket = daemon.socket_of(settings_)
    try:
        told: dict[str, Any] = client.ask(socket, "/heal", "POST", {"release": release}, HEALED_WITHIN_S)
    except client.NotRunning:
        return None
    except client.AgentError as error:
        if error.status == CONFLICT:
            fail(said(error), REFUSED)
        sys.stderr.write(f"tocsin drill: drilld does not heal ({said(error)}), so it is done here\n")
        return None
    return told


def heal_here(settings_: Config, release: bool) -> Mapping[str, Any]:
    """Heal in this process."""
    import getpass

    from drills import daemon, lock
    from drills.model import Refused

    log_to_stderr()
    root = daemon.root_of(settings_)
    try:
        left = daemon.heal_all(settings_, f"{getpass.getuser()}, by heal")
        released = lock.release(root) if release else []
    except Refused as no:
        fail(str(no), REFUSED)
    except OSError as error:
        fail(unreadable(root, error))
    return {"left": [{"what": one.what, "command": one.command} for one in left], "released": released}


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

    _, settings_, _ = settings(context, config)
    rows = past_runs(settings_)
    if as_json:
        show_json(rows)
    elif not rows:
        write("No drill has been run yet.")
    for row in rows if not as_json else ():
        at = "unknown" if row["planned"] is None else f"{datetime.fromtimestamp(row['planned'], UTC):%Y-%m-%d %H:%MZ}"
        took = ", ".join(f"{k.removesuffix('_s')} {v:.1f} s" for k, v in row["times"].items() if v is not None)
        write(f"{at:17}  {row['verdict']:12}  {row['run']}  {took or row['why']}")


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
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{output}: {error.strerror}; name a file that can be written, or leave -o out")
    write(f"{output}: written; `systemctl daemon-reload && systemctl restart tocsin-drilld`")


def ask_drilld(settings_: Config, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """A POST to drilld's socket, or a GET where there is nothing to send."""
    from agent import client
    from drills import daemon

    socket = daemon.socket_of(settings_)
    try:
        return client.ask(socket, path, "GET" if body is None else "POST", body, ANSWERED_WITHIN_S)
    except client.NotRunning:
        fail(f"no drilld answers on {socket}; start it (`systemctl start tocsin-drilld`), or use --foreground")
    except client.NotPermitted:
        fail(f"{socket}: permission denied; drills are root's, and the drill_group's: use sudo")
    except client.AgentError as error:
        fail(said(error), REFUSED if error.status == CONFLICT else 2)


def said(error: AgentError) -> str:
    """What drilld said was wrong."""
    text = str(error)
    return str(json.loads(text[text.index("{"):])["error"]) if "{" in text else text


def unreadable(root: Path, error: OSError) -> str:
    """Why the drills' state cannot be used, and what to do."""
    return f"{error.filename or root}: {error.strerror}; {root} is drilld's own: use sudo"


def past_runs(settings_: Config) -> list[dict[str, Any]]:
    """One row a run, oldest first: from the disk, or as drilld tells those who may not read there."""
    from drills import daemon, history

    try:
        return history.runs(daemon.root_of(settings_))
    except PermissionError as error:
        told: list[dict[str, Any]] = from_drilld(settings_, "/runs", error)
        return told
    except OSError as error:
        fail(unreadable(daemon.root_of(settings_), error))


def runs_readable(settings_: Config) -> list[dict[str, Any]] | None:
    """One row a run, oldest first; None where this user may not read them, or there is no folder of drilld's."""
    from drills import daemon, history

    root = daemon.root_of(settings_)
    try:
        return history.runs(root) if root.is_dir() or settings_.drills else None
    except OSError:
        return None


def review(settings_: Config, since: float) -> dict[str, Any]:
    """What `tocsin review` says of the drills since a time (unix seconds): held, missed, verdicts, open actions."""
    from drills import daemon, history

    try:
        return history.reviewed(daemon.root_of(settings_), since)
    except OSError as error:
        why = unreadable(daemon.root_of(settings_), error)
    return {"held": None, "missed": None, "verdicts": {}, "actions": [], "why": why}


def from_drilld(settings_: Config, path: str, denied: OSError) -> Any:
    """What drilld tells; where it does not, why the disk could not be read."""
    from agent import client
    from drills import daemon

    try:
        return client.ask(daemon.socket_of(settings_), path, answer_s=ANSWERED_WITHIN_S)
    except (client.NotRunning, client.AgentError):
        fail(unreadable(daemon.root_of(settings_), denied))


def report(context: typer.Context, run: str, config: Path | None, format_: str) -> str:
    """A drill's postmortem (`run`: a run, or a drill: its last one)."""
    from drills import daemon, record
    from drills import report as reports

    _, settings_, _ = settings(context, config)
    if format_ not in reports.FILES:
        fail(f"--format {format_}: there are {', '.join(reports.FILES)}")
    known = [row["run"] for row in past_runs(settings_) if run in (row["run"], row["drill"])]
    if not known:
        fail(f"{run}: no such run; `tocsin drill history` lists them")
    folder = daemon.root_of(settings_) / "runs" / known[-1]
    found = record.load(folder)
    return str(ask_drilld(settings_, f"/runs/{known[-1]}/report?format={format_}")["text"]) if found is None \
        else reports.render(found, folder, format_)


def drilld(context: typer.Context, config: ConfigFile = None) -> None:
    """Run the drill daemon in the foreground."""
    path = config or context.find_root().obj
    os.execv(  # noqa: S606  (no shell is what is wanted)
        sys.executable, [sys.executable, "-m", "drills.daemon", *(["--config", str(path)] if path else [])])
