"""Decoding on a mesh: every device writes and reads the cache of its own rows and its own heads, and nothing of it moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import TINY, params
from tests.quick_jit import quick_jit
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import param_axes, transformer_from
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.program_costs import collectives
from wedlm_jax.sharding import MeshConfig, batch_sharding, make_mesh, on_mesh, param_shardings

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")

ROWS, WINDOW, SLOTS = 4, 3, 37  # a number of slots that no other axis has
LENGTH = np.array([5, 0, 33, 11])
MESHES = {
    "rows and heads": (MeshConfig(data=2, fsdp=2, tensor=2), 2),
    "more devices than kv heads": (MeshConfig(data=1, fsdp=2, tensor=4), 4),
    "rows stay whole": (MeshConfig(data=8), 2),
}


def window_on(mesh, attend=None):
    """A function of (params, tokens, length): two forwards behind a cache that prefill has filled; logits and the cache."""

    def decode(params, tokens, length):
        with on_mesh(mesh):
            transformer = transformer_from(TINY, params)
            positions = jnp.broadcast_to(jnp.arange(SLOTS), (ROWS, SLOTS))
            pattern, cache = CachedWindow(jnp.zeros(ROWS, jnp.int32)), KVCache.zeros(TINY, ROWS, SLOTS)
            _, cache = transformer.hidden(tokens, positions=positions, pattern=pattern, cache=cache)
            fed = tokens[:, :WINDOW]
            positions = length[:, None] + jnp.arange(WINDOW)
            return transformer(fed, positions=positions, pattern=CachedWindow(length), cache=cache)

    return decode


def arguments(mesh):
    given = params(TINY)
    shardings = param_shardings(mesh, param_axes(TINY), given)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (ROWS, SLOTS))
    rows = batch_sharding(mesh) if ROWS % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
    return jax.device_put(given, shardings), jax.device_put(tokens, rows), jax.device_put(LENGTH, rows)


def test_a_cache_of_more_rows_than_are_fed_is_refused_where_rows_are_cut():
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])

    def two_of_four(params, tokens):
        with on_mesh(mesh):
            pattern, cache = CachedWindow(jnp.zeros(2, jnp.int32)), KVCache.zeros(TINY, 4, SLOTS)
            return transformer_from(TINY, params)(tokens, positions=tokens, pattern=pattern, cache=cache)

    with pytest.raises(ValueError, match="batch has two sizes, 2 and 4, and the mesh cuts it"):
        jax.eval_shape(two_of_four, params(TINY), jnp.zeros((2, 3), jnp.int32))


@pytest.mark.parametrize(("config", "held"), MESHES.values(), ids=MESHES)
def test_eight_devices_decode_what_one_decodes(config, held):
    one, eight = make_mesh(MeshConfig(), jax.devices()[:1]), make_mesh(config)
    logits, cache = quick_jit(window_on(one))(*arguments(one))
    found, found_cache = quick_jit(window_on(eight))(*arguments(eight))
    np.testing.assert_allclose(found, logits, atol=2e-5)
    assert found_cache.k.shape[2] == held
    for ours, wanted in zip(jax.tree.leaves(found_cache), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(ours, np.repeat(wanted, held // TINY.num_kv_heads, axis=2), atol=2e-5)


def caches_moved(mesh) -> list[tuple[int, ...]]:
    text = jax.jit(window_on(mesh)).lower(*arguments(mesh)).compile().as_text()
    return [one.shape for one in collectives(text) if SLOTS in one.shape and TINY.head_dim in one.shape]


@pytest.mark.parametrize("config", [config for config, _ in MESHES.values()], ids=MESHES)
def test_no_device_sends_its_cache(config):
    assert caches_moved(make_mesh(config)) == []
