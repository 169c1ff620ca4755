"""Bits per byte counts every token once, with the probabilities that the model gives."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode.test_precision_and_mesh import cut_over
from tests.evals.models import tiny_model
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.tokenizer import encode_text
from wedlm_jax.decode.scores import SCORED_AT_ONCE
from wedlm_jax.errors import UserError
from wedlm_jax.evals.likelihood import bits_per_byte, recovery_by_ratio, scoring_rows
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.sharding import MeshConfig, make_mesh, mesh_in_force

TEXTS = ["def f(x):\n    return x + 1\n", "é", "import os\n" * 9]


def encode(text):
    return encode_text(tiny_model().tokenizer, text)


@given(st.integers(1, 80), st.integers(2, 17))
def test_rows_score_every_token_but_the_first_exactly_once_with_half_a_row_of_context(n, row_length):
    seen = []
    for tokens, first_scored in scoring_rows(list(range(n)), row_length):
        assert first_scored >= 1 and len(tokens) <= row_length
        assert all(token - tokens[0] >= min(token, row_length // 2) for token in tokens[first_scored:])
        seen += tokens[first_scored:]
    assert seen == list(range(1, n))


def test_bits_of_short_texts_are_those_of_one_plain_forward():
    model = tiny_model()
    bits = 0.0
    for text in TEXTS:
        tokens = jnp.asarray([encode(text)])
        logits = model(tokens, positions=jnp.arange(tokens.shape[1])[None])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        bits += math.log2(model.config.vocab_size) - float(chosen.sum()) / math.log(2)
    measured = bits_per_byte(model, TEXTS, encode, row_length=128, batch_size=2)
    assert measured.bits == pytest.approx(bits, rel=1e-5)
    assert measured.bytes == sum(len(text.encode()) for text in TEXTS)
    assert measured.tokens == sum(len(encode(text)) for text in TEXTS)
    assert measured.value == measured.bits / measured.bytes


def test_a_text_longer_than_a_row_is_still_scored_to_its_end():
    model = tiny_model()
    whole = bits_per_byte(model, TEXTS[2:], encode, row_length=256, batch_size=1)
    cut = bits_per_byte(model, TEXTS[2:], encode, row_length=8, batch_size=3)
    assert cut.tokens == whole.tokens and cut.bits == pytest.approx(whole.bits, rel=0.2) and cut.bits != whole.bits


def test_what_every_text_begins_behind_is_read_and_not_scored():
    model, before = tiny_model(), (7, 9)
    bits = 0.0
    for text in TEXTS:
        ids = encode(text)
        tokens = jnp.asarray([[*before, *ids]])
        logits = model(tokens, positions=jnp.arange(tokens.shape[1])[None])[0, 1:-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(ids)[:, None], axis=-1)
        bits -= float(chosen.sum()) / math.log(2)
    measured = bits_per_byte(model, TEXTS, encode, row_length=128, batch_size=2, before=before)
    assert measured.bits == pytest.approx(bits, rel=1e-5)
    assert measured.tokens == sum(len(encode(text)) for text in TEXTS)


def test_masked_loss_of_a_random_model_is_near_uniform_at_every_ratio():
    model = tiny_model()
    stream = batches(DataConfig(row_length=64), model.tokenizer, 8, 2, 0, "held_out")
    found = recovery_by_ratio(model, [next(stream), next(stream)], block_size=8, ratios=(0.25, 1.0))
    assert list(found) == [0.25, 1.0]
    assert np.allclose([r.loss for r in found.values()], math.log(model.config.vocab_size), atol=1.5)
    assert found[0.25].loss != found[1.0].loss and all(r.accuracy < 0.1 for r in found.values())


@pytest.mark.parametrize("reorder", [True, False])
def test_recovery_is_that_of_one_dense_forward(reorder):
    """Half of the only block masked: one causal forward over it in either order, since no memory lies before it."""
    model = tiny_model()
    tokens = np.array([[5, 6, 7, 8, 9, 10, 11, 12]], np.int32)
    places, ones = np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.int32)
    batch = PackedBatch(tokens=tokens, loss_mask=ones > 0, positions=places, segment_ids=ones, document_ids=ones)
    found = recovery_by_ratio(model, [batch], block_size=8, reorder=reorder, ratios=(0.5,))[0.5]
    keys = jax.random.uniform(jax.random.fold_in(jax.random.key(0), 0), (1, 1, 8))[0, 0]
    masked = np.isin(np.arange(8), np.argsort(keys)[:4])
    order = [*np.flatnonzero(~masked), *np.flatnonzero(masked)] if reorder else list(range(8))
    fed = jnp.asarray(np.where(masked, model.mask_token_id, tokens[0])[order])[None]
    log_p = np.asarray(jax.nn.log_softmax(model(fed, positions=jnp.asarray(order)[None])))[0]
    right = tokens[0][order]
    where = np.flatnonzero(masked[order])
    assert found.loss == pytest.approx(-log_p[where, right[where]].mean(), rel=1e-4)
    assert found.accuracy == (log_p[where].argmax(-1) == right[where]).mean()


def test_the_logits_of_few_places_are_held_at_a_time_however_long_the_rows(monkeypatch):
    """Of a row of 2,048 and Qwen's vocabulary they are 1.2 GB, and as much again where the likeliest is looked for."""
    model, seen, logits = tiny_model(), [], Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda self, hidden: seen.append(hidden.shape) or logits(self, hidden))
    batch = next(batches(DataConfig(row_length=512), model.tokenizer, 32, 2, 0, "held_out"))
    recovery_by_ratio(model, [batch], block_size=32, ratios=(0.5,))
    assert {math.prod(shape[:-1]) for shape in seen} == {SCORED_AT_ONCE}


def test_a_ratio_that_masks_nothing_in_small_blocks_is_named():
    model = tiny_model()
    batch = next(batches(DataConfig(row_length=64), model.tokenizer, 4, 2, 0, "held_out"))
    with pytest.raises(
        UserError, match="block_size=4: at a mask ratio of 0.1 no token of a block is masked, as none holds 6 "
    ):
        recovery_by_ratio(model, [batch], block_size=4)


def test_several_devices_measure_what_one_measures(monkeypatch):
    """And know that they are several while they compile: the kernels of TPUs and GPUs have to be cut over them by hand."""
    model, seen = tiny_model(), []
    batch = next(batches(DataConfig(row_length=64), model.tokenizer, 8, 2, 0, "held_out"))

    def measured(model):
        bits = bits_per_byte(model, TEXTS, encode, row_length=32, batch_size=2)
        return bits.bits, *recovery_by_ratio(model, [batch], block_size=8, ratios=(0.5,))[0.5]

    def hidden(self, *args, plain=Transformer.hidden, **kwargs):
        seen.append(mesh_in_force())
        return plain(self, *args, **kwargs)

    alone = measured(model)
    monkeypatch.setattr(Transformer, "hidden", hidden)
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=2), jax.devices()[:2])
    assert measured(cut_over(model, mesh)) == pytest.approx(alone, rel=1e-5)
    assert len(seen) == 2 and all(mesh.shape["tensor"] == 2 for mesh in seen)
