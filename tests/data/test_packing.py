"""Packing against a list-based reference: nothing lost, nothing cut, block-aligned, first-fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax.data.examples import Example
from wedlm_jax.data.packing import pack
from wedlm_jax.errors import UserError

PAD = 999


def example(index, length):
    """Tokens that say which document and which place they are, so that a mix-up cannot pass."""
    tokens = np.array([1000 * (index + 1) + place for place in range(length)], np.int32)
    return Example(tokens, np.arange(length) >= length // 2, document_id=index + 70)


def reference(examples, num_rows, row_length, block_size):
    """Rows as lists of (token, learned, position, segment, document), and how many examples they hold."""
    rows = [[] for _ in range(num_rows)]
    for count, one in enumerate(examples):
        for row in rows:
            padded = row + [(PAD, False, 0, 0, 0)] * (-len(row) % block_size)
            segment = 1 + max((cell[3] for cell in row), default=0)
            longer = padded + [
                (int(token), bool(learned), position, segment, one.document_id)
                for position, (token, learned) in enumerate(zip(one.tokens, one.loss_mask, strict=True))
            ]
            if len(longer) <= row_length:
                row[:] = longer
                break
        else:
            return rows, count
    return rows, len(examples)


@st.composite
def packings(draw):
    block_size = draw(st.sampled_from([1, 4, 8]))
    row_length = block_size * draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, row_length), max_size=25))
    return lengths, draw(st.integers(1, 4)), row_length, block_size


@given(packings())
def test_packing_equals_the_list_based_reference(case):
    lengths, num_rows, row_length, block_size = case
    examples = [example(index, length) for index, length in enumerate(lengths)]
    batch, count = pack(examples, num_rows=num_rows, row_length=row_length, block_size=block_size, pad_token_id=PAD)
    rows, expected_count = reference(examples, num_rows, row_length, block_size)
    rows = [row + [(PAD, False, 0, 0, 0)] * (row_length - len(row)) for row in rows]
    expected = np.array(rows, dtype=np.int64).reshape(num_rows, row_length, 5)
    arrays = (batch.tokens, batch.loss_mask, batch.positions, batch.segment_ids, batch.document_ids)
    for field, array in enumerate(arrays):
        np.testing.assert_array_equal(array, expected[..., field])
    assert count == expected_count


@given(packings())
def test_every_token_of_every_example_lands_in_exactly_one_place_of_the_stream_of_batches(case):
    lengths, num_rows, row_length, block_size = case
    examples = [example(index, length) for index, length in enumerate(lengths)]
    seen, done = [], 0
    while done < len(examples):
        batch, count = pack(
            examples[done:], num_rows=num_rows, row_length=row_length, block_size=block_size, pad_token_id=PAD
        )
        assert count > 0
        done += count
        seen.extend(batch.tokens[batch.segment_ids > 0].tolist())
        starts = (batch.positions == 0) & (batch.segment_ids > 0)
        assert not (np.nonzero(starts)[1] % block_size).any()
        assert not batch.loss_mask[batch.segment_ids == 0].any()
    assert sorted(seen) == sorted(token for one in examples for token in one.tokens.tolist())


def test_an_example_longer_than_a_row_is_named_and_not_cut():
    with pytest.raises(UserError, match="document 71 has 9 tokens and a row holds data.row_length=8"):
        pack([example(0, 3), example(1, 9)], num_rows=4, row_length=8, block_size=4, pad_token_id=PAD)


def test_an_example_without_tokens_is_named():
    with pytest.raises(UserError, match="document 70 has no tokens"):
        pack([example(0, 0)], num_rows=1, row_length=8, block_size=4, pad_token_id=PAD)


def test_a_row_that_is_no_multiple_of_the_block_is_an_error():
    with pytest.raises(
        UserError, match="data.row_length=10 is not a multiple of block_size=4; take blocks that divide it"
    ):
        pack([], num_rows=1, row_length=10, block_size=4, pad_token_id=PAD)
