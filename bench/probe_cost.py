"""What tocsin-probe costs a step of vLLM: a real engine, in one process, with the probe on and off in turns.

`python -m bench.probe_cost` (from the repository's root; needs `make vllm`). Every other step is one without, so that
what else the machine does falls on both; CPU time of the one thread that does it all, front end, scheduler and rank.
The model is small (8 layers of 256), and a step so short that its share is an upper bound of what a served model sees.
Collectives need several ranks and so several processes: what the watching of one costs is measured alone. On CUDA 63 of
64 steps are not timed: that cost is set against a step of STEP_MS with COLLECTIVES of them.
Prints `name value unit goal ok|short`; exits 1 when short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engine.vllm import PYTHON, write_model

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.005
LARGER = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
          "num_key_value_heads": 4, "head_dim": 64}
STEP_MS, COLLECTIVES = 20.0, 160  # a 70B model of 80 layers on 4 GPUs, eager

INSIDE = """
import json, random, statistics, sys, time
steps, chunk = int(sys.argv[2]), 50
import tocsin_probe
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
          distributed_executor_backend="uni", disable_log_stats=False)
from tocsin_probe import seams
probe = seams._probe
sewn = []
for seam in seams.SEAMS:
    owner = getattr(sys.modules.get(seam.module), seam.owner, None)
    for method in seam.methods:
        wrapped = vars(owner).get(method.rstrip("?")) if owner else None
        if wrapped is not None and hasattr(wrapped, "_tocsin"):
            sewn.append((owner, method.rstrip("?"), wrapped))

def switch(on):
    for owner, method, wrapped in sewn:
        setattr(owner, method, wrapped if on else wrapped.__wrapped__)

engine, asked = llm.llm_engine, SamplingParams(max_tokens=900, min_tokens=900, ignore_eos=True, temperature=0)
number = 0
def feed():
    global number
    while engine.get_num_unfinished_requests() < 8:
        engine.add_request(str(number), "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10", asked); number += 1
feed()
for _ in range(50):
    engine.step()
took, shares = {True: [], False: []}, []
for _ in range(steps // (2 * chunk)):
    feed()
    mine = {True: [], False: []}
    for _ in range(chunk):
        for on in random.sample((True, False), 2):  # who is first must not matter
            switch(on)
            began = time.thread_time(); engine.step(); mine[on].append(time.thread_time() - began)
    shares.append(statistics.median(mine[True]) / statistics.median(mine[False]) - 1)
    for on in mine:
        took[on] += mine[on]
switch(True)
spent = [0]
def timed(watcher, name):  # the probe's own code where it runs, its caches as cold as they are there
    function = getattr(watcher, name)
    def wrapper(*args, **kwargs):
        began = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter_ns() - began
    setattr(watcher, name, wrapper)
for watcher, name in ((probe.front, "looked"), (probe.queue, "scheduled"), (probe.queue, "left"),
                      (probe.rank, "begin"), (probe.rank, "end"), (probe.rank, "dispatched")):
    timed(watcher, name)
feed()
for _ in range(300):
    engine.step()
quarters = statistics.quantiles(shares, n=4)
half = 1.57 * (quarters[2] - quarters[0]) / len(shares) ** 0.5  # of a median's 95 % interval (McGill's notch)
rank, n = probe.rank, 20000
class Group:
    def _all_reduce_out_place(self, input_): return input_
bare = Group._all_reduce_out_place
watched, group = seams.WRAPPERS["collectives"](probe, "_all_reduce_out_place", bare), Group()
def one(function, timing):
    rank.timing, spent = timing, []
    for _ in range(9):
        began = time.thread_time()
        for _ in range(n):
            function(group, None)
        spent.append((time.thread_time() - began) / n)
    rank.timing = False
    return min(spent)
bare_s = one(bare, False)
passed_s, timed_s = one(watched, False) - bare_s, one(watched, True) - bare_s
print("RESULT" + json.dumps({"sewn": len(sewn), "seams": probe.seams, "pairs": len(took[True]),
      "off_ms": 1000 * statistics.median(took[False]), "on_ms": 1000 * statistics.median(took[True]),
      "share": statistics.median(shares), "half": half, "own_us": spent[0] / 300 / 1000,
      "passed_us": 1e6 * passed_s, "timed_us": 1e6 * timed_s,
      "counted": rank._counts["steps"]}))
"""


def measure(folder: Path, steps: int, memory: str) -> dict[str, float]:
    """Run the engine, and what it printed last."""
    site = folder / "site"
    about = site / "tocsin_probe-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tocsin-probe\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ntocsin = tocsin_probe:register\n")
    env = {**os.environ, "PYTHONPATH": f"{site}:{ROOT / 'probe'}", "TOCSIN_PROBE_DIR": memory, "OMP_NUM_THREADS": "1",
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
           "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "HOME": str(folder)}
    model = write_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | LARGER))
    done = subprocess.run([str(PYTHON), "-c", INSIDE, str(model), str(steps)], env=env,
                          cwd=folder, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not told:
        sys.exit(f"vLLM did not finish:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(told[-1].removeprefix("RESULT"))
    return result


def main() -> int:
    """Measure, and print `name value unit goal ok|short`; 1 when short."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--short", action="store_true", help="the form of at most 90 s, with less to stand on")
    asked = parser.parse_args()
    steps = 1_500 if asked.short else asked.steps
    if not PYTHON.exists():
        print("probe_cost not measured: there is no vLLM here (make vllm)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        got = measure(Path(folder), steps, memory)
    of_all = COLLECTIVES * got["passed_us"] / 1000 / STEP_MS
    print(f"{got['sewn']} methods sewn, {got['pairs']} pairs of steps: {got['off_ms']:.3f} ms off,"
          f" {got['on_ms']:.3f} ms on, 95 % of the median: ± {got['half']:.2%};"
          f" its own code {got['own_us']:.0f} µs of a step in the mean;"
          f" a collective {got['passed_us']:.2f} µs, {got['timed_us']:.2f} µs where it is timed")
    told = {"probe_share_of_a_step": got["share"],
            f"probe_share_of_{COLLECTIVES}_collectives_in_{STEP_MS:.0f}_ms": of_all}
    for name, share in told.items():
        print(f"{name} {100 * share:.2f} % <={100 * GOAL:g} {'ok' if share <= GOAL else 'short'}")
    return int(max(told.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
