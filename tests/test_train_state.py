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


def test_fresh_parameters_deviate_so_that_activations_are_alike_at_any_width_and_depth():
    """1 / sqrt(inputs), and of what each layer adds to the residual stream 1 / sqrt(2 layers) of that."""
    inward = MODEL.hidden_size**-0.5
    of_heads, of_mlp = MODEL.num_heads * MODEL.head_dim, MODEL.intermediate_size
    wanted = {"embed.embedding": 0.02} | {
        "layers." + name: deviation
        for name, deviation in {
            "attention.q_proj.kernel": inward,
            "attention.k_proj.kernel": inward,
            "attention.v_proj.kernel": inward,
            "attention.o_proj.kernel": (of_heads * 2 * MODEL.num_layers) ** -0.5,
            "mlp.gate_proj.kernel": inward,
            "mlp.up_proj.kernel": inward,
            "mlp.down_proj.kernel": (of_mlp * 2 * MODEL.num_layers) ** -0.5,
        }.items()
    }
    found = {
        name: float(np.std(np.asarray(x))) for name, x in fresh_state().params.items() if not name.endswith("scale")
    }
    assert found == {name: pytest.approx(deviation, rel=0.12) for name, deviation in wanted.items()}


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
