"""Turned arrays are numpy's, whatever the order of the axes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax.hf.turning import contiguous, copy_turned


@given(st.permutations(range(3)), st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_an_array_is_turned_as_numpy_turns_it(order, shape):
    source = np.arange(np.prod(shape)).reshape(shape).transpose(order)
    for turned in (source, source[0], source[0, 0], source[0, 0, 0]) if source.size else (source,):
        target = np.full(np.shape(turned), -1)
        copy_turned(target, np.asarray(turned))
        assert np.array_equal(target, turned)
        of_rows = contiguous(np.asarray(turned))
        assert np.array_equal(of_rows, turned) and of_rows.flags.c_contiguous
