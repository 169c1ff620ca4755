"""The quickstart with several training seeds: what it reaches, and how far seeds differ.

    python -m benchmarks.quickstart_seeds --seeds 0 1 2

Trains base and adaptation for every seed under runs/seeds/SEED (what is finished there is kept), evaluates each, and
prints one Markdown row for every decoder and task with the value of each seed. About nine minutes a seed on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tyro


@dataclasses.dataclass(frozen=True)
class Flags:
    seeds: tuple[int, ...] = (0, 1, 2)
    """Training seeds; the held-out problems are the same for all."""
    folder: Path = Path("runs/seeds")
    """Where the runs go."""


def command(*arguments: str) -> float:
    """Runs one command of wedlm_jax; its wall-clock seconds."""
    print("$ python -m", *arguments, flush=True)
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", *arguments], check=True)
    return time.perf_counter() - begun


def run_seed(seed: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of one seed's results table."""
    base, adapted = folder / str(seed) / "base", folder / str(seed) / "adapted"
    train = ("wedlm_jax.train", "--exp")
    seconds = {
        "base": command(*train, "quickstart_base", "--workdir", str(base), f"train.seed={seed}"),
        "adapted": command(*train, "quickstart", "--workdir", str(adapted), f"train.seed={seed}", f"init_from={base}"),
        "evaluation": command("wedlm_jax.evaluate", "--exp", "quickstart", "--workdir", str(adapted)),
    }
    print(f"seed {seed}: " + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()), flush=True)
    return json.loads((adapted / "evaluation" / "results.json").read_text())["rows"]


def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    by_seed = [run_seed(seed, flags.folder) for seed in flags.seeds]
    print(f"\nseeds {', '.join(map(str, flags.seeds))}, n = {by_seed[0][0]['n']} held-out problems a task\n")
    print("| task | decoder | exact match, % | tokens per forward | p_cache | speed-up over AR | equal to AR |")
    print("|---|---|---|---|---|---|---|")
    for rows in zip(*by_seed, strict=True):
        first = rows[0]

        def cells(key: str, form: str, scale: float = 1.0, rows: tuple[dict[str, Any], ...] = rows) -> str:
            return " / ".join("-" if row[key] is None else format(scale * row[key], form) for row in rows)

        print(
            f"| {first['task']} | {first['label']} | {cells('accuracy', '.0f', 100)} | {cells('tokens_per_forward', '.2f')} "
            f"| {cells('p_cache', '.2f')} | {cells('speedup_over_ar', '.2f')} | {cells('equal_to_ar', '.0f')} |"
        )


if __name__ == "__main__":
    main()
