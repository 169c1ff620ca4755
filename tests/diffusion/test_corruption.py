from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packed_rows import lay_out, make_document, packed_rows
from tests.quick_jit import quick_jit
from tests.reference.diffusion import masked_candidates, round_half_even
from wedlm_jax.diffusion.corruption import MIN_MASK_RATIO, corrupt, corrupt_documents, mask_lowest

jitted_corrupt = quick_jit(corrupt, static_argnames=("block_size", "fully_masked", "suffix_masked"))
jitted_mask_lowest = quick_jit(mask_lowest)
dyadic = st.integers(0, 64).map(lambda n: n / 64)  # times a small count: exact in float32, and often an exact tie


def draw(rows, seed=0):
    arrays = (jnp.asarray(x) for x in (rows.loss_mask, rows.document_ids, rows.positions))
    masked, ratio = jitted_corrupt(jax.random.key(seed), *arrays, block_size=rows.block_size)
    return np.asarray(masked), np.asarray(ratio)


@given(packed_rows(), st.integers(0, 3))
def test_each_block_masks_round_half_even_of_gamma_times_its_candidates(rows, seed):
    masked, ratio = draw(rows, seed)
    assert not masked[~rows.loss_mask].any(), "prompts and padding are never masked"
    assert (ratio >= MIN_MASK_RATIO).all() and (ratio < 1).all()
    shape = (*ratio.shape, rows.block_size)
    candidates, drawn = rows.loss_mask.reshape(shape).sum(-1), masked.reshape(shape).sum(-1)
    for block in np.ndindex(ratio.shape):
        exact = Fraction(float(ratio[block])) * int(candidates[block])
        if abs(exact - exact // 1 - Fraction(1, 2)) > Fraction(1, 10**5):  # float32 cannot tell a nearer one from a tie
            assert drawn[block] == round_half_even(exact)


def test_a_document_of_the_single_stream_has_one_ratio_and_its_masks_follow_it():
    """A packed pair of documents: one ratio each, the share of masks near it, prompts never masked; elsewhere the same draw."""
    length, J = 4096, 16
    document_ids = jnp.repeat(jnp.array([[7, 9]]), length, axis=1)
    positions = jnp.tile(jnp.arange(length), 2)[None]
    candidates = positions >= 64
    masked, ratio = corrupt_documents(jax.random.key(3), candidates, document_ids, positions, block_size=J)
    for document in range(2):
        part = slice(document * length, (document + 1) * length)
        gammas = np.unique(ratio[0, document * length // J : (document + 1) * length // J])
        assert len(gammas) == 1
        share = float(masked[0, part].sum() / candidates[0, part].sum())
        assert abs(share - gammas[0]) < 5 * np.sqrt(0.25 / (length - 64))
    assert ratio[0, 0] != ratio[0, -1] and not masked[~candidates].any()
    alone, _ = corrupt_documents(
        jax.random.key(3), candidates[:, length:], document_ids[:, length:], positions[:, length:], block_size=J
    )
    np.testing.assert_array_equal(alone, masked[:, length:])


@given(st.data(), st.sampled_from([1, 4, 8]))
def test_the_candidates_of_the_lowest_scores_are_masked_ties_of_the_count_to_even(data, size):
    scores = data.draw(st.lists(dyadic, min_size=size, max_size=size))
    candidates = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ratio = data.draw(dyadic)
    masked = jitted_mask_lowest(jnp.array([scores]), jnp.array([candidates]), jnp.array([ratio], jnp.float32))
    np.testing.assert_array_equal(masked[0], masked_candidates(scores, candidates, ratio))


@pytest.mark.parametrize(
    ("candidates", "ratio", "count"), [(1, 0.5, 0), (3, 0.5, 2), (5, 0.5, 2), (4, 0.125, 0), (4, 1.0, 4), (0, 1.0, 0)]
)
def test_half_a_mask_rounds_to_even(candidates, ratio, count):
    masked = mask_lowest(jnp.zeros((1, 5)), jnp.arange(5)[None] < candidates, jnp.array([ratio]))
    assert masked.sum() == count


def test_a_document_gets_the_same_masks_wherever_it_is_packed():
    random = np.random.default_rng(0)
    documents = [make_document(random, length, 4) for length in (7, 4, 5, 1)]
    for document in documents:
        document.learned = [True] * len(document.tokens)
    rows = lay_out([documents[:2], documents[2:]], length=12, block_size=4)
    turned = lay_out([[documents[3], documents[0]], [documents[1], documents[2]]], length=12, block_size=4)
    place_in_turned = {0: 1, 1: 2, 2: 3, 3: 0}
    own_id = {0: 0} | {there + 1: here + 1 for here, there in place_in_turned.items()}  # ids follow the document
    turned.document_ids = np.vectorize(own_id.get)(turned.document_ids).astype(np.int32)
    masked, ratio = draw(rows)
    masked_again, ratio_again = draw(turned)
    assert masked.any()
    for here, there in place_in_turned.items():
        np.testing.assert_array_equal(rows.of_document(masked, here), turned.of_document(masked_again, there))
        (row, start), (row_again, start_again) = rows.places[here], turned.places[there]
        for block in range(len(documents[here].mask_ratios)):
            assert ratio[row, start // 4 + block] == ratio_again[row_again, start_again // 4 + block]


def test_a_prompt_in_front_of_a_block_does_not_change_the_draw_of_the_next():
    positions, document_ids = jnp.arange(32)[None], jnp.ones((1, 32), jnp.int32)
    all_learned = jnp.ones((1, 32), bool)
    masked, ratio = jitted_corrupt(jax.random.key(1), all_learned, document_ids, positions, block_size=8)
    with_prompt = all_learned.at[:, :8].set(False)
    masked_again, ratio_again = jitted_corrupt(jax.random.key(1), with_prompt, document_ids, positions, block_size=8)
    np.testing.assert_array_equal(ratio, ratio_again)
    np.testing.assert_array_equal(masked[:, 8:], masked_again[:, 8:])
    assert masked[:, :8].any() and masked[:, 8:].any()


def test_key_document_and_block_each_change_the_draw():
    candidates = jnp.ones((2, 12), bool)
    document_ids = jnp.stack([jnp.full(12, 5), jnp.full(12, 6)])
    positions = jnp.stack([jnp.arange(12)] * 2)
    keys = (jax.random.key(0), jax.random.key(1))
    ratios = [jitted_corrupt(key, candidates, document_ids, positions, block_size=4)[1] for key in keys]
    drawn = np.stack(ratios).reshape(-1)
    assert len(np.unique(drawn)) == len(drawn) == 2 * 2 * 3


def test_gamma_is_uniform_and_every_subset_of_a_size_equally_likely():
    blocks_drawn, size = 8192, 4
    length = blocks_drawn * size
    candidates, document_ids = jnp.ones((1, length), bool), jnp.ones((1, length), jnp.int32)
    masked, ratio = jitted_corrupt(
        jax.random.key(2), candidates, document_ids, jnp.arange(length)[None], block_size=size
    )
    ratio, masked = np.sort(np.asarray(ratio)[0]), np.asarray(masked).reshape(blocks_drawn, size)
    # Kolmogorov-Smirnov and chi-square at a significance of about one in a thousand, for a fixed key.
    distance = np.abs(ratio - (np.arange(blocks_drawn) + 0.5) / blocks_drawn).max()
    assert distance < 1.95 / np.sqrt(blocks_drawn)
    for count, subsets, bound in ((1, 4, 16.3), (2, 6, 20.5), (3, 4, 16.3)):
        chosen = masked[masked.sum(axis=1) == count] @ (1 << np.arange(size))
        seen = np.unique(chosen, return_counts=True)[1]
        assert len(seen) == subsets
        expected = len(chosen) / subsets
        assert np.sum((seen - expected) ** 2 / expected) < bound


def test_a_share_of_the_blocks_is_masked_whole_another_from_the_end_and_the_ratios_of_all_others_stay_uniform():
    count, size, whole_share, suffix_share = 4096, 8, 0.25, 0.5
    length = count * size
    masked, ratio = jitted_corrupt(
        jax.random.key(0), jnp.ones((1, length), bool), jnp.ones((1, length), jnp.int32), jnp.arange(length)[None],
        block_size=size, fully_masked=whole_share, suffix_masked=suffix_share,
    )  # fmt: skip
    masked, ratio = np.asarray(masked).reshape(count, size), np.asarray(ratio)[0]
    whole = ratio == 1
    assert masked[whole].all()
    assert abs(whole.mean() - whole_share) < 5 * np.sqrt(whole_share * (1 - whole_share) / count)
    rest = np.sort(ratio[~whole])
    distance = np.abs(rest - (np.arange(len(rest)) + 0.5) / len(rest)).max()
    assert distance < 1.95 / np.sqrt(len(rest))
    # Of blocks with half of their masks: the last half by chance is one subset in 70.
    half = masked[masked.sum(axis=1) == size // 2]
    suffixes, share = (half == (np.arange(size) >= size // 2)).all(axis=1).mean(), suffix_share / (1 - whole_share)
    assert abs(suffixes - (share + (1 - share) / 70)) < 5 * np.sqrt(share * (1 - share) / len(half))
