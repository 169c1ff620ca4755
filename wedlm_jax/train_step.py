"""One update: corrupt -> dual stream -> model -> losses -> AdamW (section 4 of the paper), as a pure function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.diffusion.corruption import corrupt, corrupt_documents
from wedlm_jax.diffusion.dual_stream import DualStreamBatch, build_dual_stream, next_token_targets
from wedlm_jax.diffusion.losses import LossWeights, Normalization, ar_loss_weights, loss_weights, wedlm_loss
from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.model.patterns import Causal, DualStream
from wedlm_jax.optimizer import OptimizerConfig, clip_by_global_norm, learning_rate, make_adamw
from wedlm_jax.sharding import replicated
from wedlm_jax.train_state import TrainState, state_shardings

Params = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

# A packed batch crosses to the device as it is; the data pipeline itself knows only numpy.
jax.tree_util.register_dataclass(
    PackedBatch, data_fields=[field.name for field in dataclasses.fields(PackedBatch)], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned."""

    block_size: int = 32  # J: tokens of a block, each with a mask ratio of its own
    in_block: Literal["causal", "bidirectional"] = "causal"  # how a prediction block sees itself (Figure 5c)
    streams: Literal["dual", "single"] = "dual"  # "single": a document is one block with one mask ratio (Eq. 7)
    normalization: Normalization = "weights"  # of the MLM loss: by the sum of the 1 / gamma, or by the learned tokens
    ar_loss_weight: float = 1.0  # w in (mlm + w * ar) / (1 + w)
    ar_steps: int = 0  # the first of the steps that train the AR loss alone; all of them for a base model
    mask_token_id: int | None = None  # None: the tokenizer's mask token, else the first free row of the vocabulary

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UserError(f"objective.block_size={self.block_size} must be at least 1")
        for name in ("ar_loss_weight", "ar_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"objective.{name}={getattr(self, name)} must be 0 or more")


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """All that is fixed while a step is compiled."""

    model: ModelConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    mask_token_id: int
    total_steps: int
    seed: int
    micro_batches: int = 1  # gradient accumulation: a step's batch is run in this many parts


def wedlm_step(state: TrainState, batch: PackedBatch, *, settings: StepSettings) -> tuple[TrainState, Metrics]:
    """One update on the MLM and AR losses of a packed batch [B, L]."""
    streams = corrupted_streams(state.step, batch, settings)
    # Of the whole batch, before it is split.
    weights = loss_weights(streams, normalization=settings.objective.normalization)
    loss = functools.partial(wedlm_forward, settings=settings)
    gradients, metrics = accumulate(loss, state.params, (streams, weights), settings.micro_batches)
    return update(state, gradients, metrics | row_metrics(batch), settings)


def corrupted_streams(step: jax.Array, batch: PackedBatch, settings: StepSettings) -> DualStreamBatch:
    """The masks of this step, drawn and reordered: what depends on (seed, step, document, block) alone."""
    block_size = settings.objective.block_size
    key = jax.random.fold_in(jax.random.key(settings.seed), step)
    single = settings.objective.streams == "single"
    draw = corrupt_documents if single else corrupt
    masked, mask_ratio = draw(key, batch.loss_mask, batch.document_ids, batch.positions, block_size=block_size)
    return build_dual_stream(
        batch.tokens, batch.loss_mask, batch.positions, batch.segment_ids, masked, mask_ratio,
        mask_token_id=settings.mask_token_id, block_size=block_size, whole_documents=single,
    )  # fmt: skip


def wedlm_forward(
    params: Params, part: tuple[DualStreamBatch, LossWeights], *, settings: StepSettings
) -> tuple[jax.Array, Metrics]:
    """The share of the loss, and of its two parts, that these rows have."""
    streams, weights = part
    objective, transformer = settings.objective, transformer_from(settings.model, params)
    block_size = streams.segment_ids.shape[1] if objective.streams == "single" else objective.block_size
    pattern = DualStream(streams.segment_ids, block_size, objective.in_block)
    hidden = transformer.hidden(streams.tokens, positions=streams.positions, pattern=pattern)
    token_losses = transformer.token_losses(hidden, streams.targets)
    return wedlm_loss(token_losses, weights, ar_loss_weight=objective.ar_loss_weight)


def ar_step(state: TrainState, batch: PackedBatch, *, settings: StepSettings) -> tuple[TrainState, Metrics]:
    """One update on the AR loss alone: plain next-token training of a base model."""
    targets, labelled = next_token_targets(batch.tokens, batch.loss_mask, batch.segment_ids)
    weights = ar_loss_weights(labelled)

    def loss(params: Params, part: tuple[PackedBatch, jax.Array, jax.Array]) -> tuple[jax.Array, Metrics]:
        batch, targets, weights = part
        transformer = transformer_from(settings.model, params)
        hidden = transformer.hidden(batch.tokens, positions=batch.positions, pattern=Causal(batch.segment_ids))
        ar_loss = jnp.sum(weights * transformer.token_losses(hidden, targets))
        return ar_loss, {"ar_loss": ar_loss}

    gradients, metrics = accumulate(loss, state.params, (batch, targets, weights), settings.micro_batches)
    return update(state, gradients, metrics | row_metrics(batch), settings)


@functools.cache
def compile_step(
    step: Callable[..., tuple[TrainState, Metrics]], settings: StepSettings, mesh: Mesh
) -> Callable[[TrainState, PackedBatch], tuple[TrainState, Metrics]]:
    """`wedlm_step` or `ar_step`, jitted: the state is given away and comes back in the same place."""
    return jax.jit(
        functools.partial(step, settings=settings),
        donate_argnums=0,
        out_shardings=(state_shardings(settings.model, settings.optimizer, mesh), replicated(mesh)),
    )


def accumulate(
    loss: Callable[[Params, Any], tuple[jax.Array, Metrics]], params: Params, batch: Any, micro_batches: int
) -> tuple[Params, Metrics]:
    """Gradients and metrics of a loss that is a plain sum over rows, one micro-batch after the other.

    Args:
      loss: (params, part of the batch) -> (loss, its parts).
      batch: a tree of arrays [B, ...].
      micro_batches: A, dividing B.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def run(part: Any) -> tuple[Params, Metrics]:
        (value, parts), gradients = value_and_grad(params, part)
        return gradients, {"loss": value, **parts}

    if micro_batches == 1:
        return run(batch)

    # Micro-batch a takes rows a, a + A, ...: so each device's share of it is cut from the rows that the device holds.
    parts = jax.tree.map(lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, run(part)), None

    shapes = jax.eval_shape(run, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, parts)[0]


def update(
    state: TrainState, gradients: Params, metrics: Metrics, settings: StepSettings
) -> tuple[TrainState, Metrics]:
    """Clip, AdamW, schedule. Where the loss or a gradient is not finite, parameters and optimizer stay as they are."""
    gradients, norm = clip_by_global_norm(gradients, settings.optimizer.clip_norm)
    rate = learning_rate(settings.optimizer, state.step, settings.total_steps)
    direction, opt_state = make_adamw(settings.optimizer).update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, jax.tree.map(lambda x: -rate * x, direction))

    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    skip = jnp.where(finite, 0, 1)
    state = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + skip,
        skipped_in_row=(state.skipped_in_row + 1) * skip,
    )
    metrics = metrics | {
        "grad_norm": norm,
        "learning_rate": rate,
        "skipped": state.skipped,
        "skipped_in_row": state.skipped_in_row,
    }
    return state, metrics


def row_metrics(batch: PackedBatch) -> Metrics:
    """Tokens of the batch that are not padding, and the share that is."""
    tokens = jnp.sum(batch.segment_ids > 0)
    return {"tokens": tokens, "padding_share": 1.0 - tokens / batch.segment_ids.size}
