"""An engine of two processes for tests: a page that listens, and a core of several threads that count.

`python -m tests.drills.engine_stub FOLDER` prints the port. All of it ends when its standard input does; the core
outlives a killed page, as vLLM's does. FOLDER/core.count grows while the core runs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

THREADS = 4


def core(folder: Path) -> None:
    """Count in one thread, sleep in the others, until standard input ends."""
    count = folder / "core.count"

    def beat() -> None:
        n = 0
        while True:
            n += 1
            count.write_text(str(n))
            time.sleep(0.005)

    threading.Thread(target=beat, daemon=True).start()
    for _ in range(THREADS - 2):
        threading.Thread(target=time.sleep, args=(3600.0,), daemon=True).start()
    sys.stdin.buffer.read()


def page(folder: Path) -> None:
    """Listen and never answer; the core is a child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        subprocess.Popen([sys.executable, "-m", "tests.drills.engine_stub", str(folder), "core"])
        while not (folder / "core.count").exists():
            time.sleep(0.005)
        print(listening.getsockname()[1], flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if sys.argv[2:] == ["core"]:
        core(where)
    else:
        page(where)
    os._exit(0)
