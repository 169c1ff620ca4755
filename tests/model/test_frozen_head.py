"""Losses of a frozen output layer over a mesh: what it takes of the other devices does not grow with the rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.model import frozen_head
from wedlm_jax.model.frozen_head import cross_entropy_of_targets, divergence_from_teacher
from wedlm_jax.program_costs import runs_by_computation
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh

B, C, V, D = 8, 12, 64, 16


@pytest.mark.parametrize("loss", [cross_entropy_of_targets, divergence_from_teacher])
def test_the_head_is_gathered_before_the_loop_over_chunks(loss, monkeypatch):
    monkeypatch.setattr(frozen_head, "LOGITS", 3 * V)  # four chunks
    monkeypatch.setattr(frozen_head, "ROWS", 1)
    mesh = make_mesh(MeshConfig(fsdp=8), jax.devices())

    def array(shape, dtype, *cut):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    hidden, head = array((B, C, D), jnp.float32, "fsdp"), array((V, D), jnp.float32, None, "fsdp")
    of_rows = array((B, C), jnp.int32, "fsdp") if loss is cross_entropy_of_targets else hidden

    def total(hidden, head, of_rows):
        with on_mesh(mesh):
            return loss(hidden, head, of_rows).sum()

    text = jax.jit(jax.value_and_grad(total)).lower(hidden, head, of_rows).compile().as_text()
    gather = re.compile(rf"= f32\[{V},{D}\]\S* all-gather")
    found = [runs for lines, runs in runs_by_computation(text).values() for line in lines if gather.search(line)]
    assert found == [1], "one, in no loop"


@pytest.mark.parametrize(("loss", "products"), [(cross_entropy_of_targets, 2), (divergence_from_teacher, 3)])
def test_the_head_is_read_for_many_rows_at_a_time_and_no_more_often_than_needed(loss, products):
    """A head of 152k rows takes a v5e as long to read as to multiply with 240 rows; and no product widens it to float32."""
    B, C, V, D = 1, 2048, 151936, 8
    hidden, head = jax.ShapeDtypeStruct((B, C, D), jnp.bfloat16), jax.ShapeDtypeStruct((V, D), jnp.bfloat16)
    of_rows = jax.ShapeDtypeStruct((B, C), jnp.int32) if loss is cross_entropy_of_targets else hidden
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda *given: loss(*given).sum()))(hidden, head, of_rows)
    found = [[x.aval for x in one.invars] for one in equations(jaxpr.jaxpr) if one.primitive.name == "dot_general"]
    assert len(found) == products
    for operands in found:
        assert all(x.dtype == jnp.bfloat16 for x in operands)
        (rows,) = (x.shape[:2] for x in operands if x.shape[0] != V)
        assert rows[0] * rows[1] >= frozen_head.ROWS >= 240


@pytest.mark.parametrize("rows", [1, 5, 96])
@pytest.mark.parametrize("temperature", [None, 1.0, 2.0])
def test_losses_and_gradients_are_those_of_all_logits_at_once(temperature, rows, monkeypatch):
    monkeypatch.setattr(frozen_head, "LOGITS", V)
    monkeypatch.setattr(frozen_head, "ROWS", rows)
    keys = jax.random.split(jax.random.key(0), 5)
    hidden, teacher = (jax.random.normal(key, (B, C, D)) for key in keys[:2])
    head, weights = jax.random.normal(keys[2], (V, D)), jax.random.normal(keys[3], (B, C))
    targets = jax.random.randint(keys[4], (B, C), 0, V)
    T = temperature or 1.0

    def plain(hidden):
        log_p, log_q = (
            jax.nn.log_softmax(jnp.einsum("BCD,VD->BCV", x, head, precision="highest") / T) for x in (hidden, teacher)
        )
        if temperature is None:
            return -(weights * jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]).sum()
        return (weights * T**2 * (jnp.exp(log_q) * (log_q - log_p)).sum(-1)).sum()

    def ours(hidden):
        if temperature is None:
            losses = cross_entropy_of_targets(hidden, head, targets, precision="highest")
        else:
            losses = divergence_from_teacher(hidden, head, teacher, temperature=temperature, precision="highest")
        return (weights * losses).sum()

    expected, gradient = jax.value_and_grad(plain)(hidden)
    total, found = jax.jit(jax.value_and_grad(ours))(hidden)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(ours(hidden), expected, rtol=1e-5)  # no gradient asked for
    np.testing.assert_allclose(found, gradient, atol=1e-5 * np.abs(gradient).max())


def equations(jaxpr):
    """Of a jaxpr and of all inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)
