"""One whole training step beside its own plain matrix products: time, tokens per second, memory, and where the rest goes.

    python -m benchmarks.train_step                           # 33.6M parameters, one row of 1,024 tokens
    python -m benchmarks.train_step --length 4096

The shape is that of the official trainer's figures on a CPU (8 layers, D = 512, V = 8,192, blocks of 32). The floor is the
products of the layers with their parameters, forward and backward, over both streams, and those of the output layer for the
rows that carry a loss: the same shapes, in a program that does nothing else. Attention, norms, RoPE, the losses' softmax, the
optimizer and all copies are what the step has on top.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.side_by_side import machine, side_by_side
from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.diffusion.losses import loss_weights
from wedlm_jax.experiment import ModelConfig, ObjectiveConfig, OptimizerConfig
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train_state import from_seed
from wedlm_jax.train_step import StepSettings, corrupted_streams, update, wedlm_forward, wedlm_step


@dataclasses.dataclass(frozen=True)
class Flags:
    length: int = 1024
    """L: tokens of a row."""
    rows: int = 1
    documents: int = 1
    """Of equal length, in each row."""
    block_size: int = 32
    layers: int = 8
    dtype: str = "float32"
    remat: str = "none"
    rounds: int = 5


def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    model = ModelConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=flags.layers, num_heads=8, num_kv_heads=4,
        head_dim=64, dtype=flags.dtype, remat=flags.remat,
    )  # fmt: skip
    settings = StepSettings(
        model, ObjectiveConfig(block_size=flags.block_size), OptimizerConfig(), mask_token_id=1, total_steps=100, seed=0
    )
    batch = random_batch(flags, model.vocab_size)
    state = from_seed(model, settings.optimizer, make_mesh(MeshConfig(data=1), jax.devices()[:1]), 0)
    streams = jax.jit(lambda: corrupted_streams(state.step, batch, settings))()
    weights = loss_weights(streams, normalization=settings.objective.normalization)
    part = streams, weights
    loss_rows = int(jnp.sum(streams.masked) + jnp.sum(streams.labelled))

    def gradients(params: Any) -> Any:
        return jax.value_and_grad(lambda p: wedlm_forward(p, part, settings=settings)[0])(params)

    programs = {
        "whole step": (lambda state, batch: wedlm_step(state, batch, settings=settings), (state, batch)),
        "loss and gradients": (gradients, (state.params,)),
        "loss alone": (lambda params: wedlm_forward(params, part, settings=settings)[0], (state.params,)),
        "optimizer": (lambda state: update(state, state.params, {"loss": jnp.float32(0)}, settings), (state,)),
        "attention, all layers": attention(flags, model, streams.segment_ids),
        "plain products": products(model, 2 * flags.rows * flags.length, loss_rows),
    }
    measured = side_by_side(programs, flags.rounds)
    floor, tokens = measured["plain products"].seconds, flags.rows * flags.length
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    table = Table(
        title=f"{machine()}; {parameters / 1e6:.1f}M parameters, {flags.dtype}, {flags.rows} x {flags.length} tokens, "
        f"{loss_rows} rows with a loss, medians of {flags.rounds}"
    )
    for column in ("", "ms", "of the products", "tokens/s", "temporaries, MiB"):
        table.add_column(column, justify="right")
    for name, m in measured.items():
        speed = f"{tokens / m.seconds:,.0f}" if name == "whole step" else ""
        table.add_row(name, f"{1e3 * m.seconds:.0f}", f"{m.seconds / floor:.2f}", speed, f"{m.temporaries / 2**20:.0f}")
    Console(width=120).print(table)


def random_batch(flags: Flags, vocab_size: int) -> PackedBatch:
    shape = flags.rows, flags.length
    index = np.broadcast_to(np.arange(flags.length, dtype=np.int32), shape)
    size = flags.length // flags.documents
    segments = 1 + index // size
    assert flags.length % flags.documents == 0 and size % flags.block_size == 0, "documents must be whole blocks"
    tokens = np.random.default_rng(0).integers(2, vocab_size, shape, dtype=np.int32)
    return PackedBatch(
        tokens=tokens, loss_mask=np.ones(shape, bool), positions=index % size, segment_ids=segments,
        document_ids=segments + flags.documents * np.arange(flags.rows, dtype=np.int32)[:, None],
    )  # fmt: skip


def attention(flags: Flags, model: ModelConfig, segment_ids: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward of the attention of every layer."""
    pattern = DualStream(segment_ids[:, : flags.length], flags.block_size)
    shape = flags.rows, 2 * flags.length
    q, k, v, d_out = (
        jax.random.normal(jax.random.key(n), (*shape, heads, model.head_dim), model.dtype)
        for n, heads in enumerate((model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        def layer(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.vjp(pattern, q, k, v)[1](d_out)[0], None  # type: ignore[arg-type]

        return jax.lax.scan(layer, q, None, length=model.num_layers)[0]

    return run, (q, k, v, d_out)


def products(model: ModelConfig, rows: int, loss_rows: int) -> tuple[Any, tuple[Any, ...]]:
    """x W, dy W^T and x^T dy of every Linear of every layer and of the output layer."""
    D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
    heads, kv_heads = model.num_heads * H, model.num_kv_heads * H
    shapes = [(D, heads), (D, kv_heads), (D, kv_heads), (heads, D), (D, F), (D, F), (F, D)]
    random = lambda *shape: jax.random.normal(jax.random.key(0), shape, model.dtype)  # noqa: E731
    layers = [random(model.num_layers, *shape) for shape in shapes]
    widths = sorted({n for shape in shapes for n in shape})
    inputs = {n: random(rows, n) for n in widths}

    def three(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return x @ w, dy @ w.T, x.T @ dy

    def run(layers: list[jax.Array], inputs: dict[int, jax.Array], hidden: jax.Array, head: jax.Array, d: jax.Array):
        def layer(inputs: dict[int, jax.Array], weights: list[jax.Array]):
            out = [three(inputs[w.shape[0]], w, inputs[w.shape[1]]) for w in weights]
            # What the next layer is fed depends on this one, so that none is left out or run ahead.
            used = 1e-6 * sum(jnp.max(o[0]) + jnp.max(o[1]) for o in out)
            return {n: x + used for n, x in inputs.items()}, [o[2] for o in out]

        return jax.lax.scan(layer, inputs, layers), three(hidden, head, d)

    head = random(D, model.vocab_size)
    return run, (layers, inputs, random(loss_rows, D), head, random(loss_rows, model.vocab_size))


if __name__ == "__main__":
    main()
