"""Decoding in bfloat16, and on several devices by the mesh rules of training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from wedlm_jax import Model, generate
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.loop import Program, run, start
from wedlm_jax.model import weights as rooms
from wedlm_jax.model.int8 import in_int8
from wedlm_jax.model.parameters import param_axes, params_of, transformer_from
from wedlm_jax.sharding import MeshConfig, make_mesh, param_shardings

from ..conftest import FULL
from .models import LOOPS, TINY, config_of, start_sizes, tiny_model

PROMPTS = [[1, 2, 3], [4, 9, 0, 2, 7, 7, 1, 5], [6], [3, 3]]
EVEN = dataclasses.replace(TINY, vocab_size=12)  # a vocabulary that two devices can share


def cut_over(model: Model, mesh) -> Model:
    params = params_of(model.transformer)
    placed = jax.device_put(params, param_shardings(mesh, param_axes(model.config), params))
    return dataclasses.replace(model, transformer=transformer_from(model.config, placed))


@pytest.mark.parametrize("loop", LOOPS if FULL else ["verified"])
@pytest.mark.parametrize("sizes", [dict(data=1, tensor=2), dict(data=2, fsdp=2, tensor=2)], ids=str)
def test_several_devices_decode_what_one_decodes(loop, sizes):
    """Rows are cut over data and fsdp, heads and vocabulary over tensor."""
    config = config_of(loop, temperature=0.7, top_k=7, top_p=0.9, stop_ids=(5,))
    alone = generate(tiny_model(0, EVEN), PROMPTS, config)
    count = 2 if sizes["data"] == 1 else 8
    shared = cut_over(tiny_model(0, EVEN), make_mesh(MeshConfig(**sizes), jax.devices()[:count]))
    assert shared.mesh is not None and shared.mesh.size == count
    for ours, expected in zip(generate(shared, PROMPTS, config), alone, strict=True):
        assert (ours.ids, ours.finish_reason, ours.stats) == (expected.ids, expected.finish_reason, expected.stats)


def test_gpus_decode_alike_with_their_layers_apart(monkeypatch):
    """As several devices hold them together; of a mesh of CPUs, taken for GPUs."""
    config = config_of("verified", temperature=0.7, stop_ids=(5,))
    alone = generate(tiny_model(0, EVEN), PROMPTS, config)
    monkeypatch.setattr(rooms, "CPU", ())
    monkeypatch.setattr(rooms, "GPUS", ("cpu",))
    monkeypatch.setattr(rooms, "_has_room_for", lambda arrays: True)
    shared = cut_over(tiny_model(0, EVEN), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    with shared.weights.transformer() as transformer:
        assert isinstance(transformer.layers, nnx.List)
    for ours, expected in zip(generate(shared, PROMPTS, config), alone, strict=True):
        assert (ours.ids, ours.finish_reason, ours.stats) == (expected.ids, expected.finish_reason, expected.stats)


@pytest.mark.parametrize("sizes", [None, dict(data=2, fsdp=2, tensor=2)], ids=str)
def test_with_kernels_of_int8_verified_decoding_gives_what_ar_gives(sizes):
    mesh = None if sizes is None else make_mesh(MeshConfig(**sizes))
    model = in_int8(tiny_model(0, EVEN), mesh)
    assert model.mesh == mesh
    if mesh is not None:
        kernel_scale = params_of(model.transformer)["layers.mlp.up_proj.kernel_scale"]
        assert kernel_scale.sharding.shard_shape(kernel_scale.shape) == (TINY.num_layers, TINY.intermediate_size // 2)
    verified, ar = (
        generate(model, PROMPTS, config_of(loop, temperature=0.7, stop_ids=(5,))) for loop in ("verified", "ar")
    )
    assert [ours.ids for ours in verified] == [theirs.ids for theirs in ar]
    assert sum(ours.stats.forwards for ours in verified) < sum(theirs.stats.forwards for theirs in ar)


@pytest.mark.parametrize("loop", ["verified", "streaming_eager"])
def test_bfloat16_weights_give_a_bfloat16_cache_and_float32_decisions(loop):
    half = dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16", matmul_precision="default")
    model = tiny_model(0, half)
    config = dataclasses.replace(config_of(loop), mask_token_id=model.mask_token_id)
    settings = RowSettings.from_configs([config] * 3, range(3), model.window_table)
    prompt, lengths = jnp.ones((3, 32), jnp.int32), jnp.asarray([1, 2, 3], jnp.int32)
    state = start(model.weights, prompt, lengths, settings, **start_sizes(config))
    state = run(Program.of(config), model.weights, state, settings)
    assert state.cache.k.dtype == state.cache.v.dtype == jnp.bfloat16
    assert state.log_probs.dtype == jnp.float32
    assert state.generated.tolist() == [14, 14, 14]
    if loop == "verified":
        assert (state.log_probs[:, :14] < 0).all()
