"""The state before the first batch: from a seed, or from parameters that fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_training import MODEL, SETTINGS, fresh_state, one_device_mesh
from wedlm_jax.errors import UserError
from wedlm_jax.train_state import abstract_state, from_params, from_seed

ABSTRACT = abstract_state(MODEL, SETTINGS.optimizer, one_device_mesh())


def test_the_abstract_state_is_the_shape_of_the_real_one():
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), ABSTRACT)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype.name), fresh_state())


def test_the_seed_makes_the_parameters():
    one, other = fresh_state().params, from_seed(MODEL, SETTINGS.optimizer, one_device_mesh(), seed=1).params
    assert not np.array_equal(one["embed.embedding"], other["embed.embedding"])


def test_given_parameters_are_taken_in_the_dtype_of_the_state():
    params = {name: np.asarray(value, jnp.bfloat16) for name, value in fresh_state().params.items()}
    state = from_params(params, MODEL, SETTINGS.optimizer, one_device_mesh())
    for name, value in params.items():
        assert state.params[name].dtype == jnp.float32
        np.testing.assert_array_equal(state.params[name], value.astype(np.float32))
    assert state.step == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt_state))


def test_parameters_that_do_not_fit_are_all_named():
    params = fresh_state().params
    missing = {name: value for name, value in params.items() if name != "final_norm.scale"}
    misshapen = missing | {"embed.embedding": np.zeros((4, 16), np.float32), "lm_head.kernel": np.zeros(3)}
    with pytest.raises(UserError) as error:
        from_params(misshapen, MODEL, SETTINGS.optimizer, one_device_mesh())
    for name in ("final_norm.scale", "embed.embedding is (4, 16), needs (320, 16)", "lm_head.kernel"):
        assert name in str(error.value)
