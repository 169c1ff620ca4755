"""Whole forward passes: against the float64 reference, and the patterns against each other."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wedlm_jax.ops.cross_entropy as cross_entropy_module
from tests.model.tiny import MASK_TOKEN_ID, TINY, cached_logits_of, logits_of, params, tiny_model
from tests.packed_rows import lay_out, make_document
from tests.quick_jit import quick_jit
from tests.reference.attention import cross_entropy
from tests.reference.diffusion import prediction_stream
from tests.reference.transformer import ReferenceTransformer
from wedlm_jax.diffusion.dual_stream import build_dual_stream
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.patterns import CachedWindow, Causal, DualStream

BLOCK_SIZE, L = 4, 16
VARIANTS = {
    "qwen3": TINY,
    "qwen25": dataclasses.replace(TINY, qkv_bias=True, qk_norm=False, tie_word_embeddings=True),
    "one_kv_head": dataclasses.replace(TINY, num_kv_heads=1, rms_norm_eps=1e-2),
}


def sample_rows(lengths=((7, 5), (11,)), seed=0, **fields):
    random = np.random.default_rng(seed)
    rows = [[make_document(random, n, BLOCK_SIZE) for n in in_row] for in_row in lengths]
    for document in (document for in_row in rows for document in in_row):
        n = len(document.tokens)
        document.tokens = random.integers(0, 30, n).tolist()
        document.learned, document.masked = [True] * n, (random.random(n) < 0.5).tolist()
        vars(document).update({name: value(n) for name, value in fields.items()})
    return lay_out(rows, length=L, block_size=BLOCK_SIZE)


def built(rows):
    return build_dual_stream(*rows.batch(), mask_token_id=MASK_TOKEN_ID, block_size=BLOCK_SIZE)


def dual_logits(rows, config=TINY, in_block="causal"):
    batch = built(rows)
    pattern = DualStream(batch.segment_ids, BLOCK_SIZE, in_block)
    return np.asarray(logits_of(config, params(config), batch.tokens, batch.positions, pattern))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_the_float64_reference_in_any_order_of_positions(variant):
    config, random = VARIANTS[variant], np.random.default_rng(0)
    tokens, positions = (
        random.integers(0, 40, (2, L)),
        np.stack([random.permutation(L), 300 + random.permutation(40)[:L]]),
    )
    reference = ReferenceTransformer(config, params(config))
    logits = logits_of(config, params(config), tokens, positions, Causal())
    for row in range(2):
        np.testing.assert_allclose(logits[row], reference.logits(tokens[row], positions[row]), atol=1e-4)


@pytest.mark.parametrize("in_block", ["causal", "bidirectional"])
def test_dual_stream_forward_equals_the_dense_float64_reference(in_block):
    rows = sample_rows()
    batch, logits, visible = built(rows), dual_logits(rows, in_block=in_block), rows.visible(in_block)
    reference = ReferenceTransformer(TINY, params())
    for row in range(2):
        expected = reference.logits(np.asarray(batch.tokens[row]), np.asarray(batch.positions[row]), visible[row])
        real = rows.real[row]
        np.testing.assert_allclose(logits[row][real], expected[real], atol=1e-4)


def test_without_masks_both_streams_are_a_plain_causal_language_model():
    rows = sample_rows(masked=lambda n: [False] * n)
    memory, prediction = np.split(dual_logits(rows), 2, axis=1)
    plain = logits_of(TINY, params(), rows.tokens, rows.positions, Causal(rows.segment_ids))
    real = rows.segment_ids > 0
    np.testing.assert_allclose(memory[real], np.asarray(plain)[real], atol=1e-5)
    np.testing.assert_allclose(prediction[real], np.asarray(plain)[real], atol=1e-5)


def test_with_masks_the_prediction_stream_is_another_model():
    rows = sample_rows(masked=lambda n: [True] * n)
    memory, prediction = np.split(dual_logits(rows), 2, axis=1)
    real = rows.segment_ids > 0
    assert (np.abs(memory - prediction)[real].max(axis=-1) > 1e-3).all()


def test_training_block_equals_decode_window_over_the_same_prefix():
    n = 11
    rows = sample_rows(lengths=((n,), ()))
    logits = np.split(dual_logits(rows), 2, axis=1)[1][0]
    stream = prediction_stream(rows.documents[0], block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID)
    # Row b of the batch decodes block b: prefill the clean document, set the cursor in front of the block, feed the block.
    starts = list(range(0, n, BLOCK_SIZE))
    tokens = jnp.asarray([rows.documents[0].tokens] * len(starts))
    positions = jnp.broadcast_to(jnp.arange(n), tokens.shape)
    cache = KVCache.zeros(TINY, len(starts), L)
    prefill = CachedWindow(jnp.zeros(len(starts), jnp.int32))
    _, cache = cached_logits_of(TINY, params(), tokens, positions, prefill, cache)
    window_tokens, window_positions = np.zeros((2, len(starts), BLOCK_SIZE), np.int32)
    for block, start in enumerate(starts):
        for slot, row in enumerate(stream[start : start + BLOCK_SIZE]):
            window_tokens[block, slot], window_positions[block, slot] = row.token, row.position
    window = CachedWindow(jnp.asarray(starts))
    window_logits, _ = cached_logits_of(TINY, params(), window_tokens, window_positions, window, cache)
    np.testing.assert_allclose(np.asarray(window_logits).reshape(-1, 40)[:n], logits[:n], atol=1e-5)


def test_incremental_windows_with_ragged_cursors_equal_the_full_forward():
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 40, (3, L)))
    positions = jnp.broadcast_to(jnp.arange(L), tokens.shape)
    full = np.asarray(logits_of(TINY, params(), tokens, positions, Causal()))
    cache, length = KVCache.zeros(TINY, 3, L), np.array([0, 0, 0])
    # Each row keeps a number of its own of the three tokens fed; the others are overwritten by the next window.
    for kept in ([1, 2, 3], [3, 1, 2], [2, 0, 3], [1, 3, 3]):
        slots = length[:, None] + np.arange(3)
        fed = jnp.take_along_axis(tokens, jnp.asarray(slots), axis=1)
        logits, cache = cached_logits_of(
            TINY, params(), fed, jnp.asarray(slots), CachedWindow(jnp.asarray(length)), cache
        )
        np.testing.assert_allclose(logits, np.take_along_axis(full, slots[..., None], axis=1), atol=1e-5)
        length = length + kept
        # What was fed but not kept was garbage for all that the next window knows.
        stale = np.arange(L)[None, :] >= length[:, None]
        cache = jax.tree.map(lambda x, stale=stale: jnp.where(stale[None, :, None, :, None], 1e3, x), cache)


def test_the_memory_stream_and_other_blocks_do_not_see_the_masks_of_a_block():
    rows, again = sample_rows(lengths=((15,), (16,))), sample_rows(lengths=((15,), (16,)))
    again.masked[:, BLOCK_SIZE : 2 * BLOCK_SIZE] ^= True  # block 1 alone
    logits, changed = dual_logits(rows), dual_logits(again)
    same = (logits == changed).all(axis=-1)
    np.testing.assert_array_equal(same[:, :L], True)
    block = np.arange(L) // BLOCK_SIZE
    np.testing.assert_array_equal(same[:, L:], np.broadcast_to(block != 1, (2, L)))


def test_a_document_does_not_notice_what_it_is_packed_with():
    rows, again = sample_rows(), sample_rows()
    other = again.segment_ids == 2
    again.tokens[other] = (again.tokens[other] + 1) % 30
    first = np.concatenate([rows.segment_ids == 1] * 2, axis=1)
    logits, changed = dual_logits(rows), dual_logits(again)
    np.testing.assert_array_equal(logits[first], changed[first])
    assert (logits != changed).any()


def test_a_document_gets_no_gradient_from_what_it_is_packed_with():
    rows = sample_rows(lengths=((7, 5), ()))
    rows.tokens = np.where(rows.segment_ids == 1, rows.tokens % 15, 15 + rows.tokens % 15)  # vocabularies of their own
    rows.masked[:] = False
    batch, first = built(rows), np.concatenate([rows.segment_ids == 1] * 2, axis=1)

    @quick_jit
    def gradient(params):
        def loss(params):
            transformer = transformer_from(TINY, params)
            pattern = DualStream(batch.segment_ids, BLOCK_SIZE)
            hidden = transformer.hidden(batch.tokens, positions=batch.positions, pattern=pattern)
            return jnp.sum(jnp.where(first[..., None], hidden, 0) ** 3)

        return jax.grad(loss)(params)

    embedding = np.asarray(gradient(params())["embed.embedding"])
    used = np.unique(rows.tokens[rows.segment_ids == 1])
    assert (np.abs(embedding[used]).max(axis=1) > 0).all()
    assert not embedding[15:].any()


def test_hidden_then_logits_is_the_call():
    model, tokens, positions = tiny_model(), jnp.arange(10)[None], jnp.arange(10)[None]

    @quick_jit
    def in_two_calls(tokens, positions):
        hidden = model.hidden(tokens, positions=positions)
        return hidden, model.logits(hidden), model.logits(hidden[:, 3:5])

    hidden, logits, some = in_two_calls(tokens, positions)
    assert hidden.shape == (1, 10, TINY.hidden_size)
    in_one_call = quick_jit(lambda tokens, positions: model(tokens, positions=positions))(tokens, positions)
    np.testing.assert_allclose(in_one_call, logits, atol=1e-6)
    np.testing.assert_allclose(logits_of(TINY, params(), tokens, positions, Causal()), logits, atol=1e-6)
    np.testing.assert_allclose(some, logits[:, 3:5], atol=1e-6)


def test_token_losses_are_the_cross_entropy_of_the_logits():
    model, tokens, positions = tiny_model(), jnp.arange(10)[None], jnp.arange(10)[None]

    @quick_jit
    def losses_and_logits(tokens, positions):
        hidden = model.hidden(tokens, positions=positions)
        return model.transformer.token_losses(hidden, tokens + 1), model.logits(hidden)

    losses, logits = losses_and_logits(tokens, positions)
    expected = cross_entropy(logits[0], np.eye(TINY.vocab_size), np.arange(10) + 1)
    np.testing.assert_allclose(losses[0], expected, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_carry_no_loss_change_neither_losses_nor_gradients(tied):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    random = np.random.default_rng(0)
    hidden, targets = random.normal(size=(2, 6, TINY.hidden_size)).astype(np.float32), random.integers(0, 40, (2, 6))
    carries_loss = random.random((2, 6)) < 0.5

    @functools.partial(quick_jit, static_argnames="skip")
    def run(params, hidden, skip):
        def loss(params, hidden):
            transformer = transformer_from(config, params)
            losses = transformer.token_losses(hidden, targets, jnp.asarray(carries_loss) if skip else None)
            return jnp.sum(jnp.where(carries_loss, losses, 0.0)), losses

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)

    (_, all_losses), (expected, d_hidden) = run(init_params(config, 0), hidden, False)
    (_, losses), (gradients, d_hidden_skipped) = run(init_params(config, 0), hidden, True)
    np.testing.assert_allclose(losses, np.where(carries_loss, all_losses, 0.0), atol=1e-6)
    np.testing.assert_allclose(d_hidden_skipped, d_hidden, atol=1e-6)
    head = "embed.embedding" if tied else "lm_head.kernel"
    assert np.any(expected[head])
    np.testing.assert_allclose(gradients[head], expected[head], atol=1e-6)


@functools.partial(quick_jit, static_argnames="config")
def gradients_of(config, params, tokens):
    def loss(params):
        transformer = transformer_from(config, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return jnp.mean(transformer.token_losses(transformer.hidden(tokens, positions=positions), tokens))

    return jax.grad(loss)(params)


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize(
    ("remat", "mlp_tile"),
    [("dots", None), ("attention", None), ("full", None), ("none", 4), ("dots", 4), ("attention", 4), ("full", 4)],
)
def test_remat_tiles_and_layers_apart_change_no_gradient(remat, mlp_tile, scan_layers):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)))
    plain = gradients_of(TINY, params(), tokens)
    config = dataclasses.replace(TINY, remat=remat, mlp_tile=mlp_tile, scan_layers=scan_layers)
    recomputed = gradients_of(config, params(), tokens)
    for name, gradient in plain.items():
        assert np.any(gradient), f"{name} has no gradient at all"
        np.testing.assert_allclose(recomputed[name], gradient, atol=1e-6, err_msg=name)


def test_a_training_step_never_holds_the_logits_of_both_streams(monkeypatch):
    batch = built(sample_rows())
    rows = batch.tokens.size

    def logits_held():
        """The largest number of rows of logits in the lowered gradient of the losses."""

        def loss(params):
            transformer = transformer_from(TINY, params)
            pattern = DualStream(batch.segment_ids, BLOCK_SIZE)
            hidden = transformer.hidden(batch.tokens, positions=batch.positions, pattern=pattern)
            return jnp.sum(transformer.token_losses(hidden, batch.targets))

        text = jax.jit(jax.grad(loss)).lower(params()).as_text()
        shapes = [[int(n) for n in found.split("x")] for found in re.findall(r"tensor<([\dx]+)xf32>", text)]
        return max(math.prod(shape[:-1]) for shape in shapes if shape[-1] == TINY.vocab_size)

    assert logits_held() >= rows, "unchunked, they are there: the search can find them"
    monkeypatch.setattr(cross_entropy_module, "CPU_TILE", cross_entropy_module.Tile(8, TINY.vocab_size))
    assert logits_held() < rows
