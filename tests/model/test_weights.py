"""Layers held apart compute what the stack of them computes; which models hold them so, and what it costs."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wedlm_jax.model import weights as rooms
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.layers import Linear
from wedlm_jax.model.parameters import init_params, param_axes, transformer_from
from wedlm_jax.model.patterns import CachedWindow, of_read
from wedlm_jax.model.weights import Weights, with_heads_first, with_layers_apart
from wedlm_jax.sharding import MeshConfig, make_mesh, param_shardings

from ..conftest import FULL
from .tiny import TINY, params

CONFIGS = {
    "qwen3": TINY,
    "qwen2.5": dataclasses.replace(TINY, qkv_bias=True, qk_norm=False, tie_word_embeddings=True),
    "bfloat16": dataclasses.replace(TINY, dtype="bfloat16"),
    "adapter": dataclasses.replace(TINY, adapter=AdapterConfig(rank=2, alpha=4.0)),
    "remat": dataclasses.replace(TINY, remat="full"),
    "tiles": dataclasses.replace(TINY, mlp_tile=3),
}
LENGTH = np.array([0, 5, 9], np.int32)


@jax.jit
def window(weights, tokens, masked, read=None):
    """Hidden states, those that are `read`, and cache of two windows, one behind the other."""
    with weights.transformer() as transformer:
        cache, length = transformer.empty_cache(len(LENGTH), 24), jnp.asarray(LENGTH)
        for _ in range(2):
            positions = length[:, None] + jnp.arange(tokens.shape[1])
            options = dict(positions=positions, pattern=CachedWindow(length, read), masked=masked, cache=cache)
            hidden, cache = transformer.hidden(tokens, **options)
            length = length + tokens.shape[1]
        return hidden, cache


ORDINARY = ("qwen3", "qwen2.5", "adapter")  # the others differ in what all ways of holding layers share


@pytest.mark.parametrize("name", CONFIGS if FULL else ORDINARY)
def test_layers_apart_compute_what_their_stack_computes(name):
    config, noise = CONFIGS[name], np.random.default_rng(0)
    given = {
        name: x + 0.1 * noise.normal(size=x.shape).astype(np.float32) for name, x in init_params(config, 0).items()
    }
    transformer = transformer_from(config, {name: jnp.asarray(x, jnp.float32) for name, x in given.items()})
    tokens, masked = noise.integers(0, config.vocab_size, (3, 4)), jnp.arange(4) >= jnp.array([[2], [4], [0]])
    ways = {}, dict(turned=True), dict(joined=True)
    stacked, apart, turned, joined = map(
        Weights.of, (transformer, *(with_layers_apart(transformer, **way) for way in ways))
    )
    heads_first = Weights.of(with_heads_first(transformer))
    expected, expected_cache = window(stacked, tokens, masked)
    atol = 0.05 if config.dtype == "bfloat16" else 1e-5
    read = jnp.array([[3, 1], [0, 2], [1, 1]])
    of_each = (None, read) if FULL or name == "qwen3" else (read,)
    for weights, of_these in itertools.product((apart, turned, joined, heads_first, stacked), of_each):
        hidden, cache = window(weights, tokens, masked, of_these)
        wanted = of_read(CachedWindow(LENGTH, of_these), expected)
        np.testing.assert_allclose(np.asarray(hidden, np.float32), np.asarray(wanted, np.float32), atol=atol)
        in_stack = weights in (stacked, heads_first)
        caches = [cache] if in_stack else cache
        assert len(caches) == (1 if in_stack else config.num_layers)
        for part in "kv":
            found = jnp.concatenate([getattr(of_layer, part) for of_layer in caches]).astype(jnp.float32)
            np.testing.assert_allclose(found, getattr(expected_cache, part).astype(jnp.float32), atol=atol)


def test_layers_apart_are_views_of_the_stack():
    config = dataclasses.replace(TINY, hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=4, head_dim=16)
    transformer = transformer_from(config, init_params(config, 0))
    apart = with_layers_apart(transformer).layers
    stack = nnx.state(transformer.layers)["mlp"]["up_proj"]["kernel"][...]
    for number, layer in enumerate(apart):
        one = layer.mlp.up_proj.kernel[...]
        assert one.unsafe_buffer_pointer() == stack.unsafe_buffer_pointer() + number * one.nbytes
        np.testing.assert_array_equal(one, stack[number])


def test_large_models_alone_hold_their_layers_apart(monkeypatch):
    transformer = transformer_from(TINY, params(TINY))
    size = sum(x.size for x in jax.tree.leaves(nnx.state(transformer.layers)))

    def apart() -> bool:
        with Weights.of(transformer).transformer() as given:
            return isinstance(given.layers, nnx.List)

    monkeypatch.setattr(rooms, "LARGE", size + 1)
    assert not apart()
    monkeypatch.setattr(rooms, "LARGE", size)
    assert apart()


def test_kernels_are_turned_for_several_rows_where_no_cache_holds_them_and_a_copy_fits(monkeypatch):
    transformer = transformer_from(TINY, params(TINY))
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(transformer.layers)))
    monkeypatch.setattr(rooms, "LARGE", 0)

    def turned(rows: int, cache: int, copy: int) -> bool:
        monkeypatch.setattr(rooms, "PROCESSOR_CACHE", cache)
        monkeypatch.setattr(rooms, "LARGEST_COPY", copy)
        with Weights.of(transformer, rows).transformer() as given:
            found = {module.turned for _, module in nnx.iter_modules(given.layers) if isinstance(module, Linear)}
        [every] = found
        return every

    few = rooms.ROWS_TO_TURN_FOR
    assert turned(few, size - 1, size)
    assert not turned(few - 1, size - 1, size)
    assert not turned(few, size, size)
    assert not turned(few, size - 1, size - 1)


def test_over_a_mesh_the_stack_stays_and_its_devices_share_the_work(monkeypatch):
    monkeypatch.setattr(rooms, "LARGE", 0)
    mesh = make_mesh(MeshConfig(tensor=2, fsdp=4))
    given = params(TINY)
    shardings = param_shardings(mesh, param_axes(TINY), given)
    weights = Weights.of(transformer_from(TINY, jax.device_put(given, shardings)))
    assert weights.mesh == mesh
    with weights.transformer() as transformer:
        assert not isinstance(transformer.layers, nnx.List)


def test_on_tpus_the_heads_of_a_stack_come_first_and_are_cut_as_before(monkeypatch):
    monkeypatch.setattr(rooms, "CPU", ())
    monkeypatch.setattr(rooms, "TPUS", ("cpu",))
    given, mesh = params(TINY), make_mesh(MeshConfig(tensor=2, fsdp=4))
    shardings = param_shardings(mesh, param_axes(TINY), given)
    transformer = transformer_from(TINY, jax.device_put(given, shardings))
    with Weights.of(transformer).transformer() as decoding:
        laid_out = {
            name: getattr(decoding.layers.attention, name).kernel[...] for name in ("q_proj", "k_proj", "o_proj")
        }
        assert [x.shape for x in laid_out.values()] == [(2, 4, 16, 6), (2, 2, 16, 6), (2, 4, 6, 16)]
        assert laid_out["q_proj"].sharding.shard_shape((2, 4, 16, 6)) == (2, 2, 4, 6)
    assert transformer.layers.attention.q_proj.kernel.shape == (2, 16, 4, 6), "the model keeps its own"


@pytest.fixture
def a_gpu(monkeypatch):
    """This machine taken for one with GPUs; gives what sets their memory."""
    monkeypatch.setattr(rooms, "CPU", ())
    monkeypatch.setattr(rooms, "GPUS", ("cpu",))

    class Device:
        device_kind = "NVIDIA H100"

        def __init__(self, left):
            self.left = left

        def memory_stats(self):
            return {"bytes_limit": self.left + 100, "bytes_in_use": 100}

    has_room_for = rooms._has_room_for

    class Array:
        def __init__(self, array, left):
            self.nbytes, self.device = array.nbytes, Device(left)

        def devices(self):
            return {self.device}

    def left(count):
        monkeypatch.setattr(rooms, "_has_room_for", lambda arrays: has_room_for([Array(x, count) for x in arrays]))

    return left


@pytest.mark.parametrize("sizes", [None, dict(tensor=2, fsdp=4)], ids=["alone", "mesh"])
def test_on_gpus_layers_lie_apart_where_half_of_the_memory_left_holds_a_copy(a_gpu, caplog, sizes):
    given = params(TINY)
    if sizes is not None:
        mesh = make_mesh(MeshConfig(**sizes))
        given = jax.device_put(given, param_shardings(mesh, param_axes(TINY), given))
    transformer = transformer_from(TINY, given)
    arrays = jax.tree.leaves(nnx.state(transformer.layers))
    size = sum(x.addressable_data(0).nbytes for x in arrays)

    def layers():
        with Weights.of(transformer, rooms.ROWS_TO_TURN_FOR).transformer() as found:
            return found.layers

    a_gpu(2 * size - 1)
    assert not isinstance(layers(), nnx.List)
    assert "which takes up to three times as long" in caplog.text
    a_gpu(2 * size)
    apart = layers()
    assert isinstance(apart, nnx.List) and not any(layer.mlp.up_proj.turned for layer in apart)
    for number, layer in enumerate(apart):
        if sizes is None:
            gate, up = (
                nnx.state(transformer.layers)["mlp"][name]["kernel"][number] for name in ("gate_proj", "up_proj")
            )
            np.testing.assert_array_equal(layer.mlp.gate_proj.kernel[...], jnp.concatenate([gate, up], axis=1))
            continue
        for one, stack in zip(jax.tree.leaves(nnx.state(layer)), arrays, strict=True):  # none are joined over a mesh
            np.testing.assert_array_equal(one, stack[number])
            assert one.addressable_data(0).shape == stack.addressable_data(0).shape[1:]


def test_a_model_on_a_gpu_holds_one_copy_of_its_layers(a_gpu):
    a_gpu(2**40)
    model = Model(transformer_from(TINY, params(TINY)), TINY)
    assert model.weights_for(1) is model.weights_for(rooms.ROWS_TO_TURN_FOR)


def test_models_of_one_shape_share_their_programs():
    first, second = (Weights.of(transformer_from(TINY, init_params(TINY, seed))) for seed in (0, 1))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert first._structure is second._structure
    before = window._cache_size()
    tokens, masked = np.zeros((3, 5), np.int32), jnp.zeros((3, 5), bool)
    one, other = window(first, tokens, masked)[0], window(second, tokens, masked)[0]
    assert window._cache_size() == before + 1 and not np.allclose(one, other)
