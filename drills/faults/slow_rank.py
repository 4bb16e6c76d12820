"""slow-rank: one GPU of a tensor-parallel group gets less power, as a bad power brake or a hot inlet does it.

By the power limit, which can be read back and put back. Not by locked clocks: NVML has no getter for what was locked
before. The limit outlives every process, so that it is in the plan, and undone from there alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from drills import gpu
from drills.gpu import Gpu
from drills.model import Command, Drill, Fault, Left, Plan, Refused, announces

NEEDS = ("root",)
SET_WITHIN_S = 10.0
SAMPLE_EVERY_S = 5.0
LOOK_WITHIN_S = 3.0  # of one sample: who says `revert` waits for it
BUSY = 50.0  # percent
SLOWER = 0.97  # a clock under this share of its busy peers' is not noise
SAME_W = 0.6  # limits are kept in milliwatts and shown in whole or hundredths of watts


class Slowed:
    """A power limit that was lowered."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: Mapping[str, Any] = {}
        self._next_at = 0.0

    def sample(self) -> Mapping[str, Any]:
        """The limit as it reads back, and clock and load of every GPU of the group; looked at each few seconds."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + SAMPLE_EVERY_S
            group = set(self._plan.facts["group"])
            found = [one for one in gpu.look(LOOK_WITHIN_S) if one.uuid in group]
            self._seen = {"gpus": {one.uuid: [one.power_limit_w, one.sm_clock_mhz, one.utilization] for one in found}}
        return self._seen

    def undo(self) -> None:
        """Put the limit back; may be called twice."""
        _put_back(self._plan)


class SlowRank:
    """The fault."""

    name = "slow-rank"

    def plan(self, drill: Drill, run: str) -> Plan:
        """Find the GPU and what its limit may be. Raises Refused."""
        gpus = gpu.look()
        one, group = _chosen(drill, gpus)
        prior, least = one.power_limit_w, one.power_least_w
        if prior is None or least is None:
            raise Refused(f"{one.uuid}: NVML does not tell its power limit and the range of it: nothing to put back")
        share = drill.params.get("share")
        limit = least if share is None else max(least, prior * float(share))
        if limit > prior - 1.0:
            raise Refused(f"{one.uuid}: {prior:g} W are its limit, and {limit:g} W would be: nothing to do")
        return Plan(
            fault=self.name,
            run=run,
            targets=[f"{one.uuid} (index {one.index}), one of {len(group)} GPUs of the engine"],
            commands=[Command(f"nvidia-smi -i {one.uuid} -pl {limit:g}", f"of {prior:g} W; {least:g} W is the least")],
            undo=[Command(f"nvidia-smi -i {one.uuid} -pl {prior:g}", "only if it is still ours")],
            facts={"uuid": one.uuid, "prior_w": prior, "limit_w": limit, "group": [member.uuid for member in group]},
            notes=["a power limit outlives drilld: it is undone by the holder, at its start, or by tocsin drill heal",
                   "the driver calls this a software power cap, which rank-clock-spread takes for noise on purpose"],
            needs=NEEDS,
            expects=announces(self.name, None),
            blast={"replicas": 1},
        )

    def inject(self, plan: Plan, injector_fds: Sequence[int]) -> Slowed:
        """Lower the limit. Raises Refused."""
        uuid, limit, prior = (plan.facts[name] for name in ("uuid", "limit_w", "prior_w"))
        now = gpu.find(str(uuid), gpu.look())
        if now is None or now.power_limit_w is None or abs(now.power_limit_w - prior) > SAME_W:
            told = "is gone" if now is None else f"has a limit of {now.power_limit_w} W"
            raise Refused(f"slow-rank: {uuid} {told}, and had {prior:g} W in the plan; plan again")
        _set(str(uuid), float(limit), injector_fds)
        return Slowed(plan)

    def proven(self, plan: Plan, samples: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """The limit reads back in each sample, and under load the clock is below that of its busy peers."""
        uuid, limit = plan.facts["uuid"], float(plan.facts["limit_w"])
        seen = [sample["gpus"] for sample in samples if sample.get("gpus", {}).get(uuid)]
        if not seen:
            return False, "no sample was taken"
        limits = [gpus[uuid][0] for gpus in seen]
        if any(told is None or abs(told - limit) > SAME_W for told in limits):
            return False, f"the power limit read back as {limits[-1]} W, asked {limit:g} W"
        slower = [pair for gpus in seen if (pair := _clocks(gpus, uuid)) and pair[0] < SLOWER * pair[1]]
        told = f"the power limit reads back as {limit:g} W (was {plan.facts['prior_w']:g} W) in {len(seen)} samples"
        if not slower:
            busy = any(_clocks(gpus, uuid) for gpus in seen)
            why = "its clock is that of its peers" if busy else "it was never busy beside busy peers"
            return False, f"{told}; {why}"
        own, peers = min(slower)
        return True, f"{told}; busy, its SM clock was down to {own:g} MHz beside {peers:g} MHz"

    def left(self, plan: Plan) -> list[Left]:
        """Our limit, where it is still set. Raises Refused: NVML cannot be asked."""
        uuid, limit, prior = (plan.facts[name] for name in ("uuid", "limit_w", "prior_w"))
        if not _is_ours(plan, gpu.find(str(uuid), gpu.look())):
            return []
        told = f"the power limit of {uuid} is {limit:g} W, it was {prior:g} W"
        return [Left(told, f"nvidia-smi -i {uuid} -pl {prior:g}")]

    def undo(self, plan: Plan) -> None:
        """Put the limit back, unless somebody has set another since. Raises Refused."""
        _put_back(plan)


def _chosen(drill: Drill, gpus: Sequence[Gpu]) -> tuple[Gpu, list[Gpu]]:
    """The GPU that shall be slow, and its engine's. Raises Refused."""
    indices = list(drill.target.get("gpus") or ())
    by_index = {one.index: one for one in gpus}
    missing = [index for index in indices if index not in by_index]
    if missing or len(indices) < 2:  # one alone has no peers to be slower than
        told = f"GPU {missing[0]} is not listed by NVML" if missing else f"the engine has {len(indices)} under `gpus:`"
        raise Refused(f"slow-rank needs an engine on two GPUs or more: {told}")
    group = [by_index[index] for index in indices]
    uuid, part = drill.target.get("gpu"), str(drill.target.get("part", "rank:0"))
    if uuid is not None:
        found = gpu.find(str(uuid), group)
        if found is None:
            raise Refused(f"target.gpu {uuid} is not one of the engine's: {', '.join(one.uuid for one in group)}")
        return found, group
    rank = int(part.removeprefix("rank:")) if part.startswith("rank:") else -1
    if not 0 <= rank < len(group):
        raise Refused(f"target.part {part}: the engine has rank:0 to rank:{len(group) - 1}")
    return group[rank], group


def _clocks(gpus: Mapping[str, Sequence[float | None]], uuid: str) -> tuple[float, float] | None:
    """Its clock and the slowest of its peers', while all of them are busy; None where they are not."""
    rows = dict(gpus)
    own = rows.pop(uuid)
    if not rows or any(row[1] is None or (row[2] or 0.0) < BUSY for row in (own, *rows.values())):
        return None
    return float(own[1] or 0.0), min(float(row[1] or 0.0) for row in rows.values())


def _is_ours(plan: Plan, now: Gpu | None) -> bool:
    """Whether the limit is the one that this run set. A reboot or a person may have set another."""
    return now is not None and now.power_limit_w is not None and (
        abs(now.power_limit_w - float(plan.facts["limit_w"])) <= SAME_W
    )


def _set(uuid: str, watts: float, inherit: Sequence[int] = ()) -> None:
    status, said = gpu.smi(["-i", uuid, "-pl", f"{watts:g}"], SET_WITHIN_S, inherit)
    if status != 0:
        raise Refused(f"nvidia-smi -i {uuid} -pl {watts:g}: {' '.join(said.split())} (exit {status}); it needs root")


def _put_back(plan: Plan) -> None:
    uuid = str(plan.facts["uuid"])
    if _is_ours(plan, gpu.find(uuid, gpu.look())):
        _set(uuid, float(plan.facts["prior_w"]))


FAULT: Fault = SlowRank()
