"""One update: corrupt -> dual stream -> model -> losses -> AdamW (section 4 of the paper), as a pure function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.diffusion.corruption import corrupt, corrupt_documents
from wedlm_jax.diffusion.dual_stream import DualStreamBatch, build_dual_stream, next_token_targets
from wedlm_jax.diffusion.losses import LossWeights, ar_loss_weights, loss_weights, wedlm_loss
from wedlm_jax.errors import UserError
from wedlm_jax.mask_training import mask_gradients, pairs_of_masks, taught
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kept_blocks import KeptBlocks, beside_a_mask, capacities, least_holding, with_a_mask
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.model.patterns import Causal, DualStream
from wedlm_jax.objective import ObjectiveConfig
from wedlm_jax.optimizer import OptimizerConfig, clip_by_global_norm, learning_rate, make_adamw
from wedlm_jax.sharding import batch_sharding, on_mesh, replicated
from wedlm_jax.step_metrics import Metrics, logged_losses, row_metrics, sums_by_ratio
from wedlm_jax.train_state import TrainState, state_shardings

Params = dict[str, jax.Array]

# A packed batch crosses to the device as it is; the data pipeline itself knows only numpy.
jax.tree_util.register_dataclass(PackedBatch)


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """All that is fixed while a step is compiled."""

    model: ModelConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    mask_token_id: int | None  # None: mask rows are fed an adapter's embedding
    total_steps: int
    seed: int
    micro_batches: int = 1  # gradient accumulation: a step's batch is run in this many parts
    skip_unread: bool = False  # blocks of the prediction stream without a mask do not run

    def __post_init__(self) -> None:
        self.objective.check_adapter(self.model.adapter)
        if self.model.kernel_dtype is not None:
            raise UserError(f"model.kernel_dtype={self.model.kernel_dtype} is for decoding alone; leave it out")
        if self.model.adapter is None and self.model.param_dtype != "float32":
            raise UserError(
                f"model.param_dtype={self.model.param_dtype} is for the base of an adapter, which stays as it is; most updates "
                "of a model that is trained itself would round to nothing: leave it out (model.dtype is what it computes in)"
            )
        if self.skip_unread and not self.runs_by_blocks:
            raise ValueError("skip_unread is for the dual stream of a model of which all rows are trained")
        if self.mask_token_id is None and self.model.needs_mask_token:
            raise ValueError("mask_token_id=None is for an adapter with rows=mask")
        if self.only_mask_rows and self.model.position_embedding_type != "rope":
            raise UserError("model.adapter with rows=mask is not implemented for learned absolute positions")

    @property
    def only_mask_rows(self) -> bool:
        return self.model.adapter is not None and self.model.adapter.rows == "mask"

    @property
    def runs_by_blocks(self) -> bool:
        """Whether there are blocks that need not run."""
        return self.objective.streams == "dual" and not self.only_mask_rows


def wedlm_step(state: TrainState, batch: PackedBatch, *, settings: StepSettings) -> tuple[TrainState, Metrics]:
    """One update on the MLM and AR losses of a packed batch [B, L]."""
    objective = settings.objective
    streams = corrupted_streams(state.step, batch, settings)
    distils, with_ar = objective.targets == "distill", objective.ar_loss_weight > 0
    counted = taught(streams) if distils else streams
    weights = loss_weights(counted, normalization=objective.normalization, ar=with_ar)  # of the whole batch
    run = functools.partial(mask_rows_alone if settings.only_mask_rows else both_streams, state, settings=settings)
    gradients, sums = in_parts(run, (streams, weights), settings.micro_batches)
    losses = logged_losses(sums, counted, objective)
    loss_rows = jnp.sum(streams.masked) + (jnp.sum(streams.labelled) if with_ar else 0)
    pairs = pairs_of_masks(streams, objective.block_size) if settings.only_mask_rows else None
    runs, reach = runs_of_tokens(streams, settings), pattern_of(batch.segment_ids, settings).block_ranges()[1]
    rows = row_metrics(
        batch, settings.model, runs=runs, loss_rows=loss_rows, reach=reach, of_masks=pairs, distils=distils
    )
    return update(state, gradients, losses | rows, settings)


def corrupted_streams(step: jax.Array, batch: PackedBatch, settings: StepSettings) -> DualStreamBatch:
    """The masks of this step, drawn and reordered: what depends on (seed, step, document, block) alone."""
    objective = settings.objective
    key = jax.random.fold_in(jax.random.key(settings.seed), step)
    of_batch = key, batch.loss_mask, batch.document_ids, batch.positions
    single = objective.streams == "single"
    if single:
        masked, mask_ratio = corrupt_documents(*of_batch, block_size=objective.block_size)
    else:
        masked, mask_ratio = corrupt(
            *of_batch, block_size=objective.block_size,
            fully_masked=objective.fully_masked, suffix_masked=objective.suffix_masked,
        )  # fmt: skip
    return build_dual_stream(
        batch.tokens, batch.loss_mask, batch.positions, batch.segment_ids, masked, mask_ratio,
        mask_token_id=settings.mask_token_id or 0, block_size=objective.block_size, whole_documents=single,
        reorder=objective.reorder,
    )  # fmt: skip


def runs_of_tokens(streams: DualStreamBatch, settings: StepSettings) -> jax.Array:
    """How often each token of the batch has to run through the layers, int [] or [B, L]."""
    length = streams.segment_ids.shape[1]
    if settings.only_mask_rows or settings.skip_unread:
        return 1 + beside_a_mask(streams.masked[:, length:], settings.objective.block_size)
    return jnp.int32(2)


def both_streams(
    state: TrainState, part: tuple[DualStreamBatch, LossWeights], *, settings: StepSettings
) -> tuple[Params, Metrics]:
    """`wedlm_forward` and its gradients. Where much of the rows is not learned, as little of the prediction stream runs as holds
    the blocks with a mask: all of `capacities` are compiled, the device chooses."""
    streams, weights = part
    length = weights.ar.shape[1]
    if not settings.skip_unread:
        return gradients_of(functools.partial(wedlm_forward, settings=settings), state, part)
    block_size = settings.objective.block_size
    read = with_a_mask(streams.masked[:, length:], block_size)

    def run(capacity: int) -> tuple[Params, Metrics]:
        kept = KeptBlocks.of(read, block_size, capacity) if capacity < read.shape[1] else None
        return gradients_of(functools.partial(wedlm_forward, settings=settings, kept=kept), state, part)

    (least,) = least_holding(read)
    return jax.lax.switch(least, [functools.partial(run, capacity) for capacity in capacities(read.shape[1])])


def pattern_of(segment_ids: jax.Array, settings: StepSettings, kept: KeptBlocks | None = None) -> DualStream:
    """Who sees whom; the single stream is one block a row."""
    block_size = segment_ids.shape[1] if settings.objective.streams == "single" else settings.objective.block_size
    return DualStream(segment_ids, block_size, settings.objective.in_block, kept)


def wedlm_forward(
    params: Params,
    part: tuple[DualStreamBatch, LossWeights],
    *,
    settings: StepSettings,
    kept: KeptBlocks | None = None,
) -> tuple[jax.Array, Metrics]:
    """The share of the loss, and of its two parts, that these rows have; rows of weight 0 see no output layer.

    Args:
      kept: the blocks of the prediction stream that run, among them all that hold a mask; None: all.
    """
    streams, weights = part
    if kept is not None:
        streams, weights = streams.of_prediction(kept.take), weights._replace(mlm=kept.take(weights.mlm))
    transformer, pattern = transformer_from(settings.model, params), pattern_of(streams.segment_ids, settings, kept)
    hidden = transformer.hidden(streams.tokens, positions=streams.positions, pattern=pattern, masked=streams.masked)
    carries_loss = jnp.concatenate([weights.ar, weights.mlm], axis=1) > 0
    token_losses = transformer.token_losses(hidden, streams.targets, carries_loss)
    loss, parts = wedlm_loss(token_losses, weights, ar_loss_weight=settings.objective.ar_loss_weight)
    return loss, parts | sums_by_ratio(token_losses, streams)


def mask_rows_alone(
    state: TrainState, part: tuple[DualStreamBatch, LossWeights], *, settings: StepSettings
) -> tuple[Params, Metrics]:
    """`wedlm_forward` and its gradients for an adapter of mask rows."""
    streams, weights = part
    objective = settings.objective
    gradients, loss, losses = mask_gradients(
        state.params, state.frozen, streams, weights, model=settings.model, block_size=objective.block_size,
        targets=objective.targets, temperature=objective.distill_temperature,
    )  # fmt: skip
    by_ratio = sums_by_ratio(jnp.concatenate([jnp.zeros_like(losses), losses], axis=1), streams)
    return gradients, {"loss": loss, "mlm_loss": loss} | by_ratio


def ar_step(state: TrainState, batch: PackedBatch, *, settings: StepSettings) -> tuple[TrainState, Metrics]:
    """One update on the AR loss alone: plain next-token training of a base model."""
    targets, labelled = next_token_targets(batch.tokens, batch.loss_mask, batch.segment_ids)
    loss = functools.partial(ar_forward, settings=settings)
    parts = batch, targets, ar_loss_weights(labelled)
    gradients, metrics = in_parts(functools.partial(gradients_of, loss, state), parts, settings.micro_batches)
    rows = row_metrics(batch, settings.model, runs=jnp.int32(1), loss_rows=jnp.sum(labelled))
    return update(state, gradients, metrics | rows, settings)


def ar_forward(
    params: Params, part: tuple[PackedBatch, jax.Array, jax.Array], *, settings: StepSettings
) -> tuple[jax.Array, Metrics]:
    """The share of the AR loss that these rows have: (batch, targets [B, L], weights [B, L])."""
    batch, targets, weights = part
    transformer = transformer_from(settings.model, params)
    hidden = transformer.hidden(batch.tokens, positions=batch.positions, pattern=Causal(batch.segment_ids))
    ar_loss = jnp.sum(weights * transformer.token_losses(hidden, targets, weights > 0))
    return ar_loss, {"ar_loss": ar_loss}


def place(batch: PackedBatch, mesh: Mesh) -> PackedBatch:
    """A batch on the devices, each process giving its own rows: those of its share, as `row_shares` numbers them."""
    put = functools.partial(jax.make_array_from_process_local_data, batch_sharding(mesh))
    return PackedBatch(**{name: put(array) for name, array in vars(batch).items()})


@functools.cache
def compile_step(
    step: Callable[..., tuple[TrainState, Metrics]], settings: StepSettings, mesh: Mesh
) -> Callable[[TrainState, PackedBatch], tuple[TrainState, Metrics]]:
    """`wedlm_step` or `ar_step`, jitted: the state is given away and comes back in the same place."""

    def step_on_mesh(state: TrainState, batch: PackedBatch) -> tuple[TrainState, Metrics]:
        # Around the backward pass too: the model sets this for its forward pass, and custom gradients are traced after that.
        with on_mesh(mesh), jax.default_matmul_precision(settings.model.precision):
            return step(state, batch, settings=settings)

    return jax.jit(
        step_on_mesh,
        donate_argnums=0,
        out_shardings=(state_shardings(settings.model, settings.optimizer, mesh), replicated(mesh)),
    )


def gradients_of(
    loss: Callable[[Params, Any], tuple[jax.Array, Metrics]], state: TrainState, part: Any
) -> tuple[Params, Metrics]:
    """Gradients, in what is trained, and metrics of a loss that is a plain sum over rows.

    Args:
      loss: (all parameters, part of the batch) -> (loss, its parts).
    """
    value_and_grad = jax.value_and_grad(lambda params: loss(state.frozen | params, part), has_aux=True)
    (value, parts), gradients = value_and_grad(state.params)
    return gradients, {"loss": value, **parts}


def in_parts(run: Callable[[Any], tuple[Params, Metrics]], batch: Any, micro_batches: int) -> tuple[Params, Metrics]:
    """The sum of what `run` returns, one micro-batch after the other.

    Args:
      run: part of the batch -> (gradients, metrics); no gradients where only what is measured is wanted.
      batch: a tree of arrays [B, ...].
      micro_batches: A, dividing B.
    """
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
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    direction, opt_state = make_adamw(settings.optimizer).update(
        gradients, state.opt_state, state.params, finite=finite
    )
    params = optax.apply_updates(state.params, jax.tree.map(lambda x: -rate * x, direction))

    params = jax.tree.map(lambda new, old: jnp.where(finite, new, old), params, state.params)
    skip = jnp.where(finite, 0, 1)
    state = dataclasses.replace(
        state,
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
