"""The quickstart with several training seeds: the base, all of its parameters adapted, an adapter beside it, prompt lookup.

    python -m benchmarks.quickstart_seeds --seeds 0 1 2

For every seed trains what is missing under runs/seeds/SEED (base, adapted, adapter), decodes the held-out problems with each
and counts whose text is that of the base's AR decoding, and prints one Markdown table. What is finished is kept, the measured
rows (SEED/decoded.json) too, for the --limit that they were decoded with, until anything of their seed is trained. About 12
minutes of training and 2 of decoding a seed, on two CPU cores.

A cell is the mean over the seeds with Student's 95 % interval for it, which is wide for three seeds and says nothing about
other problems. Training seconds are the steps at the median rate of the run's log: without compiling, starting and saving.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from scipy.stats import t as student

from benchmarks.side_by_side import machine
from wedlm_jax.checkpoint import saved_steps
from wedlm_jax.errors import entry
from wedlm_jax.evals.sweep import Row, Setting, sweep
from wedlm_jax.evals.tasks import task
from wedlm_jax.evaluate import load_exact
from wedlm_jax.experiment import Experiment, load_experiment
from wedlm_jax.metrics.writers import read_metrics
from wedlm_jax.model.adapter import split_adapter
from wedlm_jax.model.parameters import params_of
from wedlm_jax.results import write_json

# Folder of a seed -> the experiment that is trained there; those behind the first start from it.
EXPERIMENTS = {"base": "quickstart_base", "adapted": "quickstart", "adapter": "quickstart_adapter"}
DECODED = "decoded.json"  # in the folder of a seed
AR = "AR: the base"
AR_ADAPTED = "AR: all parameters adapted"
SHOWN = {  # label -> the folder whose training it needs
    AR: None,
    "prompt lookup: the base": None,
    "verified: all parameters adapted": "adapted",
    "verified: an adapter beside the base": "adapter",
}


@dataclasses.dataclass(frozen=True)
class Flags:
    seeds: tuple[int, ...] = (0, 1, 2)
    """Training seeds; the held-out problems are the same for all."""
    folder: Path = Path("runs/seeds")
    """Where the runs go."""
    limit: int = 200
    """Problems a task at most."""
    again: bool = False
    """Decode again although it was done: the machine is idle now."""


def finished(workdir: Path) -> bool:
    steps = saved_steps(workdir)
    return bool(steps) and steps[-1] >= Experiment.load(workdir).train.steps


def train(seed: int, folder: Path) -> None:
    """What is missing of one seed, each by the command that one would type."""
    for name, experiment in EXPERIMENTS.items():
        if finished(folder / name):
            continue
        arguments = ["wedlm_jax.train", "--exp", experiment, "--workdir", str(folder / name), f"train.seed={seed}"]
        arguments += [] if name == "base" else [f"init_from={folder / 'base'}"]
        print("$ python -m", *arguments, flush=True)
        (folder / DECODED).unlink(missing_ok=True)  # of other weights than there will be
        subprocess.run([sys.executable, "-m", *arguments], check=True)


def training_seconds(workdir: Path) -> float:
    """Of all steps, at the median rate of the log."""
    config = Experiment.load(workdir).train
    lines = read_metrics(workdir)
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    tokens = [line["tokens"] for line in lines if "tokens" in line]  # of the logged step
    return config.steps * statistics.fmean(tokens) / statistics.median(rates)


def decode(folder: Path, limit: int) -> list[dict[str, Any]]:
    """The rows of one seed, decoders as the experiments' evaluation sections say."""
    models = {name: load_exact(str(folder / name)) for name in EXPERIMENTS}
    full, beside = (load_experiment(EXPERIMENTS[name]).evaluation for name in ("adapted", "adapter"))
    settings = [
        Setting(AR, "base", full.autoregressive),
        Setting(AR_ADAPTED, "adapted", full.autoregressive),
        *(
            Setting(label, weights or "base", config)
            for (label, weights), config in zip(
                list(SHOWN.items())[1:], (full.lookup, full.verified, beside.verified), strict=True
            )
        ),
    ]
    tasks = [(task(name), task(name).problems(limit, full.seed)) for name in full.tasks]
    rows, completions = sweep(models, settings, tasks, batch_size=full.batch_size)
    adapter, base = (params_of(models[name].transformer) for name in ("adapter", "base"))
    trained = {"adapted": base, "adapter": split_adapter(adapter)[1]}

    def of_row(row: Row) -> dict[str, Any]:
        of_base = completions[row.task, AR]
        ar = next(r for r in rows if (r.task, r.label) == (row.task, AR if row.weights != "adapted" else AR_ADAPTED))
        needs = SHOWN.get(row.label)
        return dataclasses.asdict(row) | {
            # An adapter's AR is its base's.
            "speedup_over_ar": row.tokens_per_second / ar.tokens_per_second,
            "same_text": sum(c.ids == b.ids for c, b in zip(completions[row.task, row.label], of_base, strict=True)),
            "trained": 0 if needs is None else sum(x.size for x in trained[needs].values()),
            "training_seconds": 0.0 if needs is None else training_seconds(folder / needs),
        }

    return [of_row(row) for row in rows]


def kept_rows(folder: Path, limit: int) -> list[dict[str, Any]] | None:
    """The rows that were decoded before; None where there are none, or with another limit: a line is of one n."""
    if not (folder / DECODED).exists():
        return None
    kept = json.loads((folder / DECODED).read_text())
    return kept["rows"] if isinstance(kept, dict) and kept["limit"] == limit else None  # a list names no limit


def mean(values: Sequence[float], form: str, most: float = float("inf")) -> str:
    """With Student's 95 % interval, cut at 0 and `most`."""
    middle = statistics.fmean(values)
    if len(values) < 2 or not (spread := statistics.stdev(values)):
        return format(middle, form)
    half = float(student.ppf(0.975, len(values) - 1)) * spread / len(values) ** 0.5
    return f"{middle:{form}} ({max(middle - half, 0):{form}}-{min(middle + half, most):{form}})"


def line_of(rows: Sequence[dict[str, Any]]) -> str:
    """A line of the table, of one task and decoder: a row of each seed."""

    def cell(key: str, form: str, scale: float = 1.0, most: float = float("inf")) -> str:
        return mean([scale * row[key] for row in rows], form, most)

    trained, same = rows[0]["trained"], [f"{row['same_text']}" for row in rows]
    costs = (f"{trained / 1e6:.2f}M", cell("training_seconds", ".0f")) if trained else ("-", "-")
    cells = (
        rows[0]["task"].replace("_", " "), rows[0]["label"], cell("accuracy", ".0f", 100, 100), cell("tokens_per_forward", ".2f"),
        cell("speedup_over_ar", ".2f"), f"{' / '.join(same)} of {rows[0]['n']}", *costs,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    by_seed = []
    for seed in flags.seeds:
        folder = flags.folder / str(seed)
        train(seed, folder)
        rows = None if flags.again else kept_rows(folder, flags.limit)
        if rows is None:
            print(f"seed {seed}: decoding", flush=True)
            rows = decode(folder, flags.limit)
            write_json(folder / DECODED, {"limit": flags.limit, "rows": rows})
        by_seed.append(rows)
    print(f"\n{machine()}; training seeds {', '.join(map(str, flags.seeds))}: mean (Student's 95 % interval)\n")
    print(
        "| task | decoder: weights | exact match, % | tokens per forward | wall-clock, AR of the same weights = 1 "
        "| text of the base's AR | trained parameters | training, s |\n|---|---|---|---|---|---|---|---|"
    )
    for rows in zip(*by_seed, strict=True):
        if rows[0]["label"] in SHOWN:
            print(line_of(rows))


if __name__ == "__main__":
    main()
