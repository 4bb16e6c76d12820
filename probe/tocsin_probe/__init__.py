"""Tocsin's probe inside vLLM: what no metric of it tells, in one small file in memory for each of its processes.

vLLM calls `register` in every one of its processes (entry point `vllm.general_plugins`). Nothing that happens here may
raise into the engine or block it: each seam works, or stands aside and says why in the file.
"""

from __future__ import annotations

import logging
import os

__version__ = "0.1.0"
FOLDER = "/run/tocsin/probe"
FOLDER_NAME = "TOCSIN_PROBE_DIR"  # in the engine's environment; empty: the probe is off
log = logging.getLogger("vllm.tocsin_probe")  # under vLLM's own: its format and its level


def register() -> None:
    """Set the seams of this process. May be called again; never raises."""
    try:
        folder = os.environ.get(FOLDER_NAME, FOLDER)
        if folder:
            from tocsin_probe.seams import install

            install(folder)
    except Exception as error:  # an exception here would end vLLM's process
        log.warning("tocsin-probe stands aside: %s: %s", type(error).__name__, error)
