"""`tocsin drilld`: holds the drills when they are due, spawns one runner a run, heals what a dead one left.

Its own socket (`drilld.sock`, beside the agent's) is for root, and for `drill_group` where one is named.
"""

from __future__ import annotations

import argparse
import fcntl
import grp
import http.client
import json
import os
import pwd
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import SimpleQueue
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import structlog
from msgspec import ValidationError

from agent import client, sdnotify
from agent.config import Config, load_all
from agent.model import Rule
from agent.signals import CATALOGUE
from agent.strict import ConfigErrors
from agent.threads import begin
from drills import heal, history, lease, ledger, lock, owner, record, report, runner, schedule, tell
from drills.cluster import ClusterError
from drills.config import drills_of
from drills.cron import next_due
from drills.model import Drill, Left, Refused, Verdict, is_past

log = structlog.get_logger()

LOCK = "drilld.lock"
NO_DRILL = "no-drill"
SOCKET_MODE = 0o660
SWEEP_EVERY_S = 60.0
ANNOUNCED_AT_MOST_S = 86400.0  # no drill and what it announces last longer
RUNNER_ENDS_WITHIN_S = 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PEER_CRED = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED


def socket_of(config: Config) -> Path:
    """drilld's socket, beside the agent's."""
    return config.socket.with_name("drilld.sock")


def root_of(config: Config) -> Path:
    """Where drills keep their state."""
    return config.state_dir / "drills"


def only_one(root: Path) -> int:
    """The lock of the one drilld of this state, a file descriptor. Raises OSError where another one holds it."""
    owner.make_folder(root)
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    owner.give(root / LOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as taken:
        os.close(fd)
        raise OSError(f"another drilld runs: it holds {root / LOCK}; `systemctl status tocsin-drilld`") from taken
    return fd


def unblock() -> None:
    """A child takes its parent's blocked signals along: the runner must hear SIGTERM."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def heal_all(config: Config, by: str = "tocsin drill heal") -> list[Left]:
    """Undo whatever any ledger says, `by` whom; then tell the agent what is left, and that these announce no more."""
    root, healed = root_of(config) / "runs", list[str]()

    def finish(folder: Path, entries: Sequence[ledger.Entry], left: Sequence[Left]) -> None:
        healed.append(folder.name)
        history.finish_killed(folder, entries, left)

    left = heal.heal(root, finish=finish, by=by)
    for run in healed:  # not before all is undone: an agent that hangs would be waited for
        tell.end_announcement(config.socket, run)
    for folder in ledger.run_folders(root):
        with suppress(OSError, ValidationError):  # one that cannot be written changes nothing in the world
            history.finish_refused(folder)
        still = history.left_of(folder)
        if still is not None:
            tell.orphaned(config.socket, folder.name, still)
    return left


class Busy(RuntimeError):  # noqa: N818  (it says what is the case)
    """Another run is under way; the text names it."""


class Daemon:
    """The drills of one node. At most one run at a time; `runs` is the one under way."""

    def __init__(self, config: Config, drills: Sequence[Drill], rules: Sequence[Rule], path: Path | None,
                 clock: Callable[[], float] = time.time) -> None:
        self.config, self.drills, self.rules, self.path, self.clock = config, drills, rules, path, clock
        self.root = root_of(config)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._run: str | None = None
        self._over = threading.Event()  # it has ended, and was healed where it had to be
        self._over.set()
        self.timetable: schedule.Timetable | None = None
        self.fleet = lease.fleet_of(config.node, clock=clock)
        self.orphan_told: str | None = None  # another node's run, for which we page
        self.stopping, self.woken = threading.Event(), threading.Event()  # woken: stop, or read the configuration anew

    # --- runs -------------------------------------------------------------------------------------------------------

    def start_run(self, name: str, *, started_by: str, run: str | None = None, due_at: float | None = None,
                  accept_unknown_budget: bool = False) -> str:
        """Start a run of a drill; its id. Raises LookupError, OSError, Busy, NoThread, RuntimeError (it is taken)."""
        drill = self.drill_of(name)
        with self._lock:
            if self.active() is not None:
                raise Busy(f"{self._run} is under way; `tocsin drill abort` ends it")
            over = threading.Event()
            awaited: SimpleQueue[tuple[subprocess.Popen[bytes], str] | None] = SimpleQueue()
            # First: a run that nobody sees to its end would be under way for ever.
            begin(self._await_next, f"run of {name}", awaited, over)
            try:
                folder = self._create(drill, run, started_by=started_by, due_at=due_at)
                run = folder.name
                command = [sys.executable, "-m", "drills.runner", str(folder)]
                process = subprocess.Popen(command + ["--accept-unknown-budget"] * accept_unknown_budget,
                                           start_new_session=True, preexec_fn=unblock)
            except BaseException:
                awaited.put(None)
                raise
            self._process, self._run, self._over = process, run, over
            awaited.put((process, run))
        log.info("run_started", run=run, by=started_by)
        return run

    def drill_of(self, name: str) -> Drill:
        """A drill by its name. Raises LookupError."""
        drill = next((d for d in self.drills if d.name == name), None)
        if drill is None:
            known = ", ".join(d.name for d in self.drills) or "none is configured"
            raise LookupError(f"{name}: no such drill; there are: {known}")
        return drill

    def _create(self, drill: Drill, run: str | None, *, started_by: str, due_at: float | None) -> Path:
        """The folder of a run of now, or of the run that is named. Raises RuntimeError, OSError."""
        run = run or schedule.run_id(drill.name, self.clock(), self.config.node or "")
        try:
            return runner.create(self.root, drill, run, started_by=started_by, config_path=self.path, due_at=due_at,
                                 node=self.config.node)
        except FileExistsError:
            raise RuntimeError(f"there is a run {run} already; start it a second later") from None

    def active(self) -> str | None:
        """The run under way."""
        return None if self._over.is_set() else self._run

    def active_of(self, name: str) -> str | None:
        """The run of this drill that is under way."""
        run = self.active()
        return run if run is not None and schedule.is_of(run, name) else None

    def _await_next(self, awaited: SimpleQueue[tuple[subprocess.Popen[bytes], str] | None],
                    over: threading.Event) -> None:
        """See the run that is handed over to its end; None: it could not be started."""
        if (told := awaited.get()) is not None:
            self._await(*told, over)

    def _await(self, process: subprocess.Popen[bytes], run: str, over: threading.Event) -> None:
        """See a run to its end; one whose runner was killed is healed and its report written."""
        status = process.wait()
        log.info("run_ended", run=run, status=status)
        try:
            if status not in runner.EXIT.values():
                self.heal("drilld")
        finally:
            over.set()
        self.tell_overdue()

    def abort(self, by: str) -> str | None:
        """End the run under way in good order, in somebody's name; its id, None where there is none."""
        with self._lock:
            return self._abort(by)

    def _abort(self, by: str) -> str | None:
        if self._process is None or self._run is None or self._process.poll() is not None:
            return None
        log.info("run_aborted", run=self._run, by=by)
        ledger.say_aborted_by(self.root / "runs" / self._run, by)
        self._process.send_signal(signal.SIGTERM)
        return self._run

    def heal(self, by: str) -> list[Left]:
        """Undo whatever any ledger says, and tell the agent. The run under way is aborted, and has time for its end.

        No run begins meanwhile: it would be ended too.
        """
        with self._lock:
            if self._abort(by) is not None and self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(RUNNER_ENDS_WITHIN_S)
            return heal_all(self.config, by)

    def release(self) -> list[str]:
        """Let drills run again although something is left; the runs that left it. Raises Refused, OSError."""
        with self._lock:
            return lock.release(self.root)

    def told_of(self, run: str) -> dict[str, Any]:
        """How far a run is, for whoever may not look into its folder. `over`: no more comes. Raises LookupError."""
        folder = self.root / "runs" / run
        if folder not in ledger.run_folders(folder.parent):
            raise LookupError(f"{run}: no such run; `tocsin drill history` lists them")
        over = run != self.active()  # asked before the record is read: it may end meanwhile
        told = record.load(folder)
        if told is None:
            return {"run": run, "state": ledger.last_state(ledger.read(folder)), "over": over, "row": None, "rows": []}
        if over and told["ended_at"] is None:
            over = lock.holder_of(self.root) != run  # one that a person holds in the foreground
        return {"run": run, "state": told["state"], "over": over or told["ended_at"] is not None,
                "row": history.row_of(told), "rows": told["rows"]}

    def listed(self) -> list[dict[str, Any]]:
        """The drills, and when each is due next (unix seconds; None: by hand, or not enabled)."""
        now = self.clock()
        return [{"drill": d.name, "fault": d.fault, "next": next_due(d.schedule.cron, d.schedule.zone, now)
                 if d.schedule is not None and d.enabled else None} for d in self.drills]

    def report_of(self, run: str, form: str) -> str:
        """The postmortem of a run. Raises LookupError."""
        folder = self.root / "runs" / run
        told = record.load(folder) if folder in ledger.run_folders(folder.parent) else None
        if told is None or form not in report.FORMATS:
            raise LookupError(f"{run}, {form}: no such report")
        return report.render(told, folder, form)

    def sweep(self, *, at_start: bool = False) -> None:
        """Go on trying to undo what a run left; one that is alive, whoever started it, is let be.

        At start those are healed too that were cut off before their fault: their reports wait.
        """
        with self._lock, suppress(Refused, OSError):
            free = self.active() is None and lock.holder_of(self.root) is None
            if free and (at_start or lock.unsettled(self.root)):
                heal_all(self.config, "drilld")
        self.end_announcements()
        self.tidy_lease()

    def tidy_lease(self) -> None:
        """Give the fleet's lease back where a run of this node was cut off and is healed; page for an orphan's node."""
        fleet = self.fleet
        if fleet is None:
            return
        try:
            said = fleet.tidy(self.is_over)
        except (ClusterError, Refused, OSError) as error:
            log.warning("lease_not_looked_at", error=str(error))
            return
        # Without targets a person has let it go, as the page says how.
        if said is not None and said.targets and said.node not in ("", fleet.node) and said.reporter == fleet.node:
            left = Left(lease.orphan_text(said), f"kubectl get node {said.node}")
            tell.orphaned(self.config.socket, said.run, [left])
            self.orphan_told = said.run
        elif self.orphan_told is not None and tell.orphaned(self.config.socket, self.orphan_told, []):
            self.orphan_told = None

    def is_over(self) -> bool:
        """Whether no run goes on here, whoever started it, and none has left anything. Raises Refused, OSError."""
        return self.active() is None and lock.holder_of(self.root) is None and not lock.unsettled(self.root)

    def end_announcements(self) -> None:
        """A run that is over announces nothing; the agent may not have heard it when it ended."""
        now, folders = self.clock(), list[Path]()
        with suppress(OSError):
            folders = ledger.run_folders(self.root / "runs")
        for folder in folders:
            with suppress(OSError):  # one that cannot be looked into holds no other up
                if now - (folder / "run.json").stat().st_mtime > ANNOUNCED_AT_MOST_S:
                    continue
                told = record.load(folder)
                if told is not None and told["ended_at"] is not None:
                    tell.end_announcement(self.config.socket, folder.name)

    # --- the schedule -----------------------------------------------------------------------------------------------

    def run_due(self, drill: Drill, run: str, due_at: float) -> tuple[Verdict, str]:
        """A drill's time has come: hold it to its end, or say why not, or which node of the fleet has held it."""
        try:
            told = None if self.fleet is None else self.fleet.held(drill.name, due_at)
        except ClusterError as error:
            return Verdict.DEFERRED, str(error)
        if told is not None:
            return told
        try:
            self.start_run(drill.name, started_by="schedule", run=run, due_at=due_at)
        except LookupError as error:  # it was taken out of the configuration just now
            return Verdict.DEFERRED, str(error)
        except (RuntimeError, OSError) as error:
            self.defer(drill, run, due_at, str(error))
            return Verdict.DEFERRED, str(error)
        self._over.wait()
        kept = record.load(self.root / "runs" / run)
        return (Verdict(kept["verdict"]), kept["why"]) if kept else (Verdict.ABORTED, "it left no record")

    def skip(self, drill: Drill, run: str, due_at: float, why: str) -> None:
        """Write down a run that will not be, with its reasons. Raises RuntimeError, OSError."""
        folder = self._create(drill, run, started_by="schedule", due_at=due_at)
        runner.write_refused(folder, drill, Verdict.SKIPPED, why, self.clock)

    def defer(self, drill: Drill, run: str, due_at: float, why: str) -> None:
        """Write down a run that is not now and is tried again; where that cannot be written, the log has it."""
        try:
            folder = self._create(drill, run, started_by="schedule", due_at=due_at)
            runner.write_refused(folder, drill, Verdict.DEFERRED, why, self.clock)
        except (RuntimeError, OSError) as error:
            log.warning("deferred_not_written", run=run, why=why, error=str(error))

    def refuse(self, name: str, why: str, *, started_by: str) -> str:
        """Write down that a person was refused a run; its id. Raises LookupError, RuntimeError, OSError."""
        drill = self.drill_of(name)
        folder = self._create(drill, None, started_by=started_by, due_at=None)
        runner.write_refused(folder, drill, Verdict.SKIPPED, why, self.clock)
        return folder.name

    def last_run_at(self) -> float | None:
        """When a fault was last in on this node; a run that a clock wrong by days has put into the future is none."""
        ran = (p.at for p in schedule.history_of(self.root) if p.verdict not in schedule.NOT_RUN)
        return max((at for at in ran if is_past(at, self.clock())), default=None)

    def reload(self) -> None:
        """Take the drills of the configuration as it is now; a run under way goes on. A wrong one changes nothing."""
        sdnotify.reloading()
        try:
            config, rules = load_all(self.path, os.environ, CATALOGUE)
            self.drills, self.config, self.rules = drills_of(config, rules.rules), config, rules.rules
        except ConfigErrors as errors:
            log.error("configuration_kept", faults=[str(fault) for fault in errors.faults])  # noqa: TRY400
        if self.timetable is not None:
            self.timetable.load(self.drills, self.config.drill_guards.min_gap)
        sdnotify.ready(f"{self.config.node}: {len(self.drills)} drills")

    def tell_overdue(self) -> None:
        """A ticket for each drill that was due and did not run; none for one that is no drill any more."""
        try:
            past, now = schedule.history_of(self.root), self.clock()
        except OSError as error:
            log.warning("history_unreadable", root=str(self.root), error=str(error))
            return
        book = {} if self.timetable is None else self.timetable.book
        for drill in self.drills:
            seen = book.get(drill.name)
            known_at, verdict_at = (None, None) if seen is None else (seen.known_at, seen.verdict_at)
            tell.overdue(self.config.socket, drill.name, schedule.overdue(drill, past, now, known_at, verdict_at))
        for name in self._ticketed() - {drill.name for drill in self.drills}:
            tell.overdue(self.config.socket, name, None)

    def _ticketed(self) -> set[str]:
        """The drills that the agent has a ticket for, since whenever: removed or renamed, nobody would end theirs."""
        try:
            rows = client.ask(self.config.socket, "/alerts?resolved=0")
            return {str(row["subject"]) for row in rows if row["rule"] == NO_DRILL}
        except (client.NotRunning, client.AgentError, TypeError, LookupError):
            return set()

    def serve_for_ever(self) -> None:
        """Sweep, then hold what is due until stopped. Raises OSError, also where another drilld runs."""
        alone = only_one(self.root)
        self.sweep(at_start=True)
        server = serve(self)
        hands = schedule.Hands(self.run_due, self.skip, self.defer, self.active_of, self.last_run_at)
        self.timetable = schedule.Timetable(self.drills, hands, root=self.root, node=self.config.node or "",
                                            min_gap_s=self.config.drill_guards.min_gap, clock=self.clock)
        self.timetable.start()
        sdnotify.ready(f"{self.config.node}: {len(self.drills)} drills")
        log.info("started", drills=[d.name for d in self.drills], socket=str(socket_of(self.config)))
        try:
            while not self.stopping.is_set():
                self.sweep()
                self.tell_overdue()
                self.timetable.keep_time()
                sdnotify.alive()
                if self.woken.wait(SWEEP_EVERY_S) and not self.stopping.is_set():
                    self.woken.clear()
                    self.reload()
        finally:
            sdnotify.stopping()
            self.timetable.stop()
            self.abort("drilld, which stops")
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(RUNNER_ENDS_WITHIN_S)
            server.shutdown()
            server.server_close()
            socket_of(self.config).unlink(missing_ok=True)
            os.close(alone)


# --- the socket ------------------------------------------------------------------------------------------------------


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    daemon: Daemon


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        """A unix peer has no address."""
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """What is done is logged where it is done."""

    def do_GET(self) -> None:
        """The state; for root, the drill group and the agent, who may not look into the runs' folders, the runs."""
        daemon = self.server.daemon
        if self.path == "/":
            self._answer(200, {"drills": [d.name for d in daemon.drills], "run": daemon.active()})
        elif self._is_own() or self._permitted() is not None:
            self._try(lambda: self._tell(daemon))

    def do_POST(self) -> None:
        """run, abort, heal: for root and the drill group; the caller is recorded.

        A process of our own user (the agent, for who has the page's token) could kill us: it may abort, and no more.
        """
        daemon = self.server.daemon
        own = self.path == "/abort" and self._is_own()
        caller = (self._caller() or f"uid {os.getuid()}") if own else self._permitted()
        if caller is None:
            return
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            self._answer(400, {"error": 'send a JSON object, as {"name": "…"}'})
            return
        if own and asked.get("by"):  # the agent, for somebody whom the kernel does not know
            caller = f"{asked['by']} ({caller})"
        self._try(lambda: self._act(daemon, asked, caller))

    def _try(self, do: Callable[[], Any]) -> None:
        try:
            self._answer(200, do())
        except LookupError as error:
            self._answer(404, {"error": str(error.args[0])})
        except (RuntimeError, Refused) as error:
            self._answer(409, {"error": str(error)})
        except OSError as error:
            self._answer(500, {"error": str(error)})

    def _tell(self, daemon: Daemon) -> Any:
        asked = urlsplit(self.path)
        parts = asked.path.strip("/").split("/")
        if parts == ["runs"]:
            return history.runs(daemon.root)
        if parts == ["drills"]:
            return daemon.listed()
        if parts[0] == "runs" and len(parts) == 2:
            return daemon.told_of(parts[1])
        if parts[0] == "runs" and parts[2:] == ["report"]:
            form = parse_qs(asked.query).get("format", ["md"])[0]
            return {"text": daemon.report_of(parts[1], form)}
        raise LookupError(f"{asked.path}: there are /drills, /runs, /runs/RUN and /runs/RUN/report")

    def _act(self, daemon: Daemon, asked: Mapping[str, Any], caller: str) -> Mapping[str, Any]:
        if self.path == "/run":
            name = str(asked.get("name"))
            try:
                return {"run": daemon.start_run(name, started_by=caller,
                                                accept_unknown_budget=bool(asked.get("accept_unknown_budget")))}
            except Busy as busy:  # a refusal leaves a report
                return {"run": daemon.refuse(name, str(busy), started_by=caller)}
        if self.path == "/abort":
            return {"run": daemon.abort(caller)}
        if self.path == "/heal":
            left = daemon.heal(f"{caller}, by heal")
            return {"left": [{"what": one.what, "command": one.command} for one in left],
                    "released": daemon.release() if asked.get("release") else []}
        raise LookupError(f"{self.path}: there are /run, /abort and /heal")

    def _permitted(self) -> str | None:
        """Who asks; None where that one may not, which is answered."""
        caller = self._caller()
        if caller is None:
            self._answer(403, {"error": "drills are root's, and the drill_group's; use sudo"})
        return caller

    def _peer(self) -> tuple[int, int]:
        """uid and gid of who asks, as the kernel says."""
        told = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CRED.size)
        _, uid, gid = PEER_CRED.unpack(told)
        return uid, gid

    def _is_own(self) -> bool:
        """Whether a process of our own user asks, as the agent is."""
        return self._peer()[0] == os.getuid()

    def _caller(self) -> str | None:
        """Who asks, as the kernel says; None where that one may not."""
        uid, gid = self._peer()
        group = self.server.daemon.config.drill_group
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        if uid == 0:
            return f"{name} (uid 0)"
        with suppress(KeyError):
            if group is not None and (grp.getgrnam(group).gr_gid == gid or name in grp.getgrnam(group).gr_mem):
                return f"{name} (uid {uid}, group {group})"
        return None

    def _answer(self, status: int, told: Any) -> None:
        body = json.dumps(told).encode()
        self.send_response(status, http.client.responses[status])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(daemon: Daemon) -> UnixStreamServer:
    """Listen on drilld's socket; 0600, or 0660 for the drill group. Raises OSError."""
    path = socket_of(daemon.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    old = os.umask(0o177)
    try:
        server = _Server(str(path), _Handler)
    finally:
        os.umask(old)
    if daemon.config.drill_group is not None:
        with suppress(KeyError, PermissionError):
            os.chown(path, -1, grp.getgrnam(daemon.config.drill_group).gr_gid)
            path.chmod(SOCKET_MODE)
    server.daemon = daemon
    threading.Thread(target=server.serve_forever, name="drilld socket", daemon=True).start()
    return server


def obey(daemon: Daemon) -> None:
    """Wait for signals in a thread of its own: a handler could interrupt the very lock that it needs."""
    while True:
        if signal.sigwait(SIGNALS) != signal.SIGHUP:
            daemon.stopping.set()
        daemon.woken.set()


def main(argv: Sequence[str] | None = None) -> int:
    """The daemon's entry: 0 after a stop, 2 on a wrong configuration."""
    parser = argparse.ArgumentParser(prog="tocsin drilld", description="The drill daemon, in the foreground.")
    parser.add_argument("--config", type=Path, default=None, metavar="FILE")
    path: Path | None = parser.parse_args(argv).config
    try:
        config, rules = load_all(path, os.environ, CATALOGUE)
        daemon = Daemon(config, drills_of(config, rules.rules), rules.rules, path)
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)  # noqa: T201  (a person started this)
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # before any thread is: they all inherit it
    threading.Thread(target=obey, args=(daemon,), name="signals", daemon=True).start()
    try:
        daemon.serve_for_ever()
    except OSError as error:
        print(f"tocsin drilld: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
