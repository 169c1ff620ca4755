"""What a training step compiles to for a GPU that is not there: bytes that its kernels move, in several forms.

    JAX_PLATFORMS=cpu python -m benchmarks.step_for_gpu                                             # Qwen3-0.6B, an H200
    JAX_PLATFORMS=cpu python -m benchmarks.step_for_gpu model.hidden_size=2048 model.intermediate_size=6144     # Qwen3-1.7B

Compiled ahead of time by jax's CUDA plugin, with tokamax's kernels, never run. One row of a step, on one GPU. XLA chooses its
products without a GPU to tune them on, so those of a run may differ.
"""

from __future__ import annotations

import dataclasses
import time
from unittest import mock

import tyro

from benchmarks.kernel_bytes import kernels
from benchmarks.side_by_side import print_table
from wedlm_jax.absent_devices import Chip, canonical, chip_of, devices
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.errors import entry
from wedlm_jax.experiment import load_experiment
from wedlm_jax.ops.attention import Implementation, trial
from wedlm_jax.sharding import make_mesh

ONE_ROW = ("train.batch_size=1", "train.micro_batches=1", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1")
FORMS = [(scan_layers, remat) for scan_layers in (True, False) for remat in ("none", "dots", "attention")]


@dataclasses.dataclass(frozen=True)
class Flags:
    exp: str = "qwen3_0p6b_sft"
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Of the experiment, as section.field=value."""
    topology: str = "h200:1"
    attention: Implementation = "tokamax"


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    chip = chip_of(canonical(flags.topology))
    print_table(
        f"{' '.join([flags.exp, *flags.overrides])} on {flags.topology}, one row; {chip.hbm_bandwidth / 1e12:.1f} TB/s",
        (
            "",
            "GB of loops over elements",
            "ms at that rate",
            "such kernels",
            "GB of products",
            "GB of temporaries",
            "s to compile",
        ),
        (row(flags, chip, *form) for form in FORMS),
    )


def row(flags: Flags, chip: Chip, scan_layers: bool, remat: str) -> tuple[str, ...]:
    form = (f"model.scan_layers={scan_layers}", f"model.remat={remat}", f"model.attention={flags.attention}")
    experiment = load_experiment(flags.exp, [*ONE_ROW, *form, *flags.overrides])
    mesh = make_mesh(experiment.mesh, devices(canonical(flags.topology)))
    start = time.monotonic()
    with mock.patch.object(trial, "failure", lambda *_: None):  # as on a device where the kernels are right
        compiled = trace_step(experiment, mesh).lower().compile()
    seconds = time.monotonic() - start
    found = list(kernels(compiled.as_text()))
    loops = [one for one in found if not one.multiplies and not one.custom]
    moved = sum(one.runs * one.nbytes for one in loops)
    by_products = sum(one.runs * one.nbytes for one in found if one.multiplies)
    return (
        f"{'a scan' if scan_layers else 'layers apart'}, remat={remat}",
        f"{moved / 1e9:,.{0 if moved > 1e10 else 2}f}",
        f"{1e3 * moved / chip.hbm_bandwidth:.0f}",
        f"{sum(one.runs for one in loops):,}",
        f"{by_products / 1e9:.0f}",
        f"{compiled.memory_analysis().temp_size_in_bytes / 1e9:.1f}",
        f"{seconds:.0f}",
    )


if __name__ == "__main__":
    main()
