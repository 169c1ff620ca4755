"""What a training step compiles to for TPUs that are not there: cycles of its products, and of what is none, in several forms.

    JAX_PLATFORMS=cpu python -m benchmarks.step_for_tpu                                        # Qwen3-0.6B, SFT, on v5e:2x4
    JAX_PLATFORMS=cpu python -m benchmarks.step_for_tpu --exp qwen3_8b_sft --topology v5p:2x2x2

Compiled ahead of time by libtpu, never run. Cycles are the compiler's own estimate, of one chip and one step; the kernels of
attention are not among them, so how often they run is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from unittest import mock

import tyro

from benchmarks.cycles import operations
from benchmarks.side_by_side import print_table
from wedlm_jax import train_step
from wedlm_jax.absent_devices import canonical, devices
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.errors import entry
from wedlm_jax.experiment import load_experiment
from wedlm_jax.model import layers, rope
from wedlm_jax.program_costs import collectives, runs_by_computation, traffic_by_kind
from wedlm_jax.sharding import make_mesh
from wedlm_jax.train_step import compile_step

# Whether kernels are gathered before a product, whether a product turns queries and keys, model.remat, model.scan_layers, and how
# many quarters of the prediction stream's blocks run (train.skip_unread).
FORMS: dict[str, tuple[bool, bool, str, bool, int]] = {
    "as XLA gathers, halves rotated": (False, False, "full", True, 4),
    "kernels gathered whole": (True, False, "full", True, 4),
    "rotated by products": (True, True, "full", True, 4),
    "attention's output kept": (True, True, "attention", True, 4),
    "layers apart": (True, True, "attention", False, 4),
    "attention's output kept, a quarter of the blocks": (True, True, "attention", True, 1),
}
FORWARD_KERNEL = re.compile(r"%splash_(?:output|mha_fwd)[\w.]* = .* custom-call\(")


@dataclasses.dataclass(frozen=True)
class Flags:
    exp: str = "qwen3_0p6b_sft"
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Of the experiment, as section.field=value."""
    topology: str = "v5e:2x4"


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    print_table(
        f"{' '.join([flags.exp, *flags.overrides])} on {flags.topology}, one step",
        ("", "Mcycles", "in products", "elsewhere", "forward kernels", "GB sent", "GB of temporaries", "s to compile"),
        (row(name, flags) for name in FORMS),
    )


def row(name: str, flags: Flags) -> tuple[str, ...]:
    whole, by_product, remat, scan_layers, quarters = FORMS[name]
    form = [f"model.remat={remat}", f"model.scan_layers={scan_layers}", f"train.skip_unread={quarters < 4}"]
    experiment = load_experiment(flags.exp, [*flags.overrides, *form])
    mesh = make_mesh(experiment.mesh, devices(canonical(flags.topology)))
    with contextlib.ExitStack() as forms:
        alone = mock.patch.object(train_step, "capacities", lambda blocks: (quarters * blocks // 4,))
        forms.enter_context(alone)  # of the programs for more or fewer blocks
        if not whole:
            forms.enter_context(mock.patch.object(layers, "whole_for_batch", lambda kernel, *_: kernel))
        if not by_product:
            forms.enter_context(mock.patch.object(rope, "target_platform", lambda: "another"))
        compile_step.cache_clear()  # another form may have been traced before
        start = time.monotonic()
        compiled = trace_step(experiment, mesh).lower().compile()
    seconds, text = time.monotonic() - start, compiled.as_text()
    found = list(operations(text))
    of_products = sum(one.cycles for one in found if one.multiplies)
    elsewhere = sum(one.cycles for one in found if not one.multiplies)
    kernels = sum(
        runs * len(FORWARD_KERNEL.findall("\n".join(lines))) for lines, runs in runs_by_computation(text).values()
    )
    sent = sum(traffic_by_kind(collectives(text)).values())
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return (
        name,
        *(
            f"{cycles / 1e6:,.{0 if cycles > 1e8 else 2}f}"
            for cycles in (of_products + elsewhere, of_products, elsewhere)
        ),
        f"{kernels}",
        f"{sent / 1e9:.0f}",
        f"{temporaries / 1e9:.1f}",
        f"{seconds:.0f}",
    )


if __name__ == "__main__":
    main()
