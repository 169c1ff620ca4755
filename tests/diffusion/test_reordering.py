import functools

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.packed_rows import packed_rows
from tests.quick_jit import quick_jit
from tests.reference.diffusion import reordered
from wedlm_jax.diffusion.reordering import reorder, reorder_blocks

jitted_reorder = quick_jit(reorder)
jitted_reorder_blocks = quick_jit(reorder_blocks, static_argnames="block_size")
flags = functools.partial(st.lists, st.booleans())


@given(st.sampled_from([1, 5, 16]).flatmap(lambda n: st.tuples(*[flags(min_size=n, max_size=n)] * 4)))
def test_reorder_equals_the_list_reference(drawn):
    masked, padding = np.array(drawn[:2]), np.array(drawn[2:])
    order = jitted_reorder(masked, padding)
    expected = [reordered(m, p) for m, p in zip(masked.tolist(), padding.tolist(), strict=True)]
    np.testing.assert_array_equal(order, expected)


@given(packed_rows())
def test_reorder_blocks_is_reorder_inside_each_block(rows):
    padding = rows.segment_ids == 0
    order = np.asarray(jitted_reorder_blocks(rows.masked, padding, block_size=rows.block_size))
    for row in range(len(order)):
        for start in range(0, order.shape[1], rows.block_size):
            block = (row, slice(start, start + rows.block_size))
            expected = reordered(rows.masked[block].tolist(), padding[block].tolist())
            np.testing.assert_array_equal(order[block], np.array(expected) + start)


def test_every_mask_stands_behind_every_observed_token_of_its_block():
    masked = jnp.array([[True, False, True, False, False, True, False, False]])
    padding = jnp.array([[False, False, False, False, False, False, False, True]])
    order = reorder_blocks(masked, padding, block_size=4)
    np.testing.assert_array_equal(order, [[1, 3, 0, 2, 4, 6, 5, 7]])
