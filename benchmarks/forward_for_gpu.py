"""What one decoding forward compiles to for a GPU that is not there, in four forms: of what it costs beside its products.

    JAX_PLATFORMS=cpu python -m benchmarks.forward_for_gpu             # Qwen3-8B in bfloat16, 16 slots, an H100
    JAX_PLATFORMS=cpu python -m benchmarks.forward_for_gpu --int8      # the same with kernels rounded to int8

Compiled ahead of time by jax's CUDA plugin, never run. At batch 1 a forward is bound by the bytes of its weights, so it counts
whether they are read once: a layer's matrix that a kernel writes was copied out of the stack, and is read, written and read
again. Each kernel takes microseconds to start, and a condition or a loop whose length is data waits for the host.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from benchmarks import shapes
from benchmarks.side_by_side import print_table
from wedlm_jax.absent_devices import canonical, chip_of, devices
from wedlm_jax.errors import entry
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import Cache
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.weights import Structure, Weights
from wedlm_jax.ops.attention import Implementation, trial
from wedlm_jax.program_costs import parts_of_operations, runs_by_computation
from wedlm_jax.sharding import MeshConfig, make_mesh, replicated

FORWARDS = 2  # of a call: more than one, so that they are a loop
# Whether layers lie apart, whether kernels are joined, and attention.
FORMS: dict[str, tuple[bool, bool, Implementation]] = {
    "layers in a stack, attention by XLA": (False, False, "xla"),
    "layers apart, attention by XLA": (True, False, "xla"),
    "layers apart, split kernel": (True, False, "auto"),
    "layers apart, joined, split kernel": (True, True, "auto"),
}
Layout = Callable[[Transformer], Transformer]
STARTED = ("fusion", "fusion-start", "custom-call", "copy", "sort", "scatter", "reduce", "all-reduce-start")
OPERATION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([\w\-]+)\(")


@dataclasses.dataclass(frozen=True)
class Flags:
    shape: shapes.Name = "qwen3_8b"
    int8: bool = False
    """Kernels of the layers rounded to int8 (`model.int8`)."""
    topology: str = "h100:1"
    window: int = 16
    rows: int = 1
    slots: int = 4096
    """Of the cache."""


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    print_table(
        described(flags) + f"; a window of {flags.window}",
        ("", "GB of weights copied", "kernels", "waits for the host", "MB of temporaries", "s to compile"),
        (row(name, flags, *FORMS[name]) for name in FORMS),
    )


def described(flags: Flags) -> str:
    params = jax.eval_shape(lambda: init_params(config_of(flags, "auto"), 0))
    nbytes = sum(x.size * x.dtype.itemsize for x in params.values())
    chip = chip_of(canonical(flags.topology))
    return (
        f"{flags.topology}; {flags.shape}, bfloat16{', int8 kernels' * flags.int8}, {nbytes / 1e9:.1f} GB of weights, to read "
        f"them once takes {1e3 * nbytes / chip.hbm_bandwidth:.1f} ms; rows: {flags.rows}, a cache of {flags.slots}"
    )


def config_of(flags: Flags, attention: Implementation) -> ModelConfig:
    kernels: Literal["int8"] | None = "int8" if flags.int8 else None
    return shapes.shape(
        flags.shape, dtype="bfloat16", param_dtype="bfloat16", kernel_dtype=kernels, attention=attention
    )


def compiled_forward(flags: Flags, model: ModelConfig, layout: Layout) -> jax.stages.Compiled:
    """A loop of FORWARDS forwards over a window, by a transformer that `layout` has laid out."""
    mesh = make_mesh(MeshConfig(data=1), devices(canonical(flags.topology)))

    def there(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), tree)

    graph, state = nnx.split(nnx.eval_shape(lambda: layout(transformer_from(model, init_params(model, 0)))))
    arrays, tree = jax.tree.flatten(state)
    weights = Weights([there(x) for x in arrays], Structure(graph, tree, mesh))

    def empty_cache(weights: Weights) -> Cache:
        with weights.transformer() as transformer:
            return transformer.empty_cache(flags.rows, flags.slots)

    def run(weights: Weights, tokens_BT: jax.Array, length_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        with weights.transformer() as transformer:

            def forward(_: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
                tokens_BT, cache = carry
                positions_BT, window = length_B[:, None] + jnp.arange(flags.window), CachedWindow(length_B)
                hidden, cache = transformer.hidden(tokens_BT, positions=positions_BT, pattern=window, cache=cache)
                return jnp.argmax(transformer.logits(hidden), axis=-1).astype(jnp.int32), cache

            return jax.lax.fori_loop(0, FORWARDS, forward, (tokens_BT, cache))

    tokens, length = jnp.zeros((flags.rows, flags.window), jnp.int32), jnp.zeros(flags.rows, jnp.int32)
    given = weights, there(tokens), there(length), there(jax.eval_shape(empty_cache, weights))
    with mock.patch.object(trial, "failure", lambda *_: None):  # as on a device where the kernel is right
        return jax.jit(run, donate_argnums=3).lower(*given).compile()


def row(name: str, flags: Flags, apart: bool, joined: bool, attention: Implementation) -> tuple[str, ...]:
    model = config_of(flags, attention)

    def layout(transformer: Transformer) -> Transformer:
        if apart:
            graph, stacked = transformer.split_stack()
            layers = (jax.tree.map(lambda x, layer=layer: x[layer], stacked) for layer in range(model.num_layers))
            transformer.layers = nnx.List([nnx.merge(graph, layer) for layer in layers])
            for layer in transformer.layers if joined else ():
                layer.join()
        return transformer

    start = time.monotonic()
    compiled = compiled_forward(flags, model, layout)
    seconds = time.monotonic() - start
    params = jax.eval_shape(lambda: init_params(model, 0))
    matrices = {x.shape[1:] for name, x in params.items() if name.startswith("layers.") and x.ndim > 2}
    copied = kernels = waits = 0
    for result, operation, times in operations(compiled.as_text()):
        kernels += times * (operation in STARTED)
        waits += times * (operation == "conditional" or operation == "while of data")
        for dtype, sizes in re.findall(r"(bf16|s8)\[([\d,]+)\]", result) if operation in STARTED else ():
            found = tuple(int(size) for size in sizes.split(","))
            if found in matrices or (found[1:] in matrices and found[0] == 1):
                copied += times * (2 if dtype == "bf16" else 1) * math.prod(found)
    return (
        name,
        f"{copied / FORWARDS / 1e9:.1f}",
        f"{kernels / FORWARDS:.0f}",
        f"{waits / FORWARDS:.0f}",
        f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}",
        f"{seconds:.0f}",
    )


def operations(text: str) -> Iterator[tuple[str, str, int]]:
    """Result, operation and how often it runs, of what the loop of forwards runs. Of a condition's branches the first counts, a
    loop whose length is data runs as often as `kernel_runs` says, or once."""
    computations = runs_by_computation(text)
    inside_kernels = parts_of_operations(computations)
    for name, (lines, times) in computations.items():
        if times >= FORWARDS and name not in inside_kernels:
            yield from ((result, operation, times) for result, operation in operations_of(lines))


def operations_of(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Result and operation of each line of a computation. Of what is started beside others, operands and result are listed: here
    the result alone."""
    for line in lines:
        if match := OPERATION.match(line):
            result, operation = match.groups()
            if operation.endswith("-start") and result.startswith("(("):
                result = result.partition("), ")[2]
            of_data = operation == "while" and "known_trip_count" not in line
            yield result, "while of data" if of_data else operation


if __name__ == "__main__":
    main()
