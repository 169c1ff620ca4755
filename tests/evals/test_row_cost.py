"""The products that a forward is measured against are those of its own matrices, however these lie."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.decode.models import tiny_model
from tests.decode.test_precision_and_mesh import EVEN, cut_over
from tests.model.tiny import TINY, params
from wedlm_jax.errors import UserError
from wedlm_jax.evals.row_cost import forward_program, product_program
from wedlm_jax.model import layers, weights
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.sharding import MeshConfig, make_mesh

ROWS, SLOTS, CONTEXT = 2, 3, 5
START = np.float32(1e-3)  # of what the products add to


@pytest.fixture
def kernels_turned(monkeypatch):
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(transformer_from(TINY, params(TINY)).layers)))
    monkeypatch.setattr(weights, "LARGE", 0)
    monkeypatch.setattr(weights, "PROCESSOR_CACHE", size - 1)
    turned = []
    monkeypatch.setattr(layers.Linear, "turn", lambda self, turn=layers.Linear.turn: turned.append(turn(self)))
    return turned


def test_a_forward_that_its_cache_does_not_hold_is_refused():
    """`benchmarks.wall_clock --slots 64` wrote them over the last 8 of the 200 used slots that it named."""
    sizes = dict(rows=1, slots=16, context=241)
    with pytest.raises(UserError, match="16 slots behind 241 used ones do not fit into a cache of 256"):
        forward_program(TINY, params(TINY), **sizes, allocated=256)
    forward_program(TINY, params(TINY), **sizes, allocated=257)


@pytest.mark.parametrize("context", [0, CONTEXT])
def test_plain_products_are_of_kernels_as_the_forward_has_them(context, request):
    as_trained = product_program(TINY, params(TINY), ROWS, SLOTS, context).call()
    turned = request.getfixturevalue("kernels_turned")
    again = product_program(TINY, params(TINY), ROWS, SLOTS, context).call()
    assert len(turned) == 7 * TINY.num_layers
    added, as_trained_added = (np.asarray(x) - START for x in (again, as_trained))
    assert added.shape == (ROWS * SLOTS, TINY.hidden_size) and np.all(added)
    np.testing.assert_allclose(added, as_trained_added, rtol=1e-3)
    product_program(TINY, params(TINY), 1, 1, context).call()
    assert len(turned) == 7 * TINY.num_layers  # one row is multiplied as trained


def test_a_forward_of_several_devices_is_one_that_can_be_timed():
    model = cut_over(tiny_model(0, EVEN), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    sizes = dict(rows=1, slots=SLOTS, context=CONTEXT, allocated=2 * CONTEXT, weights=model.weights)
    program = forward_program(model.config, params_of(model.transformer), **sizes)
    assert np.asarray(program.call()).shape == np.asarray(program.call()).shape == (1, SLOTS)
