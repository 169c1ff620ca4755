"""One decoding forward beside what memory allows: a window of W tokens behind a cache, and the logits of its tokens.

    python -m benchmarks.decode_forward                             # 8B parameters in bfloat16, W = 1 and 16; a GPU
    python -m benchmarks.decode_forward --int8                      # the same with kernels rounded to int8
    python -m benchmarks.decode_forward --shape tiny --context 60   # anywhere
    taskset -c 0 python -m benchmarks.decode_forward --adapter-rank 12 --shape quickstart --dtype float32 \
        --windows 8 16 24 32 --context 60 --slots 128 --rounds 300  # what an adapter of mask rows adds
    python -m benchmarks.decode_forward --turned --shape 110m --dtype float32 --windows 1 4 8 16 24 32 --context 160 --slots 256

A forward reads every parameter once (of the embedding the rows of its tokens alone) and the used part of the cache: at batch
size 1 that, and not the arithmetic, is its floor. The bandwidth is measured in the same run, as that of copying a large array;
where it is known the data sheet's stands beside it. Forwards run in a loop on the device, each fed what the one before predicts.

With --adapter-rank it measures instead what an adapter on all projections adds to a forward half of whose slots are masks: both
programs take turns, and the ratio is that of each round, by the wall and by processor time. The latter is the one to read on a
CPU that does something else too, with the process on one core (taskset). With --turned it measures likewise what a CPU gains from
kernels that lie one output after the other (`model.layers.Linear.turn`).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import tyro

from benchmarks import shapes
from benchmarks.side_by_side import machine, print_table
from wedlm_jax.absent_devices import CHIPS
from wedlm_jax.errors import entry
from wedlm_jax.evals.roofline import forward_bytes
from wedlm_jax.evals.row_cost import Program, forward_program, in_turns, median_ratio
from wedlm_jax.model.adapter import AdapterConfig, split_adapter
from wedlm_jax.model.config import DType
from wedlm_jax.model.parameters import init_params
from wedlm_jax.ops.attention import Implementation

BANDWIDTH = {chip.name: chip.hbm_bandwidth for chip in CHIPS.values()}
COPIES = 16  # of the large array, one after the other in a call


@dataclasses.dataclass(frozen=True)
class Flags:
    shape: shapes.Name = "qwen3_8b"
    dtype: DType = "bfloat16"
    """Of parameters, cache and products."""
    int8: bool = False
    """Kernels of the layers rounded to int8 (`model.int8`)."""
    attention: Implementation = "auto"
    """`tokamax` asks for the split-KV kernel of GPUs."""
    windows: tuple[int, ...] = (1, 16)
    """W."""
    rows: int = 1
    context: int = 2000
    """Slots of the cache that are in use."""
    slots: int = 4096
    """Those that are allocated."""
    rounds: int = 5
    adapter_rank: int | None = None
    """Compare with and without an adapter of mask rows."""
    turned: bool = False
    """Compare kernels as they were trained with those that a CPU turns for decoding."""


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    if flags.adapter_rank is not None:
        beside_an_adapter(flags, flags.adapter_rank)
        return
    if flags.turned:
        beside_turned_kernels(flags)
        return
    model = shapes.shape(
        flags.shape, dtype=flags.dtype, param_dtype=flags.dtype, attention=flags.attention,
        kernel_dtype="int8" if flags.int8 else None,
    )  # fmt: skip
    params = jax.jit(lambda: init_params(model, 0))()

    # Of float32: a GPU copies bfloat16 by numbers of two bytes, at four fifths of the rate.
    copied = jnp.zeros(2**23 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    # Many times in a call, which costs as much as a copy does on a GPU.
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, COPIES, lambda _, x: x + 1, x))
    programs: dict[int | str, Program] = {"copy": Program(lambda: copy(copied), COPIES)}
    sizes = dict(rows=flags.rows, context=flags.context, allocated=flags.slots)
    for window in flags.windows:
        programs[window] = forward_program(model, params, slots=window, **sizes)
    seconds_of = {name: statistics.median(times) for name, times in in_turns(programs, flags.rounds).items()}

    bandwidth = 2 * copied.nbytes / seconds_of["copy"]
    sheet = BANDWIDTH.get(jax.devices()[0].device_kind)
    rows = []
    for window in flags.windows:
        seconds = seconds_of[window]
        moved = forward_bytes(model, rows=flags.rows, context=flags.context + window)
        floor = moved / bandwidth
        of_sheet = f"{moved / sheet / seconds:.1%}" if sheet else ""
        rows.append((str(window), f"{1e3 * seconds:.3f}", f"{1e3 * floor:.3f}", f"{floor / seconds:.1%}", of_sheet))
    parameters = sum(x.size for x in params.values()) / 1e6
    print_table(
        f"{machine()}; {flags.shape}, {parameters:,.1f}M parameters, {flags.dtype}{', int8 kernels' * flags.int8}, attention "
        f"{flags.attention}, "
        f"{flags.rows} rows, {flags.context} of {flags.slots} slots used; copying {bandwidth / 1e9:,.0f} GB/s; "
        f"medians of {flags.rounds}",
        ("W", "ms a forward", "floor by copying, ms", "of that floor", "of the data sheet's"),
        rows,
    )


def beside_an_adapter(flags: Flags, rank: int) -> None:
    """What the adapter adds to a forward, and to the parameters that one reads."""
    sizes = dict(dtype=flags.dtype, param_dtype=flags.dtype, attention=flags.attention)
    plain = shapes.shape(flags.shape, **sizes, matmul_precision="highest")
    adapted = dataclasses.replace(plain, adapter=AdapterConfig(rank=rank, alpha=2.0 * rank))
    params = jax.jit(lambda: init_params(adapted, 0))()
    base, own = split_adapter(params)
    shape = dict(rows=flags.rows, context=flags.context, allocated=flags.slots)

    def programs(window: int) -> dict[str, Program]:
        return {
            "plain": forward_program(plain, base, slots=window, **shape),
            "adapter": forward_program(adapted, params, slots=window, masks=-(-window // 2), **shape),
        }

    share = sum(x.size for x in own.values()) / sum(x.size for x in base.values())
    compare(flags, f"rank {rank}: {share:.1%} of the base's parameters, half of the window masks", programs)


def beside_turned_kernels(flags: Flags) -> None:
    """What turned kernels take of the time of those that were trained."""
    model = shapes.shape(flags.shape, dtype=flags.dtype, param_dtype=flags.dtype, attention=flags.attention)
    params = jax.jit(lambda: init_params(model, 0))()
    shape = dict(rows=flags.rows, context=flags.context, allocated=flags.slots)

    def programs(window: int) -> dict[str, Program]:
        names = {"as trained": False, "turned": True}
        return {
            name: forward_program(model, params, slots=window, turns=turns, **shape) for name, turns in names.items()
        }

    compare(flags, f"{sum(x.size for x in params.values()) / 1e6:,.1f}M parameters", programs)


def compare(flags: Flags, title: str, programs: Callable[[int], dict[str, Program]]) -> None:
    """A line for each window: the second of its two programs against the first."""
    rows: list[tuple[str, ...]] = []
    names: list[str] = []
    for window in flags.windows:
        pair = programs(window)
        names = first, second = list(pair)
        wall, processor = in_turns(pair, flags.rounds), in_turns(pair, flags.rounds, time.process_time)
        rows.append(
            (
                str(window),
                *(f"{1e3 * statistics.median(wall[name]):.3f}" for name in names),
                *(f"{median_ratio(clock[second], clock[first]):.3f}" for clock in (wall, processor)),
            )
        )
    print_table(
        f"{machine()}; {flags.shape}, {flags.dtype}, {title}; {flags.rows} rows, {flags.context} of {flags.slots} slots used; "
        f"medians of {flags.rounds}",
        ("slots", *(f"{name}, ms" for name in names), "ratio by the wall", "by processor time"),
        rows,
    )


if __name__ == "__main__":
    main()
