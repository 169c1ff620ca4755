"""Some blocks of the prediction stream: what they compute is what they compute among all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.test_patterns import random_heads, random_rows
from tests.quick_jit import quick_jit
from wedlm_jax.model.kept_blocks import KeptBlocks, capacities, least_holding
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.ops.attention import ranges

ROWS, BLOCKS, BLOCK_SIZE, CAPACITY = 3, 16, 8, 5
L = BLOCKS * BLOCK_SIZE


def chosen_blocks():
    """Different ones in every row, in one as many as there is room for, in one none."""
    chosen = np.zeros((ROWS, BLOCKS), bool)
    chosen[0, [1, 3, 4, 9, 15]] = True
    chosen[1, [0, 8]] = True
    return jnp.asarray(chosen)


def test_places_are_the_least_quarters_that_hold_the_rows_of_each_kind():
    rows = lambda *counts: jnp.arange(8) < jnp.array(counts)[:, None]  # noqa: E731
    assert [capacities(8)[i] for i in least_holding(rows(0, 2), rows(3, 1), rows(8, 0), rows(6, 5))] == [2, 4, 8, 6]


def test_the_kept_blocks_are_the_chosen_ones_and_others_in_their_order():
    chosen = chosen_blocks()
    blocks = KeptBlocks.of(chosen, BLOCK_SIZE, CAPACITY).blocks
    assert blocks.shape == (ROWS, CAPACITY)
    for row in range(ROWS):
        assert set(np.flatnonzero(chosen[row])) <= set(blocks[row].tolist())
        assert blocks[row].tolist() == sorted(set(blocks[row].tolist()))


def test_taking_and_putting_back_are_each_others_transposes():
    kept, random = KeptBlocks.of(chosen_blocks(), BLOCK_SIZE, CAPACITY), np.random.default_rng(0)
    whole = jnp.asarray(random.normal(size=(ROWS, L, 2, 3)), jnp.float32)
    some = jnp.asarray(random.normal(size=(ROWS, CAPACITY * BLOCK_SIZE, 2, 3)), jnp.float32)
    put = functools.partial(kept.put, length=L)
    np.testing.assert_array_equal(kept.take(put(some)), some)
    np.testing.assert_array_equal(put(kept.take(whole)), jnp.where(kept.there(L)[..., None, None], whole, 0))
    np.testing.assert_array_equal(jax.vjp(kept.take, whole)[1](some)[0], put(some))
    np.testing.assert_array_equal(jax.vjp(put, some)[1](whole)[0], kept.take(whole))


@pytest.mark.parametrize(
    ("implementation", "times"),
    [("xla", 1), ("splash", 1), ("splash", 4)],
    ids=["xla", "splash, in their places", "splash"],
)
@pytest.mark.parametrize("in_block", ["causal", "bidirectional"])
def test_kept_blocks_attend_as_in_the_whole_stream_with_gradients(monkeypatch, implementation, times, in_block):
    """Splash takes them as they lie where they fill tiles: of blocks that are longer, and as many."""
    length, block_size, capacity = times * L, times * BLOCK_SIZE, {1: 5, 4: 8}[times]
    monkeypatch.setattr(ranges, "QUERY_TILE", 32)
    monkeypatch.setattr(ranges, "KEY_TILE", 32)
    monkeypatch.setattr(ranges, "DENSE_SCORES", 0)
    chosen = chosen_blocks()
    segment_ids = jnp.concatenate([random_rows(seed, length, block_size).segment_ids for seed in range(ROWS)])
    kept = KeptBlocks.of(chosen, block_size, capacity)
    q, k, v, d_out = map(jnp.asarray, random_heads(ROWS, 2 * length, 2, head_dim=64))
    read = jnp.concatenate([segment_ids > 0, jnp.repeat(chosen, block_size, axis=1) & (segment_ids > 0)], axis=1)
    d_out = jnp.where(read[..., None, None], d_out, 0)  # nobody reads the others

    def shorter(x):
        return jnp.concatenate([x[:, :length], kept.take(x[:, length:])], axis=1)

    @quick_jit
    def run(pattern, q, k, v, d_out):
        with jax.default_matmul_precision("highest"):
            value, pullback = jax.vjp(lambda q, k, v: pattern(q, k, v, implementation), q, k, v)
            return value, *pullback(d_out)

    value, *gradients = run(DualStream(segment_ids, block_size, in_block), q, k, v, d_out)
    found, *found_gradients = run(DualStream(segment_ids, block_size, in_block, kept), *map(shorter, (q, k, v, d_out)))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(
        jnp.where(shorter(read)[..., None, None], found, 0),
        shorter(jnp.where(read[..., None, None], value, 0)),
        atol=5e-6,
    )
    for ours, expected in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(ours, shorter(expected), atol=2e-5)


def test_learned_absolute_positions_follow_the_kept_blocks():
    segment_ids = jnp.asarray([[1] * 8 + [2] * 24])
    kept = KeptBlocks(jnp.array([[1, 3]]), 8)
    index = DualStream(segment_ids, 8, "causal", kept).physical_index(48)
    assert index[0, 32:].tolist() == [*range(8), *range(16, 24)]
