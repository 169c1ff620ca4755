"""docs/scaling.md's table: training steps compiled ahead of time for TPU slices, and the others by formula.

    python -m benchmarks.scaling_table              # writes the table from the logs that are there
    python -m benchmarks.scaling_table --compile    # first compiles the cells that have no log, one after the other

Compiling needs libtpu (pip install 'jax[tpu]'; no TPU), and a few minutes of a core a cell. The logs are
docs/scaling/MODEL_KIND_CHIPS.txt, as `python -m wedlm_jax.train --compile-only` prints them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import jax

from wedlm_jax.absent_devices import CHIPS
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.errors import entry
from wedlm_jax.experiment import Experiment, MeshConfig, load_experiment
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params
from wedlm_jax.program_costs import matmul_flops
from wedlm_jax.sharding import make_mesh

REPOSITORY = Path(__file__).parents[1]
PAGE, LOGS = REPOSITORY / "docs" / "scaling.md", REPOSITORY / "docs" / "scaling"
ROWS = 256  # of a global batch, 4096 tokens each: one a chip and micro-batch, so micro_batches = 256 / chips
TOKENS = 100e9
_OF_TEXT = "data.source=text"  # learned whole, as in the other two
MODELS = {
    "Qwen3-0.6B": ("qwen3_0p6b_sft", (_OF_TEXT,)),
    "Qwen3-1.7B": ("qwen3_0p6b_sft", (_OF_TEXT, "model.hidden_size=2048", "model.intermediate_size=6144")),
    "Qwen2.5-7B": ("qwen25_7b_cpt", ()),
    "Qwen3-8B": ("qwen3_8b_cpt", ()),
}
SLICES = {
    "v5e": {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
    "v6e": {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
}
# In order of use: the first two are what the two large experiments are made for.
COMPILED = (
    ("Qwen3-8B", "v5e", 256),
    ("Qwen3-8B", "v5p", 64),
    ("Qwen3-0.6B", "v5e", 8),
    ("Qwen2.5-7B", "v5p", 64),
    ("Qwen3-1.7B", "v6e", 8),
    ("Qwen3-8B", "v6e", 64),
    ("Qwen2.5-7B", "v5e", 256),
    ("Qwen3-1.7B", "v5e", 32),
    ("Qwen3-0.6B", "v5p", 8),
    ("Qwen3-8B", "v6e", 256),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model on one slice; bytes of one chip, seconds of one step of ROWS rows."""

    peak: float
    seconds: dict[str, float]
    log: Path | None = None  # None: by formula

    @property
    def days(self) -> float:
        return max(self.seconds.values()) * TOKENS / (ROWS * 4096) / 86400


@entry
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the cells that have no log yet")
    if parser.parse_args().compile:
        for model, kind, chips in COMPILED:
            compile_cell(model, kind, chips)
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    head, _, rest = text.partition(begin)
    PAGE.write_text(head + begin + "\n".join(table()) + "\n" + end + rest.partition(end)[2], encoding="utf-8")


def overrides(model: str, chips: int) -> list[str]:
    return [*MODELS[model][1], f"train.batch_size={ROWS}", f"train.micro_batches={ROWS // chips}"]


def log_of(model: str, kind: str, chips: int) -> Path:
    return LOGS / f"{model.lower().replace('.', 'p')}_{kind}_{chips}.txt"


def compile_cell(model: str, kind: str, chips: int) -> None:
    """Writes the log of one cell, unless it is there."""
    log = log_of(model, kind, chips)
    if log.exists():
        return
    arguments = ["--exp", MODELS[model][0], *overrides(model, chips), "--compile-only", f"{kind}:{SLICES[kind][chips]}"]
    command = [sys.executable, "-m", "wedlm_jax.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    report = [line for line in done.stdout.splitlines() if line] or [
        line for line in done.stderr.splitlines() if line.startswith("error: ")
    ]
    shown = " ".join(["python -m wedlm_jax.train", *arguments])
    if not report:
        print(f"{log.name}: no report; {done.stderr[-500:]}", file=sys.stderr)
        return
    log.write_text("\n".join([f"$ {shown}", *report]) + "\n", encoding="utf-8")
    print("\n".join(report), flush=True)


def read_log(log: Path) -> Cell:
    """What a log says; a step that did not fit has no time."""
    text = log.read_text(encoding="utf-8")
    peak = re.search(r"^peak +([\d.]+) GB", text, re.MULTILINE)
    if peak is None:
        needed = re.search(r"needs ([\d.]+)G", text)
        return Cell(float(needed[1]) * 2**30 if needed else math.inf, {}, log)
    seconds = re.search(r"^least time +FLOPs ([\d.]+) s, HBM ([\d.]+) s, ICI ([\d.]+) s", text, re.MULTILINE)
    assert seconds is not None, log
    return Cell(
        float(peak[1]) * 1e9, dict(zip(("FLOPs", "HBM", "ICI"), map(float, seconds.groups()), strict=True)), log
    )


def compute(experiment: Experiment, kind: str, chips: int, row_flops: float) -> Cell:
    """The formula: what must be held, computed and sent, with one row on each chip at a time and parameters over all chips."""
    config = experiment.model
    assert isinstance(config, ModelConfig)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    params = sum(x.size for x in shapes.values())
    layer = sum(x.size for name, x in shapes.items() if name.startswith("layers.")) / config.num_layers
    head = config.vocab_size * config.hidden_size
    positions = 2 * experiment.data.row_length
    held = (
        16 * params / chips  # parameters, gradients and two moments, all float32
        + 2 * positions * config.hidden_size * config.num_layers  # the input of each layer, bfloat16
        + positions * config.num_heads * (2 * config.head_dim + 4) * config.num_layers  # what attention puts out, and its sums
        + 2 * 2 * layer  # a layer gathered, and the next one
        + 2 * head + 4 * head  # the head gathered, and its gradient before it is cut up again
        + 3 * 4 * 512 * config.vocab_size  # the logits of a chunk and what their gradient needs
    )  # fmt: skip
    chip, micro_batches = CHIPS[kind], ROWS // chips
    gathered = 2 * 2 * params * micro_batches  # forward and backward, bfloat16
    sent = (gathered + 2 * params * micro_batches) * (chips - 1) / chips
    moved = 2 * 12 * params / chips + 2 * gathered
    seconds = {
        "FLOPs": row_flops * ROWS / chips / chip.flops,
        "HBM": moved / chip.hbm_bandwidth,
        "ICI": sent / chip.link_bandwidth,
    }
    return Cell(held, seconds)


def table() -> list[str]:
    """The rows, in Markdown."""
    lines = [
        "| model | slice | chips | peak GB a chip | least seconds a step | bound | least days for 100B tokens | how |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for model, (name, changes) in MODELS.items():
        # Traced here, where there is no TPU: what a TPU would run is asked for by name.
        fixed = ("train.batch_size=1", "train.micro_batches=1", "model.attention=splash")
        experiment = load_experiment(name, [*changes, *fixed])
        one_row = trace_step(experiment, make_mesh(MeshConfig(), jax.devices()[:1]))
        row_flops = matmul_flops(one_row.jaxpr.jaxpr)
        for kind, shapes in SLICES.items():
            for chips, shape in shapes.items():
                log = log_of(model, kind, chips)
                cell = read_log(log) if log.exists() else compute(experiment, kind, chips, row_flops)
                how = f"[compiled](scaling/{log.name})" if cell.log else "computed"
                start = f"| {model} | {kind}:{shape} | {chips} | {cell.peak / 1e9:.1f} |"
                if not cell.seconds or cell.peak > CHIPS[kind].hbm:
                    lines.append(f"{start} does not fit | | | {how} |")
                    continue
                bound = max(cell.seconds, key=lambda key: cell.seconds[key])
                lines.append(f"{start} {cell.seconds[bound]:.2f} | {bound} | {cell.days:.1f} | {how} |")
    return lines


if __name__ == "__main__":
    main()
