import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packed_rows import MASK_TOKEN_ID, lay_out, make_document, packed_rows
from tests.quick_jit import quick_jit
from tests.reference.diffusion import ar_loss, memory_stream, mlm_loss, prediction_stream
from wedlm_jax.diffusion.dual_stream import build_dual_stream
from wedlm_jax.diffusion.losses import LossWeights, ar_loss_weights, loss_weights, wedlm_loss

build = quick_jit(build_dual_stream, static_argnames=("mask_token_id", "block_size"))
weights_of = quick_jit(loss_weights, static_argnames="normalization")


def batch_of(rows):
    return build(*rows.batch(), mask_token_id=MASK_TOKEN_ID, block_size=rows.block_size)


def random_losses(rows, seed=0):
    return np.random.default_rng(seed).exponential(size=rows.real.shape).astype(np.float32)


@given(packed_rows(), st.sampled_from(["weights", "tokens"]), st.sampled_from([0.0, 0.3, 1.0]))
def test_losses_equal_the_list_reference(rows, normalization, w):
    token_losses = random_losses(rows)
    loss, parts = wedlm_loss(token_losses, weights_of(batch_of(rows), normalization=normalization), ar_loss_weight=w)
    memory = [memory_stream(d) for d in rows.documents]
    prediction = [prediction_stream(d, block_size=rows.block_size, mask_token_id=MASK_TOKEN_ID) for d in rows.documents]
    of_memory, of_prediction = (
        [rows.of_document(half, i).tolist() for i in range(len(rows.documents))]
        for half in np.split(token_losses, 2, axis=1)
    )
    mlm, ar = mlm_loss(of_prediction, prediction, rows.documents, normalization), ar_loss(of_memory, memory)
    np.testing.assert_allclose(parts["mlm_loss"], mlm, rtol=2e-6)
    np.testing.assert_allclose(parts["ar_loss"], ar, rtol=2e-6)
    np.testing.assert_allclose(loss, (mlm + w * ar) / (1 + w), rtol=2e-6)


def sample_rows():
    random = np.random.default_rng(3)
    documents = [make_document(random, length, 4) for length in (9, 5, 12)]
    for document in documents:
        document.learned = [i >= 2 for i in range(len(document.tokens))]
        document.masked = [i % 3 == 2 for i in range(len(document.tokens))]
    return documents


@pytest.mark.parametrize("normalization", ["weights", "tokens"])
def test_rows_and_micro_batches_do_not_change_the_loss(normalization):
    documents = sample_rows()
    batch = batch_of(lay_out([[document] for document in documents], length=12, block_size=4))
    weights = loss_weights(batch, normalization=normalization)
    token_losses = jnp.asarray(np.random.default_rng(0).exponential(size=(3, 24)), jnp.float32)
    whole, _ = wedlm_loss(token_losses, weights, ar_loss_weight=0.5)
    pieces = []
    for row in range(3):
        of_row = LossWeights(weights.mlm[row : row + 1], weights.ar[row : row + 1])
        pieces.append(wedlm_loss(token_losses[row : row + 1], of_row, ar_loss_weight=0.5)[0])
    np.testing.assert_allclose(whole, sum(pieces), rtol=1e-6)


def test_without_an_ar_loss_the_memory_stream_weighs_nothing():
    batch = batch_of(lay_out([sample_rows()], length=32, block_size=4))
    with_ar, without = (loss_weights(batch, normalization="weights", ar=ar) for ar in (True, False))
    np.testing.assert_array_equal(without.mlm, with_ar.mlm)
    assert with_ar.ar.any() and not without.ar.any()


@pytest.mark.parametrize("normalization", ["weights", "tokens"])
def test_a_batch_without_masks_has_mlm_loss_0_and_no_nan(normalization):
    documents = [dataclasses.replace(d, masked=[False] * len(d.tokens)) for d in sample_rows()]
    rows = lay_out([documents], length=32, block_size=4)
    weights = loss_weights(batch_of(rows), normalization=normalization)
    loss, parts = wedlm_loss(random_losses(rows), weights, ar_loss_weight=1.0)
    assert parts["mlm_loss"] == 0 and loss == parts["ar_loss"] / 2 and loss > 0


@pytest.mark.parametrize("normalization", ["weights", "tokens"])
def test_a_batch_with_nothing_to_learn_has_loss_0_and_no_nan(normalization):
    empty = dict(learned=[False] * 9, masked=[False] * 9)
    rows = lay_out([[dataclasses.replace(sample_rows()[0], **empty)]], length=12, block_size=4)
    loss, _ = wedlm_loss(
        random_losses(rows), loss_weights(batch_of(rows), normalization=normalization), ar_loss_weight=1.0
    )
    assert loss == 0


def test_normalised_weights_sum_to_1_and_follow_1_over_gamma():
    rows = lay_out([sample_rows()], length=32, block_size=4)
    batch = batch_of(rows)
    weights = loss_weights(batch, normalization="weights")
    np.testing.assert_allclose([weights.mlm.sum(), weights.ar.sum()], 1, rtol=1e-6)
    masked = np.asarray(batch.masked[:, 32:])
    product = np.asarray(weights.mlm * batch.mask_ratio)[masked]
    np.testing.assert_allclose(product, product[0], rtol=1e-6)
    assert not np.asarray(weights.mlm)[~masked].any()


def test_normalisation_by_tokens_counts_learned_tokens_masked_or_not():
    documents = sample_rows()
    batch = batch_of(lay_out([documents], length=32, block_size=4))
    weights = loss_weights(batch, normalization="tokens")
    learned = sum(sum(d.learned) for d in documents)
    masked = np.asarray(batch.masked[:, 32:])
    np.testing.assert_allclose(weights.mlm[masked], 1 / np.asarray(batch.mask_ratio)[masked] / learned, rtol=1e-6)


def test_ar_weights_are_a_mean_over_labels():
    np.testing.assert_array_equal(
        ar_loss_weights(jnp.array([[True, False, True, True, True]])), [[0.25, 0, 0.25, 0.25, 0.25]]
    )
    assert not ar_loss_weights(jnp.zeros((2, 3), bool)).any()


def test_an_ar_weight_of_0_leaves_the_mlm_loss_alone():
    rows = lay_out([sample_rows()], length=32, block_size=4)
    loss, parts = wedlm_loss(
        random_losses(rows), loss_weights(batch_of(rows), normalization="weights"), ar_loss_weight=0.0
    )
    assert loss == parts["mlm_loss"] and parts["ar_loss"] > 0
