"""The attention patterns on random queries, keys and values against dense float64 attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import examples
from tests.packed_rows import lay_out, make_document, packed_rows
from tests.quick_jit import quick_jit
from tests.reference.attention import attention, attention_gradients
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow, Causal, DualStream
from wedlm_jax.model.transformer import REMAT_POLICIES
from wedlm_jax.ops.attention import cache, ranges

ROWS, BLOCKS, BLOCK_SIZE = 2, 3, 4
L, N, H = BLOCKS * BLOCK_SIZE, 4, 6


def random_heads(rows, length, kv_heads, seed=0, head_dim=H):
    random = np.random.default_rng(seed)
    shapes = [(rows, length, heads, head_dim) for heads in (N, kv_heads, kv_heads, N)]
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


@quick_jit
def value_and_gradients(pattern, q, k, v, d_out):
    with jax.default_matmul_precision("highest"):
        value, pullback = jax.vjp(pattern, q, k, v)
        return value, pullback(d_out)


KINDS = [(1, "causal"), (2, "bidirectional"), (4, "causal")]  # all grouped-query ratios, both kinds of block


@given(packed_rows(shapes=((ROWS, BLOCKS, BLOCK_SIZE),)), st.sampled_from(KINDS))
def test_dual_stream_attention_is_dense_masked_attention_with_gradients(rows, kind):
    kv_heads, in_block = kind
    q, k, v, d_out = random_heads(ROWS, 2 * L, kv_heads)
    real = rows.real[..., None, None]
    d_out = np.where(real, d_out, 0)  # nobody reads what padding computes
    value, gradients = value_and_gradients(DualStream(rows.segment_ids, BLOCK_SIZE, in_block), q, k, v, d_out)
    visible = rows.visible(in_block)
    np.testing.assert_allclose(np.where(real, value, 0), np.where(real, attention(q, k, v, visible)[0], 0), atol=5e-6)
    for ours, expected in zip(gradients, attention_gradients(q, k, v, visible, d_out), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "kv_heads", "remat"), [(4, 64, 4, "none"), (8, 128, 2, "dots"), (32, 64, 1, "full")]
)
def test_real_head_sizes_in_many_tiles_are_exact_to_1e_5_whatever_is_recomputed(
    monkeypatch, block_size, head_dim, kv_heads, remat
):
    monkeypatch.setattr(ranges, "QUERY_TILE", 32)
    monkeypatch.setattr(ranges, "KEY_TILE", 32)
    monkeypatch.setattr(ranges, "DENSE_SCORES", 0)
    length = 96

    @quick_jit
    def run(segment_ids, q, k, v, d_out):
        pattern = DualStream(segment_ids, block_size)
        attend = lambda q, k, v: pattern(q, k, v)  # noqa: E731
        if remat != "none":
            attend = jax.checkpoint(attend, policy=REMAT_POLICIES[remat])
        with jax.default_matmul_precision("highest"):
            value, pullback = jax.vjp(attend, q, k, v)
            return value, pullback(d_out)

    for seed in range(examples(2, 100)):
        rows = random_rows(seed, length, block_size)
        q, k, v, d_out = random_heads(1, 2 * length, kv_heads, seed, head_dim)
        real = rows.real[..., None, None]
        d_out = np.where(real, d_out, 0)
        value, gradients = run(rows.segment_ids, q, k, v, d_out)
        visible = rows.visible()
        assert_close(np.where(real, value, 0), np.where(real, attention(q, k, v, visible)[0], 0))
        for ours, expected in zip(gradients, attention_gradients(q, k, v, visible, d_out), strict=True):
            assert_close(ours, expected)


def random_rows(seed, length, block_size):
    """One row of ragged documents, with padding where they do not fill it."""
    random, documents, left = np.random.default_rng(seed), [], length // block_size
    while left > 0 and (not documents or random.random() < 0.8):
        size = random.integers(1, left * block_size + 1)
        documents.append(make_document(random, size, block_size))
        left -= -(-size // block_size)
    return lay_out([documents], length=length, block_size=block_size)


def assert_close(ours, expected):
    """Relative to the largest entry."""
    assert np.max(np.abs(ours - expected)) <= 1e-5 * np.max(np.abs(expected))


@pytest.mark.parametrize("in_block", ["causal", "bidirectional"])
def test_rows_of_padding_alone_and_empty_prefixes_make_no_nan(in_block):
    segment_ids = jnp.zeros((ROWS, L), jnp.int32).at[0, :3].set(1)
    q, k, v, d_out = random_heads(ROWS, 2 * L, 2)
    value, gradients = value_and_gradients(DualStream(segment_ids, BLOCK_SIZE, in_block), q, k, v, d_out)
    assert np.isfinite(value).all() and all(np.isfinite(g).all() for g in gradients)


@given(packed_rows(shapes=((ROWS, BLOCKS, BLOCK_SIZE),)))
def test_causal_with_segments_is_dense_masked_attention_with_gradients(rows):
    q, k, v, d_out = random_heads(ROWS, L, 2)
    visible = rows.visible()[:, :L, :L]
    real = rows.real[:, :L, None, None]
    d_out = np.where(real, d_out, 0)
    value, gradients = value_and_gradients(Causal(rows.segment_ids), q, k, v, d_out)
    np.testing.assert_allclose(np.where(real, value, 0), np.where(real, attention(q, k, v, visible)[0], 0), atol=5e-6)
    for ours, expected in zip(gradients, attention_gradients(q, k, v, visible, d_out), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_blocks_that_do_not_fill_a_row_are_refused():
    """Two rows of six tokens are as long as three blocks of four."""
    x = jnp.ones((2, 12, 2, 4))
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        DualStream(jnp.ones((2, 6), jnp.int32), 4)(x, x, x, "xla")


def test_causal_without_segments_is_one_document():
    q, k, v, _ = random_heads(ROWS, L, 2)
    ones = jnp.ones((ROWS, L), jnp.int32)
    call = quick_jit(lambda pattern: pattern(q, k, v))
    np.testing.assert_array_equal(call(Causal()), call(Causal(ones)))


@pytest.mark.parametrize("in_block", ["causal", "bidirectional"])
def test_packed_documents_get_no_gradient_from_each_other(in_block):
    random = np.random.default_rng(0)
    rows = lay_out([[make_document(random, n, BLOCK_SIZE) for n in (5, 4)]] * ROWS, length=L, block_size=BLOCK_SIZE)
    q, k, v, d_out = random_heads(ROWS, 2 * L, 2)
    segments = np.concatenate([rows.segment_ids] * 2, axis=1)
    for own in (1, 2):
        d_own = np.where(segments[..., None, None] == own, d_out, 0)
        _, gradients = value_and_gradients(DualStream(rows.segment_ids, BLOCK_SIZE, in_block), q, k, v, d_own)
        for gradient in map(np.asarray, gradients):
            assert gradient[segments == own].any() and not gradient[segments != own].any()


CACHE_SLOTS, WINDOW = 8, 3
ONE_LAYER = ModelConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=N, num_kv_heads=2, head_dim=H
)


@quick_jit
def through_cache(length, q, k, v, cache, layer):
    with jax.default_matmul_precision("highest"):
        return CachedWindow(length)(q, k, v, cache=cache, layer=layer)


def full_cache():
    random = np.random.default_rng(7)
    shape = KVCache.zeros(ONE_LAYER, 3, CACHE_SLOTS).k.shape
    return KVCache(*(jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(2)))


def test_a_window_sees_the_committed_slots_of_its_row_and_causally_itself():
    q, k, v, _ = random_heads(3, WINDOW, 2)
    before, length = full_cache(), np.array([0, 2, 5])
    out, after = through_cache(length, q, k, v, before, 1)
    for row, cursor in enumerate(length):
        keys, values = (
            np.concatenate([old[1, row, :, :cursor].swapaxes(0, 1), new[row]])[None]
            for old, new in ((before.k, k), (before.v, v))
        )
        visible = np.arange(cursor + WINDOW)[None, None, :] <= cursor + np.arange(WINDOW)[None, :, None]
        expected, _ = attention(q[row : row + 1], keys, values, visible)
        np.testing.assert_allclose(out[row], expected[0], atol=5e-6)
        for new, held in ((k, after.k), (v, after.v)):
            np.testing.assert_array_equal(held[1, row, :, cursor : cursor + WINDOW].swapaxes(0, 1), new[row])


def test_what_an_idle_row_holds_is_not_read_and_makes_no_other_row_read_more(monkeypatch):
    """Slots behind the context that the other rows use are poisoned: to read them, masked or not, would show."""
    monkeypatch.setattr(cache, "smallest_context", lambda rows: 2)
    q, k, v, _ = random_heads(3, WINDOW, 2)
    length = np.array([0, 5, 1])
    clean = full_cache()
    expected, _ = through_cache(length, q, k, v, clean, 1)
    poisoned = KVCache(*(x.at[:, :, :, 4:].set(np.nan) for x in (clean.k, clean.v)))
    for idle, used in (
        (np.array([False, True, False]), np.array([0, 2])),
        (np.array([False, True, True]), np.array([0])),
    ):
        out, after = CachedWindow(length, idle=idle)(q, k, v, cache=poisoned, layer=1)
        np.testing.assert_allclose(out[used], expected[used], atol=5e-6)
        np.testing.assert_array_equal(after.k[1, 1, :, 5:].swapaxes(0, 1), k[1])  # an idle row writes as ever


def test_a_window_changes_its_own_slots_of_its_own_layer_alone():
    q, k, v, _ = random_heads(3, WINDOW, 2)
    before, length = full_cache(), np.array([0, 2, 5])
    _, after = through_cache(length, q, k, v, before, 1)
    own = (np.arange(CACHE_SLOTS) >= length[:, None]) & (np.arange(CACHE_SLOTS) < length[:, None] + WINDOW)
    for old, new in ((before.k, after.k), (before.v, after.v)):
        changed = (np.asarray(old) != np.asarray(new)).any(axis=(2, 4))
        np.testing.assert_array_equal(changed, np.stack([np.zeros_like(own), own]))


def test_writes_past_the_end_are_dropped_and_never_clamped():
    q, k, v, _ = random_heads(3, WINDOW, 2)
    before, length = full_cache(), np.array([6, 7, 20])
    _, after = through_cache(length, q, k, v, before, 0)
    for row, (cursor, kept) in enumerate(zip(length, (2, 1, 0), strict=True)):
        np.testing.assert_array_equal(after.k[0, row, :, :cursor], before.k[0, row, :, :cursor])
        np.testing.assert_array_equal(after.k[0, row, :, cursor:].swapaxes(0, 1), k[row, :kept])
        np.testing.assert_array_equal(after.v[0, row, :, cursor:].swapaxes(0, 1), v[row, :kept])
