"""One whole training step beside its own plain matrix products: time, tokens per second, MFU, memory, where the rest goes.

    python -m benchmarks.train_step                           # 33.6M parameters, one row of 1,024 tokens
    python -m benchmarks.train_step --lengths 4096
    python -m benchmarks.train_step --shape tiny --layers 1 --lengths 4096 8192 16384 32768 --no-parts --rounds 3
    python -m benchmarks.train_step --no-parts --adapter 12   # beside the step of an adapter of mask rows
    python -m benchmarks.train_step --no-parts --adapter 12 --prompt-share 0.75   # of rows that are prompts for the most part
    python -m benchmarks.train_step --official ~/WeDLM --official-python ~/torch/bin/python   # beside the official trainer
    python -m benchmarks.train_step --shape qwen3_0p6b --lengths 4096 --no-parts              # a GPU

The default shape is that of the official trainer's figures on a CPU (8 layers, D = 512, V = 8,192, blocks of 32). The floor
is the products of the layers with their parameters, forward and backward, over both streams (but for blocks of prompts), and
those of the output layer for the rows that carry a loss: the same shapes, in a program that does nothing else. Attention,
norms, RoPE, the losses' softmax, the optimizer and all copies are what the step has on top. A step needs the memory of its
arguments (parameters, optimizer, batch), which its results take the place of, and of its temporaries. Useful FLOPs are those
of `model.flops.training_flops`; their rate is set against that of plain square products in the same run and, where it is
known, against the data sheet (MFU).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks import official, shapes
from benchmarks.side_by_side import machine, print_table, side_by_side, square_products
from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.diffusion.losses import loss_weights
from wedlm_jax.errors import UserError, entry
from wedlm_jax.experiment import AdapterConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, load_experiment
from wedlm_jax.host_memory import use_huge_pages
from wedlm_jax.metrics.throughput import peak_flops
from wedlm_jax.model.config import DType, Remat
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.ops.attention import Implementation
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.step_metrics import row_metrics
from wedlm_jax.train_state import from_seed
from wedlm_jax.train_step import (
    StepSettings,
    both_streams,
    corrupted_streams,
    runs_of_tokens,
    update,
    wedlm_forward,
    wedlm_step,
)


@dataclasses.dataclass(frozen=True)
class Flags:
    shape: shapes.Name = "34m"
    lengths: tuple[int, ...] = (1024,)
    """L: tokens of a row."""
    rows: int = 1
    documents: int = 1
    """Of equal length, in each row."""
    prompt_share: float = 0.0
    """How much of each document, from its start, carries no loss: also the step that runs all blocks, these too."""
    block_size: int = 32
    layers: int | None = None
    """Other than those of the shape."""
    dtype: DType | None = None
    """Other than that of the shape."""
    remat: Remat = "dots"
    mlp_tile: int | None = None
    """Tokens of a row whose MLP is computed at once, and again in the backward pass."""
    scan_layers: bool = True
    attention: Implementation = "auto"
    adapter: int | None = None
    """Also the step of an adapter of mask rows of this rank, with the targets and masks of quickstart_adapter."""
    parts: bool = True
    """Also the parts of the step."""
    rounds: int = 5
    official: Path | None = None
    """Instead: our step beside that of the official trainer, of which this is your own checkout (github.com/tencent/WeDLM).
    Nothing of it is in this repository, and its licence says that it is not intended for use within the European Union."""
    official_python: str = sys.executable
    """The interpreter that runs it: one with torch, transformers, tqdm and yaml."""


@entry
def main() -> None:
    use_huge_pages()  # as the trainer does
    flags = tyro.cli(Flags, description=__doc__)
    if flags.official is not None:
        if flags.adapter is not None or flags.prompt_share:
            raise UserError(
                "--official runs a full step over text that is learned whole; leave out --adapter and --prompt-share"
            )
        for length in flags.lengths:
            official.compare(flags, length, model_of(flags), random_batch(flags, length).tokens)
        return
    measured = [measure(flags, length) for length in flags.lengths]
    model = model_of(flags)
    print_table(
        f"{machine()}; {flags.shape}, {model.num_layers} layers, {model.dtype}, attention {model.attention}, "
        f"remat {model.remat}, {flags.rows} rows a batch, {flags.documents} documents a row, medians of {flags.rounds}",
        (
            "L",
            "",
            "ms",
            "processor, ms",
            "of the products",
            "attention's among them",
            "tokens/s",
            "arguments, MiB",
            "temporaries, MiB",
        ),
        [row for rows, _ in measured for row in rows],
    )
    print("", *(line for _, line in measured), sep="\n")


def model_of(flags: Flags) -> ModelConfig:
    fields = ("dtype", "remat", "mlp_tile", "scan_layers", "attention")
    return shapes.shape(flags.shape, num_layers=flags.layers, **{name: getattr(flags, name) for name in fields})


def settings_of(flags: Flags) -> StepSettings:
    objective = ObjectiveConfig(block_size=flags.block_size)
    return StepSettings(
        model_of(flags), objective, OptimizerConfig(), mask_token_id=official.MASK_TOKEN_ID, total_steps=100, seed=0,
        skip_unread=flags.prompt_share > 0,
    )  # fmt: skip


def adapter_settings_of(flags: Flags, rank: int) -> StepSettings:
    objective = dataclasses.replace(load_experiment("quickstart_adapter").objective, block_size=flags.block_size)
    model = dataclasses.replace(model_of(flags), adapter=AdapterConfig(rank=rank))
    return dataclasses.replace(settings_of(flags), model=model, objective=objective, skip_unread=False)


def measure(flags: Flags, length: int) -> tuple[list[tuple[str, ...]], str]:
    """The rows of the table for rows of this length, and a line about their useful FLOPs."""
    settings = settings_of(flags)
    model = settings.model
    batch = random_batch(flags, length)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    state = from_seed(model, settings.optimizer, mesh, 0)
    streams = jax.jit(lambda: corrupted_streams(state.step, batch, settings))()
    part = streams, loss_weights(streams, normalization=settings.objective.normalization)
    loss_rows = jnp.sum(streams.masked) + jnp.sum(streams.labelled)

    def gradients(params: Any) -> Any:
        return both_streams(dataclasses.replace(state, params=params), part, settings=settings)[0]

    runs = runs_of_tokens(streams, settings)
    rows_run = int(jnp.sum(jnp.broadcast_to(runs, batch.tokens.shape)))
    square, square_flops = square_products(model.dtype)
    programs: dict[str, Any] = {"whole step": (functools.partial(wedlm_step, settings=settings), (state, batch))}
    if flags.prompt_share:
        every_row = functools.partial(wedlm_step, settings=dataclasses.replace(settings, skip_unread=False))
        programs["whole step, all blocks run"] = every_row, (state, batch)
    if flags.adapter is not None:
        gated = adapter_settings_of(flags, flags.adapter)
        adapted = from_seed(gated.model, gated.optimizer, mesh, 0)
        programs["whole step of the adapter"] = functools.partial(wedlm_step, settings=gated), (adapted, batch)
    steps = tuple(programs)
    if flags.parts:
        programs |= {
            "loss and gradients": (gradients, (state.params,)),
            "loss alone": (lambda params: wedlm_forward(params, part, settings=settings)[0], (state.params,)),
            "optimizer": (lambda state: update(state, state.params, {"loss": jnp.float32(0)}, settings), (state,)),
            "attention, all layers": attention(flags, model, streams.segment_ids),
        }
    programs |= {
        "plain products": products(model, rows_run, int(loss_rows)),
        "plain products of attention": attention_products(model, rows_run, length // flags.documents),
        "square products": square,
    }
    measured = side_by_side(programs, flags.rounds, carried=steps)
    step, rate = measured["whole step"], square_flops / measured.pop("square products").seconds
    of_matrices = measured["plain products"].seconds
    of_all = of_matrices + measured["plain products of attention"].seconds
    rows = [
        (
            f"{length:,}",
            name,
            f"{1e3 * m.seconds:.0f}",
            f"{1e3 * m.processor_seconds:.0f}",
            f"{m.seconds / of_matrices:.2f}",
            f"{m.seconds / of_all:.2f}",
            f"{flags.rows * length / m.seconds:,.0f}" if name in steps else "",
            f"{m.arguments / 2**20:.1f}",
            f"{m.temporaries / 2**20:.1f}",
        )
        for name, m in measured.items()
    ]
    useful = float(row_metrics(batch, model, runs=runs, loss_rows=loss_rows)["useful_flops"])
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    line = (
        f"L = {length:,}: {parameters / 1e6:,.1f}M parameters, {int(loss_rows):,} rows with a loss; {useful / 1e9:,.1f} useful "
        f"GFLOP in {step.seconds:.3f} s, {useful / step.seconds / rate:.1%} of the rate of plain square products "
        f"({rate / 1e12:.2f} TFLOP/s)"
    )
    if peak := peak_flops(jax.devices()[0].device_kind):
        line += f"; MFU {useful / step.seconds / peak:.1%} of the data sheet's {peak / 1e12:.0f} TFLOP/s"
    return rows, line


def random_batch(flags: Flags, length: int) -> PackedBatch:
    shape = flags.rows, length
    index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    size = length // flags.documents
    segments = 1 + index // size
    assert length % flags.documents == 0 and size % flags.block_size == 0, "documents must be whole blocks"
    tokens = np.random.default_rng(0).integers(2, model_of(flags).vocab_size, shape, dtype=np.int32)
    return PackedBatch(
        tokens=tokens, loss_mask=index % size >= flags.prompt_share * size, positions=index % size, segment_ids=segments,
        document_ids=segments + flags.documents * np.arange(flags.rows, dtype=np.int32)[:, None],
    )  # fmt: skip


def attention(flags: Flags, model: ModelConfig, segment_ids: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward of the attention of every layer."""
    pattern = DualStream(segment_ids, flags.block_size)
    shape = flags.rows, 2 * segment_ids.shape[1]
    q, k, v, d_out = (
        jax.random.normal(jax.random.key(n), (*shape, heads, model.head_dim), model.dtype)
        for n, heads in enumerate((model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads))
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        def layer(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.vjp(lambda q, k, v: pattern(q, k, v, flags.attention), q, k, v)[1](d_out)[0], None

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


def attention_products(model: ModelConfig, queries: int, document: int) -> tuple[Any, tuple[Any, ...]]:
    """The seven products of attention's forward and backward pass in every layer, scores and output, scores again and four
    gradients: of queries that each see half of their document's length of keys, the mean of causal attention."""
    K, G, H, T = model.num_kv_heads, model.num_heads // model.num_kv_heads, model.head_dim, 256
    random = lambda *shape: jax.random.normal(jax.random.key(0), shape, model.dtype)  # noqa: E731
    q_KRH, d_out_KRH, k_KCH, v_KCH = (random(K, n, H) for n in (G * T, G * T, document // 2, document // 2))

    def run(q_KRH: jax.Array, d_out_KRH: jax.Array, k_KCH: jax.Array, v_KCH: jax.Array) -> jax.Array:
        def tile(q_KRH: jax.Array, _: None) -> tuple[jax.Array, None]:
            scores_KRC = jnp.einsum("KRH,KCH->KRC", q_KRH, k_KCH)
            out_KRH = jnp.einsum("KRC,KCH->KRH", scores_KRC, v_KCH)
            q_KRH = q_KRH + 1e-6 * jnp.max(out_KRH)  # so that nothing is left out, or done once for two
            again_KRC = jnp.einsum("KRH,KCH->KRC", q_KRH, k_KCH)
            d_weights_KRC = jnp.einsum("KRH,KCH->KRC", d_out_KRH, v_KCH)
            d_v_KCH = jnp.einsum("KRC,KRH->KCH", again_KRC, d_out_KRH)
            d_k_KCH = jnp.einsum("KRC,KRH->KCH", d_weights_KRC, q_KRH)
            d_q_KRH = jnp.einsum("KRC,KCH->KRH", d_weights_KRC, k_KCH)
            return q_KRH + 1e-6 * (jnp.max(d_q_KRH) + jnp.max(d_k_KCH) + jnp.max(d_v_KCH)), None

        return jax.lax.scan(tile, q_KRH, None, length=model.num_layers * queries // T)[0]

    return run, (q_KRH, d_out_KRH, k_KCH, v_KCH)


if __name__ == "__main__":
    main()
