"""The demo's own entry of the real agent: all of `tocsin run`, with simulated GPUs in NVML's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as in agent.daemon: structlog would take rich along
    sys.modules["rich"] = None  # type: ignore[assignment]

from agent import daemon
from agent.demo.gpus import SimulatedGpus

GPUS_FILE = "TOCSIN_DEMO_GPUS"

if __name__ == "__main__":
    sys.exit(daemon.main(gpus=lambda: [SimulatedGpus(Path(os.environ[GPUS_FILE]))]))
