"""A look at held-out data during training: losses of the same rows under the same masks each time, and a few completions."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.records import UnfitTokenizer
from wedlm_jax.decode.generation import generate
from wedlm_jax.diffusion.dual_stream import next_token_targets
from wedlm_jax.diffusion.losses import ar_loss_weights, loss_weights
from wedlm_jax.distributed import is_main
from wedlm_jax.errors import UserError
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.tasks import prompt_of
from wedlm_jax.metrics.writers import fetch
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.sharding import on_mesh, replicated, row_shares
from wedlm_jax.step_metrics import masked_by_ratio
from wedlm_jax.train_step import (
    Params,
    StepSettings,
    ar_forward,
    corrupted_streams,
    in_parts,
    place,
    wedlm_forward,
)

# Of the held-out rows and masks: one for all runs, so that their curves can be laid over each other. The rows do not depend on
# where a run goes on: they follow from data and train.batch_size, not from the processes or the micro-batches.
SEED = 0


class Validation:
    """Held-out rows, drawn once. Where they are of so few documents that these come twice or more, a line on stderr says so.

    Args:
      data: the data section of the experiment.
      evaluation: how samples are decoded.
      settings: of the training step.
      tokenizer, eos_token_ids: of the model.
      mesh: of the training.
      rows: of a batch, over all processes; it is run in as many parts as a training step.
      num_batches: of the losses.
      num_samples: completions, of different prompts.

    Raises:
      UserError: the data has no held-out split, or none that can be read; or the tokenizer lacks what the data need.
    """

    def __init__(
        self,
        data: DataConfig,
        evaluation: EvaluationConfig,
        settings: StepSettings,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        mesh: Mesh,
        *,
        rows: int,
        num_batches: int,
        num_samples: int,
    ):
        self._settings = dataclasses.replace(settings, seed=SEED)
        self._evaluation, self._tokenizer, self._eos_token_ids, self._mesh = evaluation, tokenizer, eos_token_ids, mesh
        shares = row_shares(mesh)
        own, num_shares = shares[jax.process_index()], len(set(shares.values()))
        data = dataclasses.replace(data, num_workers=0)
        try:
            stream = batches(data, tokenizer, settings.objective.block_size, rows, SEED, "held_out", own, num_shares)
            drawn = [next(stream) for _ in range(num_batches)]
        except UnfitTokenizer:
            raise  # training needs it, too
        except UserError as error:
            asked = f"train.eval_every asks for held-out data: {error}"
            raise UserError(f"{asked}, or measure nothing with train.eval_every=0") from error
        held_out = [tokens.tobytes() for batch in drawn for tokens, _ in documents(batch)]
        if is_main() and len(held_out) >= 2 * (different := len(set(held_out))):
            more = "more data" if data.share_is_fixed else "a larger data.held_out_share"
            print(
                f"note: different held-out documents: {different}; they come again, {len(held_out)} times in all, to fill "
                f"train.eval_batches={num_batches}; {more}, in another workdir, holds out more",
                file=sys.stderr,
            )
        self._batches = [place(batch, mesh) for batch in drawn]
        room = settings.model.max_position_embeddings - evaluation.max_new_tokens
        # One process alone decodes: a completion is not worth gathering the model for.
        found = dict.fromkeys(tuple(one) for batch in drawn for one in prompts(batch) if 0 < len(one) <= room)
        self._prompts = [list(one) for one in found][:num_samples] if jax.process_count() == 1 else []

    def measure(self, params: Params, *, masks: bool) -> dict[str, float | int | None]:
        """Losses in nats, `validation_ar_loss` and with `masks` also `validation_mlm_loss` and those by mask ratio.

        Each is normalised as in training, batch by batch, and averaged over the batches, without those that have no mask or no
        next token to learn; those by mask ratio are means over all masked tokens of that ratio. None where there are none.
        """
        losses = _compiled(held_out_losses if masks else held_out_ar_loss, self._settings, self._mesh)
        totals: Any = None
        for number, batch in enumerate(self._batches):
            part = losses(params, jnp.int32(number), batch)
            totals = part if totals is None else jax.tree.map(jnp.add, totals, part)
        sums, counts = totals
        means = {name: sums[name] / jnp.where(counts[name] > 0, counts[name], jnp.nan) for name in sums}
        return {f"validation_{name}": value for name, value in fetch(means).items()}

    def samples(self, params: Params, *, masks: bool) -> list[dict[str, Any]]:
        """Completions of the held-out prompts, by verified decoding once there are masks, by AR decoding before.

        Returns:
          {"number", "decoder", "prompt", "completion", "tokens_per_forward"} for each.
        """
        if not self._prompts:
            return []
        config = self._evaluation.verified if masks else self._evaluation.autoregressive
        settings, tokenizer = self._settings, self._tokenizer
        transformer = transformer_from(settings.model, params)
        model = Model(transformer, settings.model, tokenizer, settings.mask_token_id, self._eos_token_ids)
        completions = generate(model, self._prompts, config)
        return [
            {
                "number": number,
                "decoder": config.decoder,
                "prompt": tokenizer.decode(prompt),
                "completion": completion.text,
                "tokens_per_forward": round(completion.stats.tokens_per_forward, 3),
            }
            for number, (prompt, completion) in enumerate(zip(self._prompts, completions, strict=True))
        ]


def documents(batch: PackedBatch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens of every document of packed rows, and which of them are learned."""
    for tokens, learned, segments in zip(batch.tokens, batch.loss_mask, batch.segment_ids, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            yield tokens[inside], learned[inside]


def prompts(batch: PackedBatch) -> list[list[int]]:
    """The prompt of every document of packed rows."""
    return [prompt_of(tokens, learned) for tokens, learned in documents(batch)]


def held_out_losses(params: Params, number: jax.Array, batch: PackedBatch, *, settings: StepSettings) -> Any:
    """Both losses of batch `number`, which also keys its masks, and the sums by mask ratio; then of how many each is the sum: 1
    for a loss that was normalised by something, and the masked tokens of that ratio."""
    streams = corrupted_streams(number, batch, settings)
    weights = loss_weights(streams, normalization=settings.objective.normalization)
    _, sums = in_parts(
        lambda part: ({}, wedlm_forward(params, part, settings=settings)[1]), (streams, weights), settings.micro_batches
    )
    counts = {name: jnp.sum(masked) for name, masked in masked_by_ratio(streams).items()}
    mlm = weights.mlm > 0 if settings.objective.normalization == "weights" else streams.learned
    return sums, counts | {"mlm_loss": _any(mlm), "ar_loss": _any(weights.ar > 0)}


def held_out_ar_loss(params: Params, number: jax.Array, batch: PackedBatch, *, settings: StepSettings) -> Any:
    """The AR loss alone, in the same form."""
    targets, labelled = next_token_targets(batch.tokens, batch.loss_mask, batch.segment_ids)
    _, sums = in_parts(
        lambda part: ({}, ar_forward(params, part, settings=settings)[1]),
        (batch, targets, ar_loss_weights(labelled)),
        settings.micro_batches,
    )
    return sums, {"ar_loss": _any(labelled)}


def _any(counted: jax.Array) -> jax.Array:
    return jnp.any(counted).astype(jnp.int32)


@functools.cache
def _compiled(losses: Callable[..., Any], settings: StepSettings, mesh: Mesh) -> Callable[..., Any]:
    def run(params: Params, number: jax.Array, batch: PackedBatch) -> Any:
        with on_mesh(mesh):
            return losses(params, number, batch, settings=settings)

    return jax.jit(run, out_shardings=replicated(mesh))
