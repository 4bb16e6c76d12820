"""systemd's journal, for who may not read /dev/kmsg and is in the group systemd-journal: read by `journalctl`.

journald marks what it reads from the kernel with _TRANSPORT=kernel, which no client can set, and keeps the facility
(systemd.journal-fields(7)): a line that a user wrote to /dev/kmsg is there with SYSLOG_FACILITY=1 and is told apart as
in /dev/kmsg itself. Older versions leave the kernel's own facility out; the user's they keep.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.hardware.lines import Record, entry_of, field_of
from agent.sources.log_files import CHUNK_BYTES, When

FOLDERS = (Path("/var/log/journal"), Path("/run/log/journal"))
MACHINE_ID = Path("/etc/machine-id")
FIELDS = "MESSAGE,SYSLOG_FACILITY,SYSLOG_IDENTIFIER,_TRANSPORT"
MISSED_ID = "e9bf28e6e834481bb6f48f548ad13606"  # SD_MESSAGE_JOURNAL_MISSED, by journald itself
MISSED = re.compile(r"Missed (\d{1,12}) kernel messages")
CURSOR = re.compile(r"[a-z]=[0-9a-f]+(?:;[a-z]=[0-9a-f]+)*")
MOST_SAID = 400  # of what journalctl complains of, in characters
MOST_LINE_BYTES = 1 << 20


def folder_here(folders: Sequence[Path], machine_id: Path) -> Path | str:
    """The folder of this machine's own journal that this user may read; else why there is none."""
    try:
        name = machine_id.read_text().strip()
    except OSError as error:
        return f"no journal: {machine_id}: {error.strerror or error}"
    if shutil.which("journalctl") is None:
        return "no journal: journalctl is not installed"
    there = [folder / name for folder in folders if (folder / name).is_dir()]
    if not there:
        return f"no journal of this machine in {' or '.join(map(str, folders))}"
    return next((folder for folder in there if is_readable(folder)), f"{there[0]}: this user may not read it")


def is_readable(folder: Path) -> bool:
    """Whether the system's journal in a folder can be read. journalctl shows a user's own alone without a word."""
    return any(os.access(path, os.R_OK) for pattern in ("system*.journal", "*/system*.journal")
               for path in folder.glob(pattern))


class Journal:
    """The kernel's records in the journal of one folder: first those since the cursor, then what comes."""

    def __init__(self, folder: Path, cursor: Mapping[str, Any], boot: str) -> None:
        """Raises OSError where the folder cannot be read."""
        if not is_readable(folder):
            raise PermissionError(13, "no system journal that this user may read; it needs the group systemd-journal",
                                  str(folder))
        known = cursor.get("journal")
        self._folder, self._boot = folder, boot
        self._known = str(known) if CURSOR.fullmatch(str(known)) else None
        self._when = When.BEFORE if self._known else When.FIRST
        self.cursor: dict[str, Any] = {"boot": boot, "journal": self._known}
        self.lost, self.behind = 0, True
        self._rest, self._said = b"", ""
        self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        since = [f"--after-cursor={self.cursor['journal']}"] if self.cursor["journal"] else []
        follow = [] if self.behind else ["--follow", "--no-tail"]
        # of a journal that no run of ours has read only what this boot told
        here = [] if since else [f"_BOOT_ID={self._boot.replace('-', '')}"]
        told = [*here, "_TRANSPORT=kernel", "+", *here, "_TRANSPORT=driver", f"MESSAGE_ID={MISSED_ID}"]
        child = subprocess.Popen(
            ["journalctl", f"--directory={self._folder}", "--output=json", f"--output-fields={FIELDS}", "--all",
             "--quiet", "--no-pager", *since, *follow, *told],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"})
        self._out, self._err = _fd(child.stdout), _fd(child.stderr)
        self._poll = select.poll()
        for fd in (self._out, self._err):
            self._poll.register(fd, select.POLLIN)
        return child

    def records(self) -> Iterator[tuple[Record, When]]:
        """What has come. Raises OSError when journalctl has ended."""
        while True:
            self._said = (self._said + (_read(self._err) or b"").decode("utf-8", "replace"))[-MOST_SAID:]
            chunk = _read(self._out)
            if chunk is None:
                return
            if not chunk:
                self._go_on()
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[-MOST_LINE_BYTES:]
            for line in lines:
                record = self._record(line)
                if record is not None:
                    yield record, self._when

    def _go_on(self) -> None:
        """The end of what was there: from here on follow."""
        status = self._child.wait()
        if status != 0 or not self.behind:
            said = self._said.strip().replace("\n", "; ") or "it said nothing"
            raise OSError(f"journalctl ended with status {status}: {said}")
        self.close()
        self._rest, self._when, self.behind = b"", When.LIVE, False
        self._child = self._start()

    def _record(self, line: bytes) -> Record | None:
        """One entry; None for what is none of the kernel's."""
        try:
            entry = json.loads(line)
            cursor, record = str(entry["__CURSOR"]), entry_of(entry)
        except (ValueError, KeyError, TypeError):
            return None
        self.cursor["journal"] = cursor
        message = field_of(entry.get("MESSAGE"))
        if entry.get("_TRANSPORT") == "driver":
            missed = MISSED.match(message)
            self.lost += int(missed[1]) if missed and self._when is not When.FIRST else 0
            return None
        return record

    def wait(self, timeout_s: float) -> None:
        """Until there may be more."""
        self._poll.poll(timeout_s * 1000)

    def close(self) -> None:
        """End journalctl."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()


def _fd(pipe: Any) -> int:
    fd: int = pipe.fileno()
    os.set_blocking(fd, False)
    return fd


def _read(fd: int) -> bytes | None:
    """What there is; b"" at the end, None where there may be more later."""
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None

