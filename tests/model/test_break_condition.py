"""The break condition: reordering needs positions that travel with their tokens. RoPE's do; GPT-2's learned ones do not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import MASK_TOKEN_ID, TINY, cached_logits_of, logits_of, params, tiny_model
from wedlm_jax import DecodeConfig, generate
from wedlm_jax.diffusion.dual_stream import build_dual_stream
from wedlm_jax.model.flops import non_embedding_parameters
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow, Causal, DualStream

LEARNED = dataclasses.replace(TINY, position_embedding_type="learned_absolute", max_position_embeddings=64)
J, L = 4, 12
BOTH = pytest.mark.parametrize("config", [TINY, LEARNED], ids=lambda c: c.position_embedding_type)


def built(tokens, masked, segments=(1,) * L):
    """One row; the positions of every document count from 0."""
    segments = np.asarray([segments])
    positions = np.concatenate([np.arange(n) for n in np.bincount(segments[0])[1:]])
    masked = np.asarray([masked], bool)
    arrays = (jnp.asarray(x) for x in ([tokens], np.ones((1, L), bool), positions[None], segments, masked))
    ratio = jnp.ones((1, L // J))
    return build_dual_stream(*arrays, ratio, mask_token_id=MASK_TOKEN_ID, block_size=J)


def dual_logits(config, batch):
    """Logits [L, V] of the memory stream and of the prediction stream."""
    pattern = DualStream(batch.segment_ids, J)
    logits = np.asarray(logits_of(config, params(config), batch.tokens, batch.positions, pattern))[0]
    return logits[:L], logits[L:]


def second_block(layout: str):
    """A clean block, then one that holds the observed tokens 7 and 9 where `layout` has a and b, then padding-free text."""
    tokens = [1, 2, 3, 4, *({"a": 7, "b": 9, "_": 20 + i}[x] for i, x in enumerate(layout)), 5, 6, 7, 8]
    masked = [False] * J + [x == "_" for x in layout] + [False] * J
    return built(tokens, masked)


def test_under_learned_absolute_positions_mask_recovery_cannot_depend_on_where_the_masks_stood():
    layouts = ["a_b_", "_a_b", "__ab", "a__b", "ab__"]
    found = {}
    for config in (TINY, LEARNED):
        blocks = [dual_logits(config, second_block(layout))[1][J : 2 * J] for layout in layouts]
        found[config.position_embedding_type] = [np.abs(block - blocks[0]).max(axis=-1) for block in blocks[1:]]
    np.testing.assert_array_equal(found["learned_absolute"], 0.0)  # five different questions, one and the same answer
    assert all((differs[J // 2 :] > 1e-3).all() for differs in found["rope"])


@BOTH
def test_a_block_whose_masks_stand_last_needs_no_reordering_and_its_observed_tokens_are_those_of_the_ar_model(config):
    memory, prediction = dual_logits(config, second_block("ab__"))
    np.testing.assert_allclose(prediction[: J + 2], memory[: J + 2], atol=1e-5)


@BOTH
def test_without_masks_both_streams_of_packed_documents_are_a_plain_causal_language_model(config):
    tokens, segments = list(range(1, L + 1)), [1] * J + [2] * 2 * J
    batch = built(tokens, [False] * L, segments)
    memory, prediction = dual_logits(config, batch)
    plain = []
    for alone in (tokens[:J], tokens[J:]):
        positions = jnp.arange(len(alone))[None]
        plain.append(logits_of(config, params(config), jnp.asarray([alone]), positions, Causal())[0])
    np.testing.assert_allclose(memory, np.concatenate(plain), atol=1e-5)
    np.testing.assert_allclose(prediction, memory, atol=1e-5)


def test_physical_index_counts_from_the_start_of_each_document_and_from_the_cursor():
    segments = jnp.asarray([[1, 1, 1, 0, 2, 2, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2]])
    counted = [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3]]
    np.testing.assert_array_equal(Causal(segments).physical_index(8), counted)
    np.testing.assert_array_equal(DualStream(segments, J).physical_index(16), np.tile(counted, 2))
    np.testing.assert_array_equal(Causal().physical_index(3), [[0, 1, 2]])
    np.testing.assert_array_equal(CachedWindow(jnp.asarray([0, 5])).physical_index(3), [[0, 1, 2], [5, 6, 7]])


def test_windows_behind_a_cache_equal_the_full_forward_under_learned_absolute_positions():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 30, (2, 9)))
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    full = logits_of(LEARNED, params(LEARNED), tokens, positions, Causal())
    cache = KVCache.zeros(LEARNED, 2, 9)
    for start in (0, 3, 6):
        window, fed = CachedWindow(jnp.full(2, start)), slice(start, start + 3)
        logits, cache = cached_logits_of(LEARNED, params(LEARNED), tokens[:, fed], positions[:, fed], window, cache)
        np.testing.assert_allclose(logits, full[:, fed], atol=1e-5)


def test_verified_equals_autoregressive_under_learned_absolute_positions():
    model = tiny_model(position_embedding_type="learned_absolute", max_position_embeddings=32)
    settings = dict(max_new_tokens=12, stop_ids=())
    verified = DecodeConfig(decoder="verified", window_size=4, entropy_threshold=float("inf"), **settings)
    (ours, expected) = generate(model, [[1, 2, 3]] * 2, [verified, DecodeConfig(decoder="ar", **settings)])
    assert ours.ids == expected.ids and len(ours.ids) == 12


def test_a_mask_slot_past_the_table_of_learned_positions_reads_its_last_row():
    table = tiny_model(
        position_embedding_type="learned_absolute", max_position_embeddings=64
    ).transformer.embed_positions
    rows = np.asarray(table(jnp.asarray([[62, 63, 64, 80]])))[0]
    np.testing.assert_array_equal(rows[2:], rows[[1, 1]])
    assert (rows[0] != rows[1]).all()


def test_learned_positions_are_an_embedding_and_cost_no_products():
    assert non_embedding_parameters(LEARNED) == non_embedding_parameters(TINY)
