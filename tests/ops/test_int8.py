"""Rounding to int8: the nearest, with a scale for every output."""

import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.ops.int8 import LARGEST, to_int8


@pytest.mark.parametrize(("shape", "inputs"), [((6, 5), (0,)), ((2, 3, 4), (0, 1)), ((2, 6, 3, 4), (1,))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_becomes_the_nearest_step_and_the_greatest_of_an_output_the_last_one(shape, inputs, dtype):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rounded, scale = (np.asarray(x) for x in to_int8(jnp.asarray(kernel, dtype), inputs))
    kernel = np.asarray(jnp.asarray(kernel, dtype), np.float32)
    assert rounded.dtype == np.int8 and rounded.shape == shape
    assert scale.dtype == np.float32 and scale.shape == tuple(n for axis, n in enumerate(shape) if axis not in inputs)
    assert (np.abs(rounded).max(axis=inputs) == LARGEST).all()
    wide = np.expand_dims(scale, inputs)
    assert (np.abs(rounded * wide - kernel) <= wide * 0.5001).all()


def test_an_output_without_weights_stays_zero():
    rounded, scale = to_int8(jnp.asarray(np.zeros((3, 2)), "float32"), (0,))
    assert not np.asarray(rounded).any() and np.asarray(scale).tolist() == [1.0, 1.0]
