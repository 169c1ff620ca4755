"""Low-rank adapters: on mask rows alone the base keeps every bit; on all rows they are what merged weights compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import TINY, params
from tests.quick_jit import quick_jit
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import TARGETS, AdapterConfig, is_adapter_parameter, split_adapter
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import init_params, param_axes, transformer_from
from wedlm_jax.model.patterns import CachedWindow, DualStream
from wedlm_jax.model.weights import Weights, with_layers_apart
from wedlm_jax.sharding import MeshConfig, make_mesh, param_shardings

ON_MASKS = AdapterConfig(rank=3, alpha=6.0)
ON_ALL = dataclasses.replace(ON_MASKS, rows="all")
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 40, (3, 8))
MASKED = RANDOM.random((3, 8)) < 0.5


def adapted(adapter: AdapterConfig, **changes):
    """A config with an adapter, and parameters of which none is at a value where it would have no effect."""
    config = dataclasses.replace(TINY, adapter=adapter, **changes)
    random = np.random.default_rng(1)
    own = jax.eval_shape(lambda: init_params(config, 0))
    base = params(dataclasses.replace(config, adapter=None))
    noise = {
        name: jnp.asarray(0.5 * random.normal(size=x.shape), x.dtype)
        for name, x in sorted(own.items())
        if is_adapter_parameter(name)
    }
    return config, base | noise


def window(config, params, tokens, masked, length, *, apart=False):
    """Hidden states and cache of a window behind a cache that holds something."""
    transformer = transformer_from(config, params)
    weights = Weights.of(with_layers_apart(transformer) if apart else transformer)
    cache = KVCache.zeros(config, tokens.shape[0], 24)
    held = jnp.arange(cache.k.size, dtype=jnp.float32).reshape(cache.k.shape)
    cache = KVCache(jnp.sin(held).astype(cache.k.dtype), jnp.cos(held).astype(cache.v.dtype))
    if not apart:
        return run_window(weights, tokens, masked, length, cache)
    of_layers = tuple(KVCache(cache.k[i : i + 1], cache.v[i : i + 1]) for i in range(config.num_layers))
    hidden, of_layers = run_window(weights, tokens, masked, length, of_layers)
    return hidden, jax.tree.map(lambda *x: jnp.concatenate(x), *of_layers)


@jax.jit
def run_window(weights, tokens, masked, length, cache):
    positions = length[:, None] + jnp.arange(tokens.shape[1])
    with weights.transformer() as transformer:
        return transformer.hidden(tokens, positions=positions, pattern=CachedWindow(length), masked=masked, cache=cache)


LENGTH = jnp.array([0, 5, 11], jnp.int32)


@pytest.mark.parametrize("apart", [False, True], ids=["stack", "apart"])
@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": True, "qk_norm": False}, {"dtype": "bfloat16", "param_dtype": "bfloat16"}]
)
def test_rows_that_are_no_masks_keep_every_bit(changes, apart):
    """Filled rows come first in a window, so that they see each other alone.

    (With a head_dim of 8 or less and qk-norm, the last bit can differ on a CPU: the compiler puts the norm's sum of squares into
    one loop with what makes its input. Without qk-norm, and from 10 on, in every shape that was tried, it does not.)
    """
    config, own = adapted(ON_MASKS, head_dim=16, **changes)
    base = dataclasses.replace(config, adapter=None)
    masked = jnp.arange(8) >= jnp.array([[3], [8], [5]])
    expected, expected_cache = window(base, split_adapter(own)[0], TOKENS, None, LENGTH, apart=apart)
    hidden, cache = window(config, own, TOKENS, masked, LENGTH, apart=apart)
    filled = ~np.asarray(masked)
    np.testing.assert_array_equal(np.asarray(hidden)[filled], np.asarray(expected)[filled])
    assert np.abs(np.asarray(hidden - expected, np.float32))[~filled].max(-1).min() > 1e-3
    for row, start in enumerate(np.asarray(LENGTH)):
        stop = start + filled[row].sum()
        for new, old in ((cache.k, expected_cache.k), (cache.v, expected_cache.v)):
            np.testing.assert_array_equal(np.asarray(new)[:, row, :, :stop], np.asarray(old)[:, row, :, :stop])


@pytest.mark.parametrize("mlp_tile", [None, 4])
def test_the_memory_stream_keeps_every_bit(mlp_tile):
    config, own = adapted(ON_MASKS, head_dim=16, mlp_tile=mlp_tile)
    segments = jnp.ones((3, 4), jnp.int32)
    positions = jnp.tile(jnp.arange(4), (3, 2))
    masked = jnp.asarray(MASKED).at[:, :4].set(False)
    run = functools.partial(jax.jit, static_argnames="config")(
        lambda config, params, masked: transformer_from(config, params).hidden(
            jnp.asarray(TOKENS), positions=positions, pattern=DualStream(segments, 2), masked=masked
        )
    )
    expected = run(dataclasses.replace(config, adapter=None), split_adapter(own)[0], None)
    hidden = run(config, own, masked)
    np.testing.assert_array_equal(np.asarray(hidden)[:, :4], np.asarray(expected)[:, :4])
    assert np.abs(np.asarray(hidden - expected)[np.asarray(masked)]).max(-1).min() > 1e-3


def test_without_masks_the_program_is_that_of_the_base():
    config, own = adapted(ON_MASKS)
    base, _ = split_adapter(own)

    def instructions(config, params):
        run = lambda params: transformer_from(config, params)(jnp.asarray(TOKENS), positions=jnp.asarray(TOKENS))  # noqa: E731
        return sum(" = " in line for line in jax.jit(run).lower(params).compile().as_text().splitlines())

    assert instructions(config, own) == instructions(dataclasses.replace(config, adapter=None), base) > 50


def merged(config, own):
    """The weights of the base with each pair added to them."""
    base, pairs = split_adapter(own)
    for name in [name for name in pairs if name.endswith("lora_a")]:
        kernel = name.replace("lora_a", "kernel")
        a, b = (np.asarray(pairs[name.replace("lora_a", pair)], np.float64) for pair in ("lora_a", "lora_b"))
        rank, layers = config.adapter.rank, config.num_layers
        product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1) * config.adapter.scale
        base[kernel] = jnp.asarray(
            np.asarray(base[kernel], np.float64) + product.reshape(base[kernel].shape), jnp.float32
        )
    return dataclasses.replace(config, adapter=None), base


@functools.partial(quick_jit, static_argnames="config")
def hidden_of(config, params, tokens, masked):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return transformer_from(config, params).hidden(tokens, positions=positions, masked=masked)


@pytest.mark.parametrize("targets", [TARGETS, ("k_proj", "gate_proj", "o_proj")])
def test_on_all_rows_it_is_what_merged_weights_compute(targets):
    config, own = adapted(dataclasses.replace(ON_ALL, targets=targets))
    assert {name.split(".")[2] for name in split_adapter(own)[1]} == set(targets)
    expected = hidden_of(*merged(config, own), TOKENS, None)
    np.testing.assert_allclose(hidden_of(config, own, TOKENS, None), expected, rtol=1e-4, atol=1e-5)
    assert (
        np.abs(
            expected - hidden_of(dataclasses.replace(config, adapter=None), split_adapter(own)[0], TOKENS, None)
        ).max()
        > 1e-2
    )


def test_rows_that_are_all_masks_are_those_of_merged_weights_fed_the_mask_embedding():
    config, own = adapted(ON_MASKS)
    merged_config, merged_params = merged(config, own)
    merged_params["embed.embedding"] = merged_params["embed.embedding"].at[39].set(own["mask_embedding"])
    expected = hidden_of(merged_config, merged_params, jnp.full(TOKENS.shape, 39), None)
    hidden = hidden_of(config, own, TOKENS, jnp.ones(TOKENS.shape, bool))
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_starts_as_its_base_and_beside_the_same_base():
    config = dataclasses.replace(TINY, adapter=ON_ALL, param_dtype="bfloat16")
    base_config = dataclasses.replace(config, adapter=None)
    base, own = split_adapter(init_params(config, 7))
    expected = init_params(base_config, 7)
    assert base.keys() == expected.keys()
    assert all(np.array_equal(base[name], expected[name]) for name in base)
    assert {x.dtype for x in own.values()} == {jnp.dtype("float32")}
    hidden = hidden_of(config, base | own, TOKENS, None)
    np.testing.assert_array_equal(hidden, hidden_of(base_config, base, TOKENS, None))
    for name, x in own.items():  # [layers, ..., rank]
        if name.endswith("lora_a"):
            assert np.std(np.asarray(x)) == pytest.approx(np.prod(x.shape[1:-1]) ** -0.5, rel=0.3), name


def test_pairs_are_cut_over_the_devices_as_their_kernels():
    config = dataclasses.replace(TINY, adapter=ON_MASKS, head_dim=8)
    axes = param_axes(config)
    assert axes["layers.attention.o_proj.lora_a"] == ("layers", "heads", "head_dim", "rank")
    assert axes["layers.attention.k_proj.lora_b"] == ("layers", "rank", "kv_heads", "head_dim")
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    mesh = make_mesh(MeshConfig(1, 4, 2))
    cut = param_shardings(mesh, axes, shapes)
    name = "layers.mlp.up_proj.lora_"
    assert cut[name + "a"].shard_shape(shapes[name + "a"].shape) == (2, 4, 3)
    assert cut[name + "b"].shard_shape(shapes[name + "b"].shape) == (2, 3, 12)


# field -> (another value, what must differ: the parameters or the hidden states)
CHANGES = {
    "rank": (4, "params"),
    "alpha": (9.0, "hidden"),
    "targets": (("q_proj",), "params"),
    "rows": ("all", "params"),
}


def test_every_field_changes_what_it_should():
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(AdapterConfig)}
    shapes, hidden = ({}, {})
    for name, (value, _) in {"": (None, ""), **CHANGES}.items():
        config, own = adapted(dataclasses.replace(ON_MASKS, **({name: value} if name else {})))
        shapes[name] = {name: x.shape for name, x in own.items()}
        if name in ("", "alpha"):
            hidden[name] = hidden_of(config, own, TOKENS, jnp.asarray(MASKED))
    for name, (_, differs) in CHANGES.items():
        assert (shapes[name] != shapes[""]) == (differs == "params")
    assert np.abs(hidden["alpha"] - hidden[""]).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "adapter.rank=0 must be at least 1"),
        ({"rank": "4"}, "adapter.rank='4' must be a whole number"),
        ({"rank": True}, "adapter.rank=True must be a whole number"),
        ({"alpha": "32"}, "adapter.alpha='32' must be a number"),
        ({"targets": "q_proj"}, "adapter.targets='q_proj' must be a tuple"),
        ({"alpha": float("nan")}, "adapter.alpha=nan must be above 0"),
        ({"targets": ("q", )}, "adapter.targets: q is unknown; choose of q_proj, k_proj"),
        ({"targets": ()}, "must name at least one projection"),
        ({"targets": ("q_proj", "q_proj")}, "each of them once"),
        ({"rows": "some"}, "adapter.rows='some' is unknown; choose mask or all"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_one_clear_line(fields, message):
    with pytest.raises(UserError, match=message):
        AdapterConfig(**fields)


def test_missing_and_extra_pairs_are_refused():
    config, own = adapted(ON_MASKS)
    with pytest.raises(UserError, match=r"do not fit the config: layers.mlp.up_proj.lora_b"):
        transformer_from(config, {name: x for name, x in own.items() if not name.endswith("up_proj.lora_b")})
    with pytest.raises(UserError, match="mask_embedding"):
        transformer_from(dataclasses.replace(config, adapter=ON_ALL), own)


def test_targets_may_be_a_list():
    assert hash(AdapterConfig(targets=["q_proj"])) == hash(AdapterConfig(targets=("q_proj",)))
