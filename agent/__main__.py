"""The command line. What a command needs is imported when it runs, so that `tocsin check` answers at once.

The daemon never imports this: `tocsin run` replaces this process by it.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agent import advise_commands
from agent.threads import NoThread
from drills import cli as drill_commands

if TYPE_CHECKING:
    from agent.config import Config
    from agent.model import Rule
    from agent.show import Report
    from agent.strict import Fault

EXIT_OF = {"healthy": 0, "ticket": 1, "page": 2, "unknown": 3}
USAGE, UNKNOWN, INTERRUPTED = 2, 3, 130
NOT_FOUND = 404
BAD_REQUEST = 400  # of HTTP

ROOT = Path(__file__).resolve().parents[1]

app = typer.Typer(
    name="tocsin",
    help="Watch a GPU node that serves LLMs, and page one person when it breaks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
notify_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
alerts_app = typer.Typer(rich_markup_mode=None)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
rules_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(alerts_app, name="alerts", help="List current and past alerts; `alerts stats`: the noise.")
app.add_typer(config_app, name="config", help="`config check`: every fault in configuration and rules.")
app.add_typer(notify_app, name="notify", help="`notify test`: a marked alert through every channel.")
app.add_typer(rules_app, name="rules", help="`rules list|export`: what fires, how loud, what to do.")
app.add_typer(advise_commands.app, name="advise", help="`advise CHECKLIST`: the decision checklists as calculators.")
app.add_typer(drill_commands.app, name="drill", help="`drill list|plan|run|abort|heal|history|unit`.")

CONFIG_HELP = "Configuration [default: /etc/tocsin/tocsin.yaml if it is there, else built-in defaults]."
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=CONFIG_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


class Failure(Exception):  # noqa: N818  (it ends the command)
    """A sentence for stderr that says what to do next, and the exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


# ---- what commands share ----


@app.callback()
def remember_config(context: typer.Context, config: ConfigFile = None) -> None:
    """Watch a GPU node that serves LLMs, and page one person when it breaks."""
    context.obj = config


def chosen(context: typer.Context, config: Path | None) -> Path | None:
    """The file of --config, after the command or before it."""
    return config or context.find_root().obj


def load(path: Path | None) -> Config:
    """The configuration; all its faults as one Failure."""
    from agent.config import ConfigErrors, load_config

    try:
        return load_config(path, os.environ)
    except ConfigErrors as errors:
        raise Failure(f"{errors}\n{_count(errors.faults)}; `tocsin config check` looks again") from errors


def _count(faults: Sequence[object]) -> str:
    return f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"


def seconds(option: str, text: str, *, least_s: float = 0.0) -> float:
    """A duration from the command line."""
    from agent.strict import Unfit, duration_s

    try:
        found = duration_s(text)
    except Unfit as fault:
        raise Failure(f"{option} {text}: {fault}") from fault
    if found < least_s:
        raise Failure(f"{option} {text} is too short; the least is {least_s:g}s")
    return found


def write(text: str) -> None:
    """Text to stdout. A reader that has gone (`| head`) is no fault, and does not change the exit code."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would be written, and fail, once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def put(text: str, file: Path | None) -> None:
    """Text to a file, or to stdout where none is named."""
    if file is None:
        write(text)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise Failure(f"tocsin: {file}: {fault.strerror}; name a file that can be written, or leave -o out") from fault


def emit(answer: object, as_json: bool, report: Callable[[], Report]) -> None:
    """An answer as JSON, or as a report for people."""
    if as_json:
        import msgspec

        write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")  # NaN becomes null
        return
    from agent.show import plain, show

    if sys.stdout.isatty():
        try:
            show(report(), sys.stdout)
        except BrokenPipeError:
            write("")
    else:
        write(plain(report()))


def ask_agent(settings: Config, url: str, method: str = "GET", body: object = None) -> Any:
    """The running agent's answer. Raises agent.client.NotRunning; what else goes wrong is a Failure, unknown."""
    from agent.client import AgentError, NotPermitted, ask

    try:
        return ask(settings.socket, url, method, body)
    except NotPermitted:
        raise
    except AgentError as error:
        raise Failure(f"tocsin: {error}", USAGE if error.status == BAD_REQUEST else UNKNOWN) from error


def need_agent(settings: Config, url: str, method: str = "GET", body: object = None) -> Any:
    """The running agent's answer; a Failure where none runs, or none that this user may ask."""
    from agent.client import NotPermitted, NotRunning

    try:
        return ask_agent(settings, url, method, body)
    except (NotRunning, NotPermitted) as absent:
        raise Failure(f"tocsin: {absent}", UNKNOWN) from absent


# ---- commands ----


@app.command()
def run(context: typer.Context, config: ConfigFile = None) -> None:
    """Run the monitoring daemon in the foreground."""
    path = chosen(context, config)
    # -P: a folder named `agent` where this was called from must not be taken for ours.
    command = [sys.executable, "-P", "-m", "agent.daemon", *(["--config", str(path)] if path else [])]
    environment = dict(os.environ)
    if not {"site-packages", "dist-packages"} & set(ROOT.parts):  # from a checkout, which -P would not find
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([known] if known else [])])
    os.execve(sys.executable, command, environment)  # noqa: S606  (no shell is what is wanted)


@app.command()
def check(
    context: typer.Context,
    watch_for: Annotated[str, typer.Option(metavar="SPAN", help="How long to sample where no agent runs.")] = "15s",
    show_all: Annotated[bool, typer.Option("--all", help="Every signal of every subject in a row of its own.")] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="Only the hardware: a verdict on each GPU.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether my deployment is healthy: the ten, the rest.

    Asks the running agent; where none runs, samples by itself. Exit 0 healthy, 1 ticket, 2 page, 3 unknown.
    """
    from agent.client import NotPermitted, NotRunning

    watch_s = seconds("--watch-for", watch_for)
    settings = load(chosen(context, config))
    try:
        answer = ask_agent(settings, "/gpus" if gpus else "/check")
    except (NotRunning, NotPermitted) as absent:
        answer = _sample(settings, watch_s, absent, gpus=gpus)

    def report() -> Report:
        from agent.show import check_report, gpus_report

        return gpus_report(answer, show_all=show_all) if gpus else check_report(answer, show_all=show_all)

    emit(answer, as_json, report)
    raise typer.Exit(EXIT_OF[answer["verdict"]])


@app.command()
def demo(
    span: Annotated[str | None, typer.Option("--for", metavar="SPAN", help="How long [default: the story].")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines, no waiting at the end.")] = False,
    scenario: Annotated[Path | None, typer.Option("--scenario", metavar="FILE", help="Your own story (YAML).")] = None,
    quiz: Annotated[bool, typer.Option("--quiz", help="Ask what you would do, then show.")] = False,
) -> None:
    """Show it all on this machine, without a GPU.

    Simulated GPUs and engines over real HTTP, the real agent, a real drill. Exit 0; 1 where what the story expects
    did not come, or something is left; 2 for a faulty scenario; 130 where Ctrl-C ends it before it is told.
    """
    from agent.demo.command import show

    raise typer.Exit(show(scenario, None if span is None else seconds("--for", span, least_s=1.0), headless=headless,
                          quiz=quiz))


@app.command()
def watch(
    context: typer.Context,
    every: Annotated[str, typer.Option(metavar="SPAN", help="How often to look.")] = "2s",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch the node at a glance, until q.

    Asks the running agent. Where it does not write to a terminal: one line at each change of the verdict
    and each new incident, with --json the whole answer of `check` in a line.
    """
    from agent.client import ask
    from agent.watch import as_lines, on_terminal

    every_s = seconds("--every", every)
    settings = load(chosen(context, config))

    def asked() -> tuple[Any, Any]:
        return ask(settings.socket, "/check"), ask(settings.socket, "/alerts?resolved=0")

    try:
        if sys.stdout.isatty() and not as_json:
            on_terminal(asked, every_s, sys.stdout)
        else:
            as_lines(asked, every_s, sys.stdout, as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except BrokenPipeError:  # `| head` has seen enough
        write("")


def _sample(settings: Config, watch_s: float, absent: Exception, *, gpus: bool) -> Any:
    """The same as the agent's answer, by looking for ourselves for a while."""
    from agent.client import NotRunning
    from agent.oneshot import sample
    from agent.progress import Progress, in_order

    if gpus:
        import msgspec

        settings = msgspec.structs.replace(settings, engines=())  # their answers say nothing of the hardware
    why = f"no agent answers on {settings.socket}" if isinstance(absent, NotRunning) else str(absent)
    with in_order(), Progress() as progress:
        progress(f"tocsin: {why}; sampling for myself, {watch_s:g} s", lasting=True)
        return sample(settings, watch_s, progress, gpus=gpus)


@app.command()
def doctor(
    context: typer.Context,
    urls: Annotated[list[str] | None, typer.Argument(metavar="[URL]...", help="Engines to look at instead.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell how each number is had, or why not and what to do.

    Exit 0, or 3 where a required number is missing, or there is nothing to look at.
    """
    from agent.client import NotPermitted, NotRunning
    from agent.show import asks_others, doctor_report, is_missing

    settings = load(chosen(context, config))
    try:
        answer = _look(settings, urls) if urls else ask_agent(settings, "/doctor")
    except (NotRunning, NotPermitted):
        answer = _look(settings, [])
    emit(answer, as_json, lambda: doctor_report(answer))
    parts = [*answer["targets"], *answer["gpus"]]
    failed = any(part.get("error") for part in [*parts, *answer["sources"]])
    missing = any(is_missing(found) for part in parts for found in part.get("found") or ())
    raise typer.Exit(UNKNOWN if failed or missing or not (parts or asks_others(answer)) else 0)


def _look(settings: Config, urls: Sequence[str]) -> Any:
    from agent.oneshot import doctor as look
    from agent.progress import Progress, in_order
    from agent.strict import Unfit

    try:
        with in_order(), Progress() as progress:
            return look(settings, urls, progress)
    except Unfit as fault:
        raise Failure(f"tocsin doctor: {fault}") from fault


class Profile(StrEnum):
    """What comes first for an engine."""

    latency = "latency"
    throughput = "throughput"


@app.command()
def lint(
    context: typer.Context,
    urls: Annotated[list[str] | None, typer.Argument(metavar="[URL]...", help="Engines to look at instead.")] = None,
    profile: Annotated[Profile | None, typer.Option(help="What comes first [default: as configured].")] = None,
    evidence: Annotated[Path | None, typer.Option(metavar="FILE", help="What no machine sees (docs/lint.md).")] = None,
    explain: Annotated[int | None, typer.Option(metavar="N", help="Only explain principle N, 1 to 12.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Hold the deployment against the twelve design principles.

    Asks the running agent; with URLs, or where none runs, reads the engines by itself. Exit 0 where each principle is
    kept or nobody can tell, 1 where one is at odds, 2 for a wrong option or evidence file, else 3 where an engine could
    not be looked at.
    """
    from agent import lint as principles
    from agent import lint_report

    if explain is not None:
        try:
            said = principles.explained(explain)
        except LookupError as fault:
            raise Failure(f"tocsin lint: --explain {explain}: {fault}") from fault
        emit({"number": explain, "principle": said[0].partition(": ")[2], "why": said[1],
              "section": said[2].partition(": ")[2]}, as_json, lambda: [*said])
        return
    answer = _linted(load(chosen(context, config)), urls or (), None if profile is None else profile.value, evidence)
    emit(answer, as_json, lambda: [*lint_report.report(answer)])
    is_blind = answer["errors"] or not answer["engines"]
    raise typer.Exit(1 if answer["verdict"] == "at odds" else UNKNOWN if is_blind else 0)


def _linted(settings: Config, urls: Sequence[str], profile: Any, evidence: Path | None) -> dict[str, Any]:
    """The contract of `tocsin lint --json`."""
    from agent import lint as principles
    from agent import lint_facts
    from agent.client import AgentError
    from agent.strict import Unfit

    try:
        drills = None if urls else drill_commands.runs_readable(settings)
        looked = lint_facts.look(settings, urls, profile=profile, evidence=evidence, drills=drills)
    except (Unfit, lint_facts.Unusable) as fault:
        raise Failure(f"tocsin lint: {fault}") from fault
    except AgentError as fault:
        raise Failure(f"tocsin lint: {fault}", UNKNOWN) from fault
    engines = [{**head, "findings": principles.judge(facts)} for head, facts in looked.engines]
    words = {one["verdict"] for engine in engines for one in engine["findings"]}
    words |= {"cannot tell"} if looked.errors else set()
    worst = min(words, key=principles.WORST_FIRST.__getitem__, default="cannot tell")
    return {"verdict": worst, "engines": engines, "errors": list(looked.errors)}


@alerts_app.callback(invoke_without_command=True)
def alerts(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List current and past alerts; `alerts stats`: which rules are noise.

    Exit 3 where no agent answers.
    """
    if context.invoked_subcommand is not None:
        context.obj = chosen(context, config)
        return
    answer = need_agent(load(chosen(context, config)), "/alerts")

    def report() -> Report:
        from agent.show import alerts_report

        return alerts_report(answer)

    emit(answer, as_json, report)


@alerts_app.command("stats")
def alerts_stats(
    context: typer.Context,
    last: Annotated[str, typer.Option("--last", metavar="SPAN", help="How far back to look.")] = "30d",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell per rule how often it fired, for how long, and how often for less than 5 minutes.

    Exit 3 where no agent answers.
    """
    last_s = seconds("--last", last, least_s=1.0)
    answer = need_agent(load(chosen(context, config)), f"/alerts/stats?last={last_s:.0f}s")

    def report() -> Report:
        from agent.show import stats_report

        return stats_report(answer)

    emit(answer, as_json, report)


@app.command()
def silence(
    context: typer.Context,
    rule: Annotated[str | None, typer.Argument(metavar="RULE", help="As in `tocsin alerts`; * and ? match.")] = None,
    subject: Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="[default: all]")] = None,
    span: Annotated[str | None, typer.Option("--for", metavar="SPAN", help="For how long, as 2h; at most 7d.")] = None,
    why: Annotated[str | None, typer.Option("--why", metavar="TEXT", help="Why; the next on call reads it.")] = None,
    show_all: Annotated[bool, typer.Option("--list", help="Show the silences that hold, and past ones.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Mute the pages of a rule, with an end and a reason.

    What still fires at the end pages then. The alert itself goes on, and Alertmanager is told of it as ever. Exit 3
    where no agent answers.
    """
    settings = load(chosen(context, config))
    if show_all and not (rule or span or why):
        _list_silences(settings, as_json)
        return
    if show_all or rule is None:
        raise Failure("tocsin silence: name a RULE (`tocsin rules list` has them), or ask for --list alone")
    _silence(settings, rule, subject, span, why, as_json)


@app.command()
def unsilence(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="ID|RULE", help="As `tocsin silence --list` shows it.")],
    subject: Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="[default: all]")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """End a silence before its time.

    What fires under it pages at once. Exit 3 where no agent answers.
    """
    settings = load(chosen(context, config))
    _unsilence(settings, {"ids": [int(what)]} if what.isdecimal() and subject is None else
               {"rule": what, "subject": subject}, as_json)


@app.command()
def maintenance(
    context: typer.Context,
    span: Annotated[str | None, typer.Option("--for", metavar="SPAN", help="For how long, as 2h; at most 7d.")] = None,
    why: Annotated[str | None, typer.Option("--why", metavar="TEXT", help="Why; the next on call reads it.")] = None,
    end: Annotated[bool, typer.Option("--end", help="End it now.")] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Mute all pages of this node while it is worked on.

    The same as `tocsin silence '*'`. Still told are that Tocsin itself is late or cannot deliver (watcher), what a
    drill left behind (drill-orphaned), and the heartbeat. Exit 3 where no agent answers.
    """
    settings = load(chosen(context, config))
    if end and not (span or why):
        _unsilence(settings, {"rule": "*", "subject": None}, as_json)
    elif end:
        raise Failure("tocsin maintenance: --end stands alone")
    else:
        _silence(settings, "*", None, span, why, as_json)


def _silence(settings: Config, rule: str, subject: str | None, span: str | None, why: str | None,
             as_json: bool) -> None:
    from agent.silences import LONGEST_S, matchers

    if span is None or not (why or "").strip():
        raise Failure('tocsin: a silence has an end and a reason: --for 2h --why "fans are being swapped"')
    for_s = seconds("--for", span, least_s=1.0)
    if for_s > LONGEST_S:
        raise Failure(f"--for {span} is too long; a silence lasts at most {LONGEST_S / 86400:g}d. What shall never page"
                      " is taken out by `rules: disable:` in tocsin.yaml, or made a ticket by `rules: override:`")
    told = {"rule": rule, "subject": subject, "for_s": for_s, "why": why}
    answer = need_agent(settings, "/silences", "POST", told)
    words = [*matchers(rule, subject or "*", settings.node or ""), f"--duration={for_s:.0f}s", f"--comment={why}"]
    there = [shlex.join(["amtool", "silence", "add", f"--alertmanager.url={channel.alertmanager.urls[0]}", *words])
             for channel in settings.notify if channel.alertmanager is not None]

    def report() -> Report:
        from agent.show import silenced_report

        return silenced_report(answer, there)

    emit({**answer, "alertmanager": there}, as_json, report)


def _unsilence(settings: Config, wanted: dict[str, Any], as_json: bool) -> None:
    answer = need_agent(settings, "/silences/end", "POST", wanted)

    def report() -> Report:
        from agent.show import silence_of

        return [f"Ended: {silence_of(one)}; what fires pages from now on" for one in answer]

    emit(answer, as_json, report)


def _list_silences(settings: Config, as_json: bool) -> None:
    answer = need_agent(settings, "/silences")

    def report() -> Report:
        from agent.show import silences_report

        return silences_report(answer)

    emit(answer, as_json, report)


@app.command()
def record(
    context: typer.Context,
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Engines, as http://127.0.0.1:8000.")],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to, as node.jsonl.gz.")],
    every: Annotated[str, typer.Option(metavar="SPAN", help="Time between two scrapes.")] = "1s",
    span: Annotated[str, typer.Option("--for", metavar="SPAN", help="How long; Ctrl-C ends it earlier.")] = "10m",
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    config: ConfigFile = None,
) -> None:
    """Record what engines and GPUs tell, for `tocsin backtest`."""
    from agent import record as recorder
    from agent.progress import Progress, stop_at_signals

    every_s, for_s = seconds("--every", every, least_s=0.1), seconds("--for", span)
    settings = load(chosen(context, config))
    stop = stop_at_signals()  # no exception between two bytes of the compressed stream
    try:
        pages = [recorder.page_url(url) for url in urls]
        readers = [recorder.scraper(page, timeout_s=max(5.0, every_s)) for page in pages]
        if settings.nvml != "off":
            from agent.sources.nvml import NvmlSource

            readers.append(recorder.gpu_reader(NvmlSource()))
        with Progress() as progress, recorder.recording(out, force=force) as write_row:
            tally = recorder.record(readers, write_row, stop, progress, every_s=every_s, for_s=for_s)
    except recorder.CannotRecord as fault:
        raise Failure(f"tocsin: {fault}") from fault
    failed = "".join(f", {count} of {target} failed" for target, count in tally.failed.items())
    sys.stderr.write(f"{out}: {tally.rows} rows{failed}. Next: tocsin backtest {out}\n")


@app.command()
def backtest(
    context: typer.Context,
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Recordings of `tocsin record`.")],
    rules: Annotated[Path | None, typer.Option(metavar="DIR", help="Rules besides the built-in ones.")] = None,
    slo: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="As ttft_p99=500ms.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run the rules over a recording: what would have paged.

    The rules, service levels and engines of the configuration count, as they would for the daemon.
    """
    from agent.backtest import BadRecording
    from agent.backtest import backtest as replay
    from agent.show import backtest_report
    from agent.strict import ConfigErrors, Unfit

    settings = load(chosen(context, config))
    # `--slo a=1 b=2`: what follows the first is a FILE to the parser
    levels = [*(slo or ()), *(word for word in files if "=" in word and not Path(word).exists())]
    paths = [Path(word) for word in files if word not in levels]
    if not paths:
        raise Failure("tocsin: no recording is named; `tocsin record URL -o FILE` makes one")
    if wrong := [word for word in levels if "=" not in word]:
        raise Failure(f"tocsin: --slo {wrong[0]} is not NAME=VALUE; write --slo ttft_p99=500ms")
    try:
        answer = replay(paths, rules, dict(word.split("=", 1) for word in levels), settings)
    except (BadRecording, ConfigErrors, Unfit, ValueError) as fault:
        raise Failure(f"tocsin: {fault}") from fault
    emit(answer, as_json, lambda: backtest_report(answer))


@config_app.command("check")
def config_check(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Find every fault in configuration and rules, with file and line. Exit 0, or 2."""
    from dataclasses import asdict

    from agent.config import DEFAULT_PATH, load_all, told_by_each, without_function
    from agent.notifiers import not_installed
    from agent.signals import CATALOGUE
    from agent.strict import ConfigErrors
    from drills.config import drills_of

    path = chosen(context, config)
    faults: Sequence[Fault] = ()
    notes: list[str] = []
    try:
        settings, ruleset = load_all(path, os.environ, CATALOGUE)
        drills_of(settings, ruleset.rules)
        count = f"{len(ruleset.rules)} rules, {len(ruleset.disabled)} disabled"
        notes = [count, *ruleset.notes, *without_function(settings), *not_installed(settings),
                 *told_by_each(settings)]
    except ConfigErrors as errors:
        faults = errors.faults
    if as_json:
        emit({"ok": not faults, "faults": [asdict(fault) for fault in faults], "notes": notes}, True, list)
    elif faults:
        sys.stderr.write("".join(f"{fault}\n" for fault in faults) + f"{_count(faults)}\n")
    else:
        name = path or (DEFAULT_PATH if DEFAULT_PATH.exists() else f"No {DEFAULT_PATH}, built-in defaults")
        write("\n".join([f"{name}: no fault", *notes]) + "\n")
    raise typer.Exit(USAGE if faults else 0)


@notify_app.command("test")
def notify_test(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Send a marked test alert, and its end, through every channel of `notify:`.

    Exit 0 where each was delivered, else 1; 3 where there is no channel.
    """
    from agent.notifiers import Needs, build_channels, channel_names
    from agent.notifiers.trial import try_all

    settings = load(chosen(context, config))
    needs = Needs(list, lambda: True, settings.external_url, node=os.environ.get("NODE_NAME") or settings.node or "")
    routes = build_channels(settings, needs, channel_names(settings, {}))
    if not routes:
        raise Failure("tocsin: no channel is configured under `notify:`: nobody is told of anything", UNKNOWN)
    tried = try_all(routes, settings.node or "")
    if as_json:
        emit([one._asdict() for one in tried], True, list)
    else:
        write("".join(f"{t.channel}: {'delivered' if t.delivered else f'NOT delivered: {t.why}'}\n" for t in tried))
    raise typer.Exit(0 if all(one.delivered for one in tried) else 1)


@rules_app.command("list")
def rules_list(context: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the rules: what fires, for how long, how loud, and what to do."""
    from agent.config import load_all
    from agent.signals import CATALOGUE
    from agent.strict import ConfigErrors

    try:
        _, ruleset = load_all(chosen(context, config), os.environ, CATALOGUE)
    except ConfigErrors as errors:
        raise Failure(f"{errors}\n{_count(errors.faults)}; `tocsin config check` looks again") from errors
    rows = [_rule_row(rule, CATALOGUE[rule.signal].unit) for rule in ruleset.rules]

    def report() -> Report:
        from agent.show import rules_report

        return rules_report(rows)

    emit(rows, as_json, report)


class Format(StrEnum):
    """Whose configuration `rules export` writes."""

    prometheus = "prometheus"
    alertmanager = "alertmanager"


class Over(StrEnum):
    """Over which metrics the rules for Prometheus go."""

    engines = "engines"
    tocsin = "tocsin"


@rules_app.command("export")
def rules_export(
    context: typer.Context,
    form: Annotated[Format, typer.Option("--format", help="Whose configuration to write.")],
    over: Annotated[Over, typer.Option(help="Prometheus: the engines' own metrics, or Tocsin's.")] = Over.engines,
    out: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="[default: stdout]")] = None,
    config: ConfigFile = None,
) -> None:
    """Write the rules, as configured, for Prometheus, or their causes and a route for Alertmanager."""
    from agent.config import load_all, slo_for
    from agent.signals import CATALOGUE
    from agent.strict import ConfigErrors
    from rules import alertmanager, prometheus

    try:
        settings, ruleset = load_all(chosen(context, config), os.environ, CATALOGUE)
    except ConfigErrors as errors:
        raise Failure(f"{errors}\n{_count(errors.faults)}; `tocsin config check` looks again") from errors
    if form is Format.alertmanager:
        text = alertmanager.export(ruleset.rules)
    elif over is Over.engines:
        text = prometheus.over_engines(ruleset.rules, slo_for(settings), settings.poll)
    else:
        text = prometheus.over_tocsin(ruleset.rules, CATALOGUE)
    put(text, out)


def _rule_row(rule: Rule, unit: str) -> dict[str, Any]:
    from agent.words import fires

    return {
        "id": rule.id,
        "number": rule.number,
        "severity": rule.severity,
        "fires": fires(rule, unit),
        "for_s": rule.for_s,
        "keep_s": rule.keep_s,
        "window_s": rule.window_s,
        "signal": rule.signal,
        "required": rule.required,
        "causes": list(rule.causes),
        "action": rule.action,
        "where": rule.where,
    }


# ---- the entry point ----


app.command("drilld")(drill_commands.drilld)


@app.command()
def report(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN|incident", help="A drill's run, a drill (its last run); or this.")],
    incident: Annotated[str | None, typer.Argument(metavar="[ID]", help="Of an incident, its end, or last.")] = None,
    config: ConfigFile = None,
    format_: Annotated[str, typer.Option("--format", help="md, html or json; of a drill junit, too.")] = "md",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write there [default: print].")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the postmortem of a drill, or of an incident.

    `report RUN`, `report incident ID`; `report incident` alone lists the incidents. Exit 3 where no agent answers.
    """
    form = "json" if as_json else format_
    if run != "incident":
        put(drill_commands.report(context, run, config, form), output)
        return
    from agent import postmortem

    if form not in postmortem.FORMATS:
        raise Failure(f"tocsin: --format {form}: of an incident there are {', '.join(postmortem.FORMATS)}")
    settings = load(chosen(context, config))
    if incident is None:
        answer = need_agent(settings, "/incidents")
        emit(answer, as_json, lambda: _incidents_report(answer))
        return
    put(postmortem.render(_incident(settings, incident), form), output)


def _incidents_report(answer: Any) -> Report:
    from agent.show import incidents_report

    return incidents_report(answer)


def _incident(settings: Config, name: str) -> Any:
    """All that the agent kept of an incident."""
    from urllib.parse import quote

    from agent.client import AgentError, NotPermitted, NotRunning, ask

    try:
        return ask(settings.socket, f"/incidents/{quote(name)}")
    except (NotRunning, NotPermitted) as absent:
        raise Failure(f"tocsin: {absent}", UNKNOWN) from absent
    except AgentError as error:
        if error.status == NOT_FOUND:
            raise Failure(f"tocsin: there is no incident {name}; `tocsin report incident` lists them") from error
        raise Failure(f"tocsin: {error}", UNKNOWN) from error


class Variadic(typer.core.TyperCommand):
    """A command whose options take several values after one name: --old A B --new C."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Write the name before each value."""
        spread: list[str] = []
        name = ""
        for word in args:
            if word in ("--old", "--new"):
                name = word
                continue
            name = "" if word.startswith("-") else name
            spread += [name, word] if name else [word]
        return super().parse_args(ctx, spread)


@app.command(cls=Variadic)
def canary(
    context: typer.Context,
    old: Annotated[list[str], typer.Option("--old", metavar="URL...", help="Engines with the old configuration.")],
    new: Annotated[list[str], typer.Option("--new", metavar="URL...", help="Engines with the new one.")],
    span: Annotated[str, typer.Option("--for", metavar="SPAN", help="How long to watch.")] = "24h",
    every: Annotated[str, typer.Option(metavar="SPAN", help="Time between two reads.")] = "5s",
    slo: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="As ttft_p99=500ms.")] = None,
    business_old: Annotated[str | None, typer.Option(metavar="URL[#path]", help="A number of the old group.")] = None,
    business_new: Annotated[str | None, typer.Option(metavar="URL[#path]", help="The same of the new one.")] = None,
    rollback: Annotated[str | None, typer.Option(metavar="COMMAND", help="Run once where it fails.")] = None,
    webhook: Annotated[str | None, typer.Option("--rollback-webhook", metavar="URL", help="Or: POST to it.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Guard a gray release: is the new configuration worse?

    Worse is a p99 over 1.5 x its service level, over 1 % of errors, or a business number 5 % below the old group's,
    where the numbers prove it. Exit 0 pass, 1 fail (roll back), 3 not proven either way; 130 stopped by Ctrl-C.
    """
    from agent.progress import Progress, stop_at_signals
    from agent.release_watch import Plan, Watch, roll_back
    from agent.strict import Unfit

    if (business_old is None) != (business_new is None):
        raise Failure("tocsin: a business number is compared: give both --business-old and --business-new")
    if rollback is not None and webhook is not None:
        raise Failure("tocsin: --rollback and --rollback-webhook are both given; it is fired once: keep one of them")
    way_back = command_of(rollback)
    settings = _with_levels(load(chosen(context, config)), slo or ())
    from agent.config import base_url, full_url, slo_for

    try:
        plan = Plan([base_url(url) for url in old], [base_url(url) for url in new], slo_for(settings),
                    seconds("--for", span, least_s=1.0), seconds("--every", every, least_s=0.5),
                    None if business_old is None or business_new is None
                    else (full_url(business_old), full_url(business_new)),
                    way_back, None if webhook is None else full_url(webhook))
    except (Unfit, ValueError) as fault:
        raise Failure(f"tocsin canary: {fault}") from fault
    if set(plan.old) & set(plan.new):
        raise Failure(f"tocsin canary: {min(set(plan.old) & set(plan.new))} is in both groups; an engine is old or new")
    stop = stop_at_signals()  # no exception in the midst of the way back
    with Progress() as progress:
        answer = Watch(plan).run(stop, progress)
    if answer["verdict"] == "fail":
        answer["rollback"] = fired = roll_back(plan, answer)
        if fired is not None and not fired["ok"]:
            sys.stderr.write(f"tocsin: the way back FAILED ({fired['how']}): {fired['why']}; roll back by hand\n")

    from agent.lint_facts import Ran, note_canary

    untold = note_canary(settings.state_dir, Ran(answer["ended"], answer["verdict"], answer["started"],
                                                 tuple(plan.old), tuple(plan.new)))
    if untold is not None:
        sys.stderr.write(f"tocsin: not written down for `tocsin lint`: {untold}\n")

    def report() -> Report:
        from agent.show import release_report

        return release_report(answer)

    emit(answer, as_json, report)
    raise typer.Exit({"pass": 0, "fail": 1}.get(answer["verdict"], INTERRUPTED if answer["stopped"] else UNKNOWN))


def command_of(rollback: str | None) -> Sequence[str]:
    """The words of --rollback; that it cannot be started is better known now than when it is needed."""
    import shutil

    if rollback is None:
        return ()
    try:
        words = shlex.split(rollback)
    except ValueError as fault:
        raise Failure(f"tocsin canary: --rollback: {fault}") from fault
    if not words or shutil.which(words[0]) is None:
        raise Failure(f"tocsin canary: --rollback: there is no command {words[0] if words else 'in it'}; name one in"
                      " PATH, or by its path")
    return words


def _with_levels(settings: Config, levels: Sequence[str]) -> Config:
    """The configuration with service levels from the command line."""
    from agent.config import with_slo
    from agent.strict import Unfit

    if wrong := [word for word in levels if "=" not in word]:
        raise Failure(f"tocsin: --slo {wrong[0]} is not NAME=VALUE; write --slo ttft_p99=500ms")
    try:
        return with_slo(settings, dict(word.split("=", 1) for word in levels))
    except Unfit as fault:
        raise Failure(f"tocsin: --slo: {fault}") from fault


@app.command()
def review(
    context: typer.Context,
    last: Annotated[str, typer.Option("--last", metavar="SPAN", help="How far back to look.")] = "90d",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Review a quarter: service levels, budget, pages, drills.

    And what is still to do. Exit 0 where every written service level was kept and no drill was missed, else 1; 3 where
    no agent answers.
    """
    last_s = seconds("--last", last, least_s=60.0)
    settings = load(chosen(context, config))
    answer = need_agent(settings, f"/review?last={last_s:.0f}s")
    drills = drill_commands.review(settings, answer["since"])
    answer |= {"drills": {key: drills[key] for key in ("held", "missed", "verdicts", "why")},
               "actions": [*answer["actions"], *drills["actions"]]}

    def shown() -> Report:
        from agent.show import review_report

        return review_report(answer)

    emit(answer, as_json, shown)
    broken = [level for row in answer["targets"] if row["written"] for level in row["slo"] if level["kept"] is False]
    raise typer.Exit(1 if broken or answer["drills"]["missed"] else 0)



def main() -> NoReturn:
    """The command `tocsin`. No fault of the user's ends in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ≥ and ° gets ?, not a traceback
    code = 0
    try:
        app(prog_name="tocsin")
    except Failure as failure:
        sys.stderr.write(f"{failure}\n")
        code = failure.code
    except NoThread as none:
        sys.stderr.write(f"tocsin: {none}\n")
        code = 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
