import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packed_rows import MASK_TOKEN_ID, packed_rows
from tests.quick_jit import quick_jit
from tests.reference.diffusion import memory_stream, prediction_stream
from wedlm_jax.diffusion.dual_stream import build_dual_stream, next_token_targets, visibility
from wedlm_jax.model.patterns import DualStream

build = quick_jit(build_dual_stream, static_argnames=("mask_token_id", "block_size", "whole_documents", "reorder"))
visible_by_equation = quick_jit(visibility, static_argnames=("block_size", "in_block"))


@given(packed_rows())
def test_both_streams_equal_the_list_reference(rows):
    batch = build(*rows.batch(), mask_token_id=MASK_TOKEN_ID, block_size=rows.block_size)
    length = rows.tokens.shape[1]
    halves = {
        name: np.split(np.asarray(getattr(batch, name)), 2, axis=1)
        for name in ("tokens", "positions", "masked", "targets")
    }
    for index, document in enumerate(rows.documents):
        expected = (
            memory_stream(document),
            prediction_stream(document, block_size=rows.block_size, mask_token_id=MASK_TOKEN_ID),
        )
        for stream, reference in enumerate(expected):
            ours = {name: rows.of_document(half[stream], index) for name, half in halves.items()}
            np.testing.assert_array_equal(ours["tokens"], [r.token for r in reference])
            np.testing.assert_array_equal(ours["positions"], [r.position for r in reference])
            np.testing.assert_array_equal(ours["masked"], [r.masked for r in reference])
            has_target = [r.target is not None for r in reference]
            counted = rows.of_document(batch.labelled, index) if stream == 0 else ours["masked"]
            np.testing.assert_array_equal(counted, has_target)
            np.testing.assert_array_equal(
                ours["targets"][has_target], [r.target for r in reference if r.target is not None]
            )
        np.testing.assert_array_equal(
            rows.of_document(batch.mask_ratio, index), np.float32([r.mask_ratio for r in expected[1]])
        )
    padding = ~rows.real
    assert not np.asarray(batch.masked)[padding].any() and not np.asarray(batch.labelled)[padding[:, :length]].any()
    np.testing.assert_array_equal(batch.learned, rows.loss_mask)


@given(packed_rows())
def test_the_single_stream_is_each_document_as_one_block(rows):
    """Eq. 7: what the list reference makes of a block that holds the whole document."""
    batch = build(*rows.batch(), mask_token_id=MASK_TOKEN_ID, block_size=rows.block_size, whole_documents=True)
    length = rows.tokens.shape[1]
    for index, document in enumerate(rows.documents):
        whole = dataclasses.replace(document, mask_ratios=document.mask_ratios[:1])
        expected = prediction_stream(whole, block_size=len(document.tokens), mask_token_id=MASK_TOKEN_ID)
        for name in ("tokens", "positions", "masked"):
            ours = rows.of_document(np.asarray(getattr(batch, name))[:, length:], index)
            np.testing.assert_array_equal(ours, [getattr(row, name.removesuffix("s")) for row in expected])
        targets = rows.of_document(np.asarray(batch.targets)[:, length:], index)
        is_mask = [row.masked for row in expected]
        np.testing.assert_array_equal(targets[is_mask], [row.target for row in expected if row.masked])
    np.testing.assert_array_equal(batch.tokens[:, :length], rows.tokens)


@given(packed_rows())
def test_in_standard_order_every_token_and_mask_keeps_its_place(rows):
    """And nothing else changes: targets, labels and gammas are those of the reordered batch, moved back."""
    for whole in (False, True):
        sizes = dict(mask_token_id=MASK_TOKEN_ID, block_size=rows.block_size, whole_documents=whole)
        ours, reordered = (build(*rows.batch(), **sizes, reorder=reorder) for reorder in (False, True))
        length = rows.tokens.shape[1]
        np.testing.assert_array_equal(ours.tokens[:, length:], np.where(rows.masked, MASK_TOKEN_ID, rows.tokens))
        for name, expected in (("positions", rows.positions), ("masked", rows.masked), ("targets", rows.tokens)):
            np.testing.assert_array_equal(getattr(ours, name)[:, length:], expected)
        for name in ("segment_ids", "mask_ratio", "labelled", "learned"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(reordered, name))


@given(packed_rows())
def test_a_document_of_the_single_stream_sees_no_memory_and_all_before_it(rows):
    one_block = dataclasses.replace(rows, block_size=rows.tokens.shape[1])
    pattern = DualStream(jnp.asarray(rows.segment_ids), one_block.block_size)
    length, real = one_block.block_size, rows.segment_ids > 0
    expected = one_block.visible()
    inside = seen(pattern.block_ranges(), length)
    for row in range(len(real)):
        np.testing.assert_array_equal(inside[row][real[row]], expected[row, length:, length:][real[row]])
    assert not seen(pattern.ranges()[1], length).any() and not expected[:, length:, :length].any()


def test_no_label_crosses_documents_and_none_lies_on_a_prompt():
    tokens = jnp.array([[10, 11, 12, 13, 20, 21, 0, 0]])
    segment_ids = jnp.array([[1, 1, 1, 1, 2, 2, 0, 0]])
    loss_mask = jnp.array([[False, False, True, True, True, True, False, False]])
    targets, labelled = next_token_targets(tokens, loss_mask, segment_ids)
    # 13 -> 20 would cross documents; 10 -> 11 predicts a prompt token; the last column has nothing after it.
    np.testing.assert_array_equal(labelled, [[False, True, True, False, True, False, False, False]])
    np.testing.assert_array_equal(targets[labelled], [12, 13, 21])


def test_the_end_of_a_row_does_not_predict_its_beginning():
    ones = jnp.ones((1, 4), jnp.int32)
    _, labelled = next_token_targets(ones, ones.astype(bool), ones)
    np.testing.assert_array_equal(labelled, [[True, True, True, False]])


@given(packed_rows(), st.sampled_from(["causal", "bidirectional"]))
def test_visibility_equals_equation_9_entry_by_entry(rows, in_block):
    dense = np.asarray(visible_by_equation(rows.segment_ids, block_size=rows.block_size, in_block=in_block))
    real = rows.real
    expected = rows.visible(in_block)
    for row in range(len(real)):
        np.testing.assert_array_equal(dense[row][real[row]], expected[row][real[row]])


@pytest.mark.parametrize("in_block", ["causal", "bidirectional"])
def test_the_pieces_of_the_pattern_make_up_the_dense_mask(in_block):
    segment_ids = jnp.array([[1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0]])
    B, L, J = 2, 12, 4
    pattern = DualStream(segment_ids, J, in_block)
    dense = np.zeros((B, 2 * L, 2 * L), bool)
    memory, prefix = pattern.ranges()
    dense[:, :L, :L], dense[:, L:, :L], dense[:, L:, L:] = (
        seen(x, L) for x in (memory, prefix, pattern.block_ranges())
    )
    # Padding sees padding, and nobody reads what it computes.
    real = np.concatenate([segment_ids, segment_ids], axis=1) > 0
    expected = visibility(segment_ids, block_size=J, in_block=in_block)
    np.testing.assert_array_equal(dense[real], expected[real])


def seen(ranges, length):
    """Key ranges (start, end), each [B, L], as bool [B, L, L]."""
    start, end = (np.asarray(x)[..., None] for x in ranges)
    return (start <= np.arange(length)) & (np.arange(length) < end)
