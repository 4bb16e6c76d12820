"""Every fault that this version has."""

from __future__ import annotations

from drills.faults import (
    disk_full,
    engine_hang,
    gpu_reset,
    packet_loss,
    pod_kill,
    process_kill,
    slow_rank,
    upstream_timeout,
)
from drills.model import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        process_kill.FAULT, engine_hang.FAULT, disk_full.FAULT, packet_loss.FAULT, upstream_timeout.FAULT,
        gpu_reset.FAULT, slow_rank.FAULT, pod_kill.FAULT,
    )
}
