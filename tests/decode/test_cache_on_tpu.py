"""A window forward compiled for a TPU that is not there: it writes the cache where it lies."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from wedlm_jax import ahead_of_time
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (680 MB, not required)"
)

MODEL = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=128,
    dtype="bfloat16",
)  # fmt: skip
ROWS, SLOTS = 4, 1024


@pytest.mark.parametrize("window", [1, 16])
def test_no_cache_is_copied(window):
    mesh = make_mesh(MeshConfig(), ahead_of_time._devices("v5e:1x1"))

    def forward(params, tokens, length, cache):
        with on_mesh(mesh):
            positions = length[:, None] + jnp.arange(window)
            behind = dict(positions=positions, pattern=CachedWindow(length), cache=cache)
            return transformer_from(MODEL, params).hidden(tokens, **behind)

    params = jax.eval_shape(lambda: init_params(MODEL, 0))
    cache = jax.eval_shape(lambda: KVCache.zeros(MODEL, ROWS, SLOTS))
    numbers = jax.ShapeDtypeStruct((ROWS, window), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), (params, *numbers, cache)
    )
    compiled = jax.jit(forward, donate_argnums=3).lower(*arguments).compile()
    of_a_layer = cache.k.size * cache.k.dtype.itemsize / MODEL.num_layers
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * of_a_layer
    shape = f"bf16[{','.join(map(str, cache.k.shape))}]"
    assert [line for line in compiled.as_text().splitlines() if shape in line and " copy(" in line] == []
