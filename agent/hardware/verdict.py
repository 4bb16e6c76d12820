"""A verdict on each GPU, for scripts and people: what of the signals speaks against it, by a stable code. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agent.model import GpuFacts, MigFacts

Verdict = Literal["HEALTHY", "WATCH", "DRAIN", "REPLACE", "UNKNOWN"]
VERDICTS: tuple[Verdict, ...] = ("HEALTHY", "WATCH", "DRAIN", "REPLACE", "UNKNOWN")
# Rule -> (code, what its finding makes of a GPU). Codes never change; those of Xids are "xid.79", "sxid.20034".
RULES: Mapping[str, tuple[str, Verdict]] = {
    "xid-gpu": ("xid", "DRAIN"), "xid-memory": ("xid", "DRAIN"), "xid-link": ("xid", "DRAIN"),
    "xid-app": ("xid", "WATCH"), "xid-ticket": ("xid", "WATCH"), "xid-note": ("xid", "HEALTHY"),
    "gpu-lost": ("gpu.lost", "DRAIN"), "gpu-count": ("gpu.count", "DRAIN"),
    "driver-mismatch": ("driver.mismatch", "WATCH"), "device-access": ("device.access", "WATCH"),
    "gpu-recovery": ("recovery", "DRAIN"), "gpu-ecc-uncorrected": ("ecc.uncorrected", "WATCH"),
    "gpu-ecc-rate": ("ecc.rate", "WATCH"), "gpu-remap-pending": ("remap.pending", "WATCH"),
    "gpu-remap-failed": ("remap.failed", "REPLACE"), "gpu-spare-rows": ("remap.exhausted", "WATCH"),
    "gpu-retired-pages": ("retired.pages", "WATCH"), "gpu-memory-temperature": ("temperature.memory", "WATCH"),
    "gpu-temperature": ("temperature.high", "WATCH"), "gpu-thermal-limit": ("temperature.limit", "DRAIN"),
    "gpu-nvlink-down": ("nvlink.down", "DRAIN"), "gpu-nvlink-recovery": ("nvlink.recovery", "WATCH"),
    "gpu-nvlink-errors": ("nvlink.errors", "WATCH"), "gpu-pcie-link": ("pcie.link", "WATCH"),
    "gpu-pcie-replays": ("pcie.replays", "WATCH"), "gpu-fabric": ("fabric.state", "DRAIN"),
    "gpu-power-brake": ("throttle.power_brake", "DRAIN"), "gpu-thermal-slowdown": ("throttle.thermal", "DRAIN"),
    "gpu-persistence": ("persistence.off", "HEALTHY"),
    "kernel-log-forged": ("log.forged", "HEALTHY"), "kernel-log-gap": ("log.gap", "HEALTHY"),
}  # fmt: skip
MIG_INSTANCES = "gpu_mig_instances"  # found so where NVML does not list them
RANK: Mapping[str, int] = {"HEALTHY": 0, "UNKNOWN": 1, "WATCH": 2, "DRAIN": 3, "REPLACE": 4}
# The action of a finding says more than its rule does.
BY_ACTION: Mapping[str, Verdict] = {"replace": "REPLACE"}
OVERALL: Mapping[str, str] = {"HEALTHY": "healthy", "WATCH": "ticket", "DRAIN": "page", "REPLACE": "page",
                              "UNKNOWN": "unknown"}
NEXT: Mapping[Verdict, str] = {
    "HEALTHY": "nothing", "WATCH": "look at it in the morning", "DRAIN": "take load off it now",
    "REPLACE": "take it out of service; RMA", "UNKNOWN": "tocsin doctor says what cannot be read, and why",
}  # fmt: skip
Row = Mapping[str, Any]  # of `check`


def _findings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What speaks against a subject, the worst first."""
    found = []
    for row in rows:
        if row["state"] not in ("BREACH", "PENDING"):
            continue
        code, verdict = RULES[row["rule"]]
        evidence = row["evidence"]
        if code == "xid" and verdict == "DRAIN":
            verdict = BY_ACTION.get(str(evidence.get("action")), verdict)
        elif code == "recovery":
            code = f"recovery.{evidence.get('action')}"
        for one in evidence.get("codes") or [code]:
            found.append({"code": one, "verdict": verdict, "severity": row["severity"], "rule": row["rule"],
                          "pending": row["state"] == "PENDING", "value": row["value"], "unit": row["unit"],
                          "text": row["text"], "do": row["action"]})
    return sorted(found, key=lambda f: -RANK[f["verdict"]])


def _unchecked(rows: Sequence[Row]) -> list[dict[str, str]]:
    """What could not be checked, each with why."""
    return [{"code": RULES[row["rule"]][0], "rule": row["rule"], "why": row["why"] or "",
             "state": row["state"]} for row in rows if row["state"] in ("UNKNOWN", "N/A")]


def _unseen_instances(facts: GpuFacts) -> list[dict[str, str]]:
    """Why the MIG instances of a GPU are not judged; the GPU itself is all the same."""
    return [{"code": "mig.instances", "rule": "", "why": found.why or "", "state": "UNKNOWN"} for found in facts.found
            if found.name == MIG_INSTANCES]


def _verdict(rows: Sequence[Row], found: Sequence[Mapping[str, Any]]) -> Verdict:
    worst: Verdict = max((f["verdict"] for f in found), key=RANK.__getitem__, default="HEALTHY")
    if worst != "HEALTHY":
        return worst
    seen = any(row["state"] in ("OK", "IDLE") and row["rule"] != "xid-note" for row in rows)
    blind = any(row["state"] == "UNKNOWN" for row in rows)
    return "UNKNOWN" if blind or not seen else "HEALTHY"


def _of_instance(one: MigFacts, rows: Sequence[Row], gpu: Mapping[str, Any]) -> dict[str, Any]:
    """A MIG instance is as well as itself and its GPU are; without a finding of its own it is what its GPU is."""
    own = _of(one.uuid, rows)
    if not own["findings"] or RANK[own["verdict"]] < RANK[gpu["verdict"]]:
        own |= {name: gpu[name] for name in ("verdict", "code", "do")}
        own["text"] = f"its GPU {gpu['index']}: {gpu['text']}"
    return own | {"index": gpu["index"], "name": one.name, "bdf": gpu["bdf"],
                  "mig": {"gpu": gpu["subject"], "gi": one.gi, "ci": one.ci}}


def _of(subject: str, rows: Sequence[Row]) -> dict[str, Any]:
    found = _findings(rows)
    verdict = _verdict(rows, found)
    unchecked = _unchecked(rows)
    first = found[0] if found and RANK[verdict] > RANK["UNKNOWN"] else None
    unknown = next((u for u in unchecked if u["state"] == "UNKNOWN"), None)
    if first is not None:
        code, text, do = first["code"], first["text"], first["do"]
    elif verdict == "UNKNOWN":
        code = None if unknown is None else unknown["code"]
        text = "it could not be read" if unknown is None else f"cannot tell {unknown['code']}: {unknown['why']}"
        do = NEXT[verdict]
    else:
        code, text, do = None, f"{sum(row['state'] == 'OK' for row in rows)} checks in range", NEXT[verdict]
    return {"subject": subject, "verdict": verdict, "code": code, "text": text, "do": do, "findings": found,
            "unchecked": unchecked}


def _place(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """GPUs by index, each with its MIG instances behind it; what has no index last."""
    mig = entry["mig"]
    of = entry["subject"] if mig is None else mig["gpu"]
    return entry["index"] is None, entry["index"] or 0, of, *((-1, -1) if mig is None else (mig["gi"], mig["ci"]))


def verdicts(rows: Sequence[Row], gpus: Mapping[str, GpuFacts], node: str) -> dict[str, Any]:
    """{"verdict", "node", "gpus": […], "node_findings": […], "why"} from the rows of `check`.

    A GPU's entry: subject (its UUID, or the PCI address of what has none), index, name, bdf, verdict, code, text, do,
    findings, unchecked, mig. A MIG instance has an entry of its own after its GPU's, with that GPU's index and address
    and `mig`: {"gpu": UUID, "gi", "ci"}; of others `mig` is None. `verdict` overall is as `check` has it: healthy,
    ticket, page, unknown.
    """
    mine = [row for row in rows if row["rule"] in RULES]
    of_node = [row for row in mine if row["subject"] == node]
    instances = {one.uuid: one for facts in gpus.values() for one in facts.instances}
    subjects = dict.fromkeys([*gpus, *(row["subject"] for row in mine if row["subject"] not in (node, *instances))])
    entries = []
    for subject in subjects:
        facts = gpus.get(subject)
        more = {"index": None if facts is None else facts.index, "name": None if facts is None else facts.name,
                "bdf": subject if facts is None else facts.bdf, "mig": None}
        of_gpu = _of(subject, [row for row in mine if row["subject"] == subject]) | more
        of_gpu["unchecked"] += () if facts is None else _unseen_instances(facts)
        entries.append(of_gpu)
        entries += [_of_instance(one, [row for row in mine if row["subject"] == one.uuid], of_gpu)
                    for one in (() if facts is None else facts.instances)]
    entries.sort(key=_place)
    whole = _of(node, of_node)
    judged = [entry["verdict"] for entry in entries] or ["UNKNOWN"]
    worst = max([*judged, *([whole["verdict"]] if whole["findings"] else [])], key=RANK.__getitem__)
    why = None if entries else "no GPU was seen: NVML shows none (`tocsin doctor`)"
    return {"verdict": OVERALL[worst], "why": why, "node": node, "gpus": entries, "node_findings": whole["findings"],
            "node_unchecked": whole["unchecked"]}
