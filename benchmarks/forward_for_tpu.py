"""What one decoding forward compiles to for a TPU that is not there: with kernels as trained, and as decoding lays them out.

    JAX_PLATFORMS=cpu python -m benchmarks.forward_for_tpu             # Qwen3-1.7B in bfloat16, a v5e chip
    JAX_PLATFORMS=cpu python -m benchmarks.forward_for_tpu --int8      # the same with kernels rounded to int8

Compiled ahead of time by libtpu, never run. Cycles are the compiler's own estimate of the operations that it gives one for: of
arithmetic, not of reading weights, and of no kernel. Those of a call are spent once, however many forwards it runs.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import tyro

from benchmarks import shapes
from benchmarks.cycles import operations
from benchmarks.forward_for_gpu import FORWARDS, Flags, Layout, compiled_forward, config_of, described
from benchmarks.side_by_side import print_table
from wedlm_jax.errors import entry
from wedlm_jax.model.weights import with_heads_first
from wedlm_jax.ops import single_row

# How kernels lie, and whether a single token is given to the matrix unit.
FORMS: dict[str, tuple[Layout, bool]] = {
    "as trained, products as XLA makes them": (lambda transformer: transformer, False),
    "as trained": (lambda transformer: transformer, True),
    "heads first": (with_heads_first, True),
}


@dataclasses.dataclass(frozen=True)
class TpuFlags:
    shape: shapes.Name = "qwen3_1p7b"
    int8: bool = False
    """Kernels of the layers rounded to int8 (`model.int8`)."""
    topology: str = "v5e:1x1"
    windows: tuple[int, ...] = (1, 16)
    rows: int = 1
    slots: int = 4096
    """Of the cache."""


@entry
def main() -> None:
    flags = tyro.cli(TpuFlags, description=__doc__)
    sizes = {name: value for name, value in vars(flags).items() if name != "windows"}
    of_window = [Flags(window=window, **sizes) for window in flags.windows]
    print_table(
        described(of_window[0]),
        ("kernels", "W", "Mcycles a forward", "Mcycles a call, once", "MB of temporaries"),
        (row(name, of_this) for of_this in of_window for name in FORMS),
    )


def row(name: str, flags: Flags) -> tuple[str, ...]:
    layout, by_matrix_unit = FORMS[name]
    with mock.patch.object(single_row, "target_platform", lambda: "tpu" if by_matrix_unit else "another"):
        compiled = compiled_forward(flags, config_of(flags, "auto"), layout)
    forward, call = cycles(compiled.as_text())
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return name, str(flags.window), f"{forward / 1e6:.2f}", f"{call / 1e6:.2f}", f"{temporaries / 1e6:.0f}"


def cycles(text: str) -> tuple[float, int]:
    """Of a forward, and of what a call does before and behind its forwards."""
    found = list(operations(text))
    of_forwards = sum(one.cycles for one in found if one.runs >= FORWARDS)
    return of_forwards / FORWARDS, sum(one.cycles for one in found) - of_forwards


if __name__ == "__main__":
    main()
