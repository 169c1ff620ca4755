"""A single row times a matrix, as a TPU is given it: the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.ops import single_row
from wedlm_jax.ops.rows_by_matrix import rows_by_matrix


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_row_that_is_alone_gets_another_one_and_its_product_is_its_own(rows, monkeypatch):
    monkeypatch.setattr(single_row, "target_platform", lambda: "tpu")
    random, seen = np.random.default_rng(0), []
    x, matrix = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((rows, 3, 4), (3, 4, 5)))

    def product(x):
        seen.append(len(x))
        return jnp.tensordot(x, matrix, 2)

    found = single_row.by_matrix_unit(product, x)
    assert seen == [max(rows, 2)] and found.shape == (rows, 5)
    np.testing.assert_allclose(found, jnp.tensordot(x, matrix, 2), rtol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4), (2, 1, 4)], ids=str)
def test_the_output_layer_keeps_the_shape_of_its_rows(shape, monkeypatch):
    for module in ("single_row", "rows_by_matrix"):
        monkeypatch.setattr(f"wedlm_jax.ops.{module}.target_platform", lambda: "tpu")
    random = np.random.default_rng(0)
    x, matrix = (jnp.asarray(random.normal(size=s), jnp.float32) for s in (shape, (6, 4)))
    np.testing.assert_allclose(rows_by_matrix(x, matrix), jnp.einsum("...I,OI->...O", x, matrix), rtol=1e-5)
