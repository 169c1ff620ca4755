"""A merged adapter computes what the adapter beside its base computes, and an adapter of mask rows is never merged."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.test_adapter import ON_ALL, ON_MASKS, TOKENS, adapted, hidden_of
from wedlm_jax.errors import UserError
from wedlm_jax.model.merging import merged


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": False}])
def test_merged_weights_compute_what_the_adapter_computes(changes):
    config, params = adapted(ON_ALL, **changes)
    plain, weights = merged(config, params)
    assert plain == dataclasses.replace(config, adapter=None)
    np.testing.assert_allclose(
        hidden_of(plain, weights, TOKENS, None), hidden_of(config, params, TOKENS, None), rtol=1e-4, atol=1e-4
    )


def test_the_dtype_of_the_base_is_kept_and_only_targets_change():
    config, params = adapted(dataclasses.replace(ON_ALL, targets=("o_proj",)), param_dtype="bfloat16")
    _, weights = merged(config, params)
    changed = {name for name, x in weights.items() if not np.array_equal(x, params[name])}
    assert changed == {"layers.attention.o_proj.kernel"}
    assert {x.dtype for x in weights.values()} == {jnp.dtype("bfloat16")}


def test_without_an_adapter_nothing_happens():
    config, params = adapted(ON_ALL)
    config, weights = merged(config, params)
    assert merged(config, weights) == (config, weights)


def test_an_adapter_of_mask_rows_is_not_merged():
    with pytest.raises(
        UserError, match=r"adapter of mask rows \(rows=mask\) cannot be merged: .* keep the adapter beside it"
    ):
        merged(*adapted(ON_MASKS))
