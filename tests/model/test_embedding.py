"""Embeddings: what is looked up, and gradients that sum thousands of tokens."""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax import absent_devices
from wedlm_jax.model.embedding import Embedding
from wedlm_jax.model.layers import Linear
from wedlm_jax.program_costs import collectives
from wedlm_jax.sharding import MeshConfig, batch_sharding, make_mesh, on_mesh, replicated

from .tiny import TINY

MASK = 7
IN_BFLOAT16 = dataclasses.replace(TINY, dtype="bfloat16")


def gradient(config, ids, masked=None, weights=1.0):
    """Of the weighted sum of what is looked up, in the table."""
    graph, state = nnx.split(Embedding(config, config.vocab_size, "vocab", rngs=nnx.Rngs(0)))

    def loss(state):
        return jnp.sum(nnx.merge(graph, state)(ids, masked).astype(jnp.float32) * weights)

    return np.asarray(jax.jit(jax.grad(loss))(state)["embedding"][...])


@pytest.mark.parametrize("knows_masks", [False, True])
def test_the_gradient_of_a_row_that_thousands_of_tokens_read_loses_none_in_bfloat16(knows_masks):
    ids = jnp.full((2, 2048), MASK).at[:, ::4].set(3)  # a sum of ones in bfloat16 stays at 256
    found = gradient(IN_BFLOAT16, ids, ids == MASK if knows_masks else None)
    assert (found[MASK] == 3072).all() and (found[3] == 1024).all()
    assert not np.delete(found, [3, MASK], axis=0).any()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_gradient_is_that_of_a_plain_look_up_however_many_are_masks(share):
    rng = np.random.default_rng(0)
    masked = rng.random((3, 40)) < share
    ids = jnp.asarray(np.where(masked, MASK, rng.integers(0, TINY.vocab_size, (3, 40))))
    weights = jnp.asarray(rng.normal(size=(3, 40, TINY.hidden_size)), jnp.float32)
    expected = np.zeros((TINY.vocab_size, TINY.hidden_size))
    np.add.at(expected, np.asarray(ids), np.asarray(weights))
    np.testing.assert_allclose(gradient(TINY, ids, jnp.asarray(masked), weights), expected, atol=1e-5)


def test_a_token_that_is_called_masked_and_is_none_teaches_its_own_row():
    found = gradient(TINY, jnp.array([[MASK, 9, MASK, 11]]), jnp.array([[True, True, True, False]]))
    assert (found[MASK] == 2).all() and (found[9] == 1).all() and (found[11] == 1).all()


@functools.cache
def on_several_devices(sizes, B, V=TINY.vocab_size):
    """The compiled program of a gradient over a mesh, that gradient, and the one of one device. Every entry has a weight of its
    own, that bfloat16 holds exactly, so that none can take the place of another."""
    mesh, D = make_mesh(MeshConfig(*sizes)), TINY.hidden_size
    config = dataclasses.replace(IN_BFLOAT16, vocab_size=V)
    tokens = jax.random.randint(jax.random.key(0), (B, 6), 0, V)
    masked = tokens % 3 == 0
    ids = jnp.where(masked, MASK, tokens)
    weights = np.random.default_rng(0).integers(-9, 9, (B, 6, D)).astype(np.float32)
    graph, state = nnx.split(Embedding(config, V, "vocab", rngs=nnx.Rngs(0)))

    def loss(state, ids, masked):
        with on_mesh(mesh):
            return jnp.sum(nnx.merge(graph, state)(ids, masked).astype(jnp.float32) * weights)

    table = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    rows = replicated(mesh) if B % (sizes[0] * sizes[1]) else batch_sharding(mesh)
    compiled = (
        jax.jit(jax.grad(loss), in_shardings=(table, rows, rows), out_shardings=table)
        .lower(state, ids, masked)
        .compile()
    )
    found = compiled(*jax.device_put((state, ids, masked), (table, rows, rows)))["embedding"][...]
    return compiled.as_text(), found, gradient(config, ids, masked, weights)


needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")


@needs_eight
@pytest.mark.parametrize(
    ("sizes", "B", "V"), [((1, 8, 1), 8, 40), ((1, 8, 1), 8, 43), ((2, 2, 2), 8, 40), ((2, 2, 2), 3, 40)], ids=str
)
def test_on_a_mesh_the_gradient_is_that_of_one_device(sizes, B, V):
    """Also of a batch that the mesh does not divide, which every device has whole, and of a table whose rows it does not."""
    _, found, expected = on_several_devices(sizes, B, V)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@needs_eight
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_where_devices_have_rows_of_their_own_the_sum_of_a_gradient_is_whole_nowhere(sizes):
    """Neither of all devices nor of one: in float32 that is twice the table of bfloat16."""
    text, _, _ = on_several_devices(sizes, 8)
    assert f"f32[{TINY.vocab_size // sizes[2]},{TINY.hidden_size}]" not in text


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)
def test_chips_add_up_a_gradient_without_sending_the_whole_of_it_to_each():
    V, D, L = 9496, 1024, 64
    mesh = make_mesh(MeshConfig(1, 8, 1), absent_devices.devices("v5e:2x4"))
    config = dataclasses.replace(IN_BFLOAT16, vocab_size=V, hidden_size=D)
    graph, state = nnx.split(nnx.eval_shape(lambda: Embedding(config, V, "vocab", rngs=nnx.Rngs(0))))
    table, rows = NamedSharding(mesh, PartitionSpec("tensor", "fsdp")), batch_sharding(mesh)
    ids = jax.ShapeDtypeStruct((8, L), jnp.int32, sharding=rows)
    weights = jax.ShapeDtypeStruct((8, L, D), jnp.float32, sharding=rows)

    def loss(state, ids, weights):
        with on_mesh(mesh):
            return jnp.sum(nnx.merge(graph, state)(ids).astype(jnp.float32) * weights)

    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=table), state), ids, weights
    sent = collectives(jax.jit(jax.grad(loss), out_shardings=table).lower(*given).compile().as_text())
    # Of float32 each of eight sends 7/8, and of its eighth 7/8 again, as columns; a sum that all have whole is twice 7/8.
    assert 0 < sum(one.times * one.traffic for one in sent) < 1.2 * V * D * 4


def test_an_id_past_the_table_reads_and_teaches_its_last_row():
    embedding = Embedding(TINY, TINY.vocab_size, "vocab", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(
        embedding(jnp.array([[TINY.vocab_size]])), embedding(jnp.array([[TINY.vocab_size - 1]]))
    )
    assert (gradient(TINY, jnp.array([[TINY.vocab_size]]))[-1] == 1).all()


def test_the_gradient_of_a_bias_loses_no_token_in_bfloat16():
    linear = Linear(IN_BFLOAT16, "TD,DF->TF", (4, 3), ("embed", "mlp"), stddev=1.0, bias=True, rngs=nnx.Rngs(0))
    graph, state = nnx.split(linear)
    x = jnp.ones((1, 4096, 4), jnp.bfloat16)
    gradient_of = jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x).astype(jnp.float32))))
    assert (np.asarray(gradient_of(state)["bias"][...]) == 4096).all()
    # A CPU sums bfloat16 in float32, whatever is asked for; others do not.
    sums = re.findall(
        r"stablehlo.reduce.* applies stablehlo.add .*tensor<4096x3x(\w+)>", gradient_of.lower(state).as_text()
    )
    assert sums == ["f32"]
