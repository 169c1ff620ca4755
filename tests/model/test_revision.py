"""A revision is one for all forms of the same weights, and another for any other weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.model.tiny import TINY, params
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.parameters import param_axes
from wedlm_jax.model.revision import _words, revision
from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.sharding import MeshConfig, make_mesh, param_shardings

BASE = revision(TINY, params())


def test_a_dtype_that_rounds_to_bfloat16_does_not_change_it():
    half = {name: x.astype(jnp.bfloat16) for name, x in params().items()}
    assert revision(TINY, half) == BASE
    assert revision(TINY, {name: x.astype(jnp.float32) for name, x in half.items()}) == BASE


def test_an_adapter_beside_it_and_how_it_is_computed_do_not_change_it():
    config = dataclasses.replace(TINY, adapter=AdapterConfig(rank=2))
    assert revision(config, params(config)) == BASE
    computed = dataclasses.replace(TINY, dtype="bfloat16", matmul_precision="default", remat="full", attention="xla")
    assert revision(computed, params()) == BASE
    assert revision(dataclasses.replace(TINY, rope_theta=10_000), params()) == BASE


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_the_mesh_does_not_change_it():
    config = dataclasses.replace(TINY, head_dim=8)
    own = {name: x for name, x in params(config).items() if "embed" in name or "up_proj" in name or "final" in name}
    cut = jax.device_put(own, param_shardings(make_mesh(MeshConfig(2, 2, 2)), param_axes(config), own))
    assert revision(config, cut) == revision(config, own)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_nothing_of_the_size_of_a_parameter_is_made_or_gathered():
    sharding = NamedSharding(make_mesh(MeshConfig(2, 2, 2)), PartitionSpec(None, "fsdp", "tensor"))
    for placed in (None, sharding):
        program = _words.lower(jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16, sharding=placed)).compile()
        assert program.memory_analysis().temp_size_in_bytes < 10_000


@pytest.mark.parametrize("name", sorted(params()))
def test_one_value_of_any_parameter_changes_it(name):
    changed = np.array(params()[name])
    changed[(0,) * changed.ndim] *= 1.01
    assert revision(TINY, params() | {name: jnp.asarray(changed)}) != BASE


def test_two_values_that_change_places_change_it():
    kernel = params()["layers.mlp.up_proj.kernel"]
    for axis in range(kernel.ndim):
        assert revision(TINY, params() | {"layers.mlp.up_proj.kernel": jnp.flip(kernel, axis)}) != BASE
    names = "layers.mlp.up_proj.kernel", "layers.mlp.gate_proj.kernel"
    swapped = {name: params()[other] for name, other in zip(names, reversed(names), strict=True)}
    assert revision(TINY, params() | swapped) != BASE


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-5}, {"num_heads": 2, "num_kv_heads": 1}, {"tie_word_embeddings": True},
     {"position_embedding_type": "learned_absolute"}, {"rope_scaling": RopeScaling("yarn", 4.0)}],
)  # fmt: skip
def test_what_else_the_forward_pass_reads_changes_it(change):
    assert revision(dataclasses.replace(TINY, **change), params()) != BASE
