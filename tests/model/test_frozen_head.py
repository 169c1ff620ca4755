"""Losses of a frozen output layer over a mesh: what it takes of the other devices does not grow with the rows."""

import re

import jax
import jax.numpy as jnp
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
