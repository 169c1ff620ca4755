"""The FLOPs that a step needs, counted by hand: of the parameters, the losses and the pairs that see each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_training import MODEL, SETTINGS, fresh_state, one_device_mesh, packed_batch
from wedlm_jax.diffusion.dual_stream import next_token_targets, visibility
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.train_state import from_seed
from wedlm_jax.train_step import StepSettings, ar_step, corrupted_streams, wedlm_step


def useful_flops(step, settings: StepSettings, state, batch) -> float:
    """This number of a step alone: nothing that it does not depend on is compiled."""
    return jax.jit(lambda state, batch: step(state, batch, settings=settings)[1]["useful_flops"])(state, batch)


@pytest.mark.parametrize("in_block", ["causal", "bidirectional"])
def test_useful_flops_are_those_of_the_parameters_the_losses_and_the_visible_pairs(in_block):
    settings = dataclasses.replace(SETTINGS, objective=dataclasses.replace(SETTINGS.objective, in_block=in_block))
    batch = packed_batch()
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(0), batch, settings)
    real = batch.segment_ids > 0
    seen = np.asarray(visibility(jnp.asarray(batch.segment_ids), block_size=4, in_block=in_block))
    both = np.concatenate([real, real], axis=1)
    pairs = (seen & both[:, :, None] & both[:, None, :]).sum()
    layers = sum(x.size for name, x in fresh_state().params.items() if name != "embed.embedding")
    heads = MODEL.num_layers * MODEL.num_heads * MODEL.head_dim
    loss_rows = streams.labelled.sum() + streams.masked.sum()
    expected = 6 * layers * 2 * real.sum() + 6 * 320 * 16 * loss_rows + 12 * heads * pairs
    np.testing.assert_allclose(useful_flops(wedlm_step, settings, fresh_state(), batch), expected, rtol=1e-6)
    pairs = (seen & both[:, :, None] & both[:, None, :])[:, : real.shape[1]].sum()
    expected = 6 * layers * real.sum() + 6 * 320 * 16 * streams.labelled.sum() + 12 * heads * pairs
    np.testing.assert_allclose(useful_flops(ar_step, SETTINGS, fresh_state(), batch), expected, rtol=1e-6)


def test_useful_flops_of_an_adapter_of_all_rows_make_no_gradients_of_its_base():
    model = dataclasses.replace(MODEL, adapter=AdapterConfig(rank=2, rows="all"))
    settings, batch = dataclasses.replace(SETTINGS, model=model), packed_batch()
    state = from_seed(model, settings.optimizer, one_device_mesh(), seed=0)
    base = sum(x.size for name, x in state.frozen.items() if name != "embed.embedding")
    own = sum(x.size for x in state.params.values())
    rows, heads = (batch.segment_ids > 0).sum(), MODEL.num_layers * MODEL.num_heads * MODEL.head_dim
    pairs = np.where(batch.segment_ids > 0, batch.positions + 1, 0).sum()
    loss_rows = next_token_targets(*(jnp.asarray(x) for x in (batch.tokens, batch.loss_mask, batch.segment_ids)))[
        1
    ].sum()
    expected = (4 * base + 6 * own) * rows + 4 * 320 * 16 * loss_rows + 12 * heads * pairs
    np.testing.assert_allclose(useful_flops(ar_step, settings, state, batch), expected, rtol=1e-6)


def test_useful_flops_of_an_adapter_of_mask_rows_are_backward_for_those_alone():
    """And of blocks without masks those of the memory stream alone: their copy is read by none, and does not run."""
    adapter = AdapterConfig(rank=2)
    model, objective = dataclasses.replace(MODEL, adapter=adapter), SETTINGS.objective
    settings = dataclasses.replace(
        SETTINGS, model=model, objective=dataclasses.replace(objective, ar_loss_weight=0, targets="distill")
    )
    batch = packed_batch()
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(0), batch, settings)
    real, masks = batch.segment_ids > 0, np.asarray(streams.masked)
    beside = masks[:, 24:].reshape(8, -1, 4).any(axis=2).repeat(4, axis=1)
    assert 0.1 < (real & beside).sum() / real.sum() < 0.9
    both = np.concatenate([real, real & beside], axis=1)
    seen = np.asarray(visibility(jnp.asarray(batch.segment_ids), block_size=4)) & both[:, :, None] & both[:, None, :]
    state = from_seed(model, settings.optimizer, one_device_mesh(), seed=0)
    base = sum(x.size for name, x in state.frozen.items() if name != "embed.embedding")
    own = sum(x.size for name, x in state.params.items() if name != "mask_embedding")
    heads = MODEL.num_layers * MODEL.num_heads * MODEL.head_dim
    expected = 2 * base * (both.sum() + masks.sum()) + 6 * own * masks.sum() + 6 * 320 * 16 * masks.sum()
    by_masks = seen & masks[:, :, None]  # backward: scores and queries of each pair, keys and values of masks alone
    expected += 4 * heads * (seen.sum() + by_masks.sum() + (by_masks & masks[:, None, :]).sum())
    np.testing.assert_allclose(useful_flops(wedlm_step, settings, state, batch), expected, rtol=1e-6)
