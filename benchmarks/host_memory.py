"""What pages of 2 MiB save in a training step on CPU: the quickstart's WeDLM step with and without them.

    python -m benchmarks.host_memory

Each case is a process of its own, for glibc is set once; the two take turns, and the medians over the rounds are printed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import tyro

from wedlm_jax.errors import entry
from wedlm_jax.host_memory import TUNABLE

ROUNDS, STEPS = 3, 20


@dataclasses.dataclass(frozen=True)
class Flags:
    measure: bool = False
    """Internal: measure in this process and print JSON."""


def measure() -> dict[str, float]:
    """Seconds and page faults of one step, and the process's peak memory in KiB."""
    import jax
    import numpy as np

    from wedlm_jax.data.packing import PackedBatch
    from wedlm_jax.experiment import load_experiment
    from wedlm_jax.optimizer import OptimizerConfig
    from wedlm_jax.sharding import MeshConfig, make_mesh
    from wedlm_jax.train_state import from_seed
    from wedlm_jax.train_step import StepSettings, wedlm_step

    model = load_experiment("quickstart_base").model
    quickstart = load_experiment("quickstart")
    settings = StepSettings(model, quickstart.objective, OptimizerConfig(), mask_token_id=3, total_steps=100, seed=0)
    state = from_seed(model, settings.optimizer, make_mesh(MeshConfig()), seed=0)
    B, L = quickstart.train.batch_size, quickstart.data.row_length
    ones = np.ones((B, L), np.int32)
    positions = np.tile(np.arange(L, dtype=np.int32), (B, 1))
    batch = PackedBatch(ones, ones > 0, positions, ones, ones)
    update = jax.jit(functools.partial(wedlm_step, settings=settings), donate_argnums=0)
    state, metrics = update(state, batch)
    jax.block_until_ready(metrics)
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(STEPS):
        state, metrics = update(state, batch)
        jax.block_until_ready(metrics)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall": seconds / STEPS,
        "user": (after.ru_utime - before.ru_utime) / STEPS,
        "system": (after.ru_stime - before.ru_stime) / STEPS,
        "faults": (after.ru_minflt - before.ru_minflt) / STEPS,
        "peak": after.ru_maxrss,
    }


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    if flags.measure:
        print(json.dumps(measure()))
        return
    found: dict[str, list[dict[str, float]]] = {"4 KiB": [], "2 MiB": []}
    for _ in range(ROUNDS):
        for pages, results in found.items():
            run = [sys.executable, "-m", "benchmarks.host_memory", "--measure"]
            environment = os.environ | {"GLIBC_TUNABLES": f"{TUNABLE}={int(pages == '2 MiB')}"}
            done = subprocess.run(run, check=True, capture_output=True, text=True, env=environment)
            results.append(json.loads(done.stdout))
    print("| pages | wall, ms | user, ms | system, ms | page faults | peak memory, MiB |\n|---|---|---|---|---|---|")
    for pages, results in found.items():
        medians = {key: statistics.median(r[key] for r in results) for key in results[0]}
        wall, user, system = (1e3 * medians[key] for key in ("wall", "user", "system"))
        print(
            f"| {pages} | {wall:.0f} | {user:.0f} | {system:.0f} | {medians['faults']:,.0f} | {medians['peak'] / 1024:,.0f} |"
        )


if __name__ == "__main__":
    main()
