"""Decoding compiled for a TPU that is not there: prefill and loop write the cache where it lies."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from wedlm_jax import ahead_of_time
from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.loop import Program, run, start
from wedlm_jax.model import weights as rooms
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.slot_cost import ON_ACCELERATOR
from wedlm_jax.model.weights import Weights
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (680 MB, not required)"
)

MODEL = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=128,
    dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
ROWS, PROMPT, NEW = 8, 1024, 1024


@pytest.mark.parametrize("decoder", ["ar", "verified"])
def test_no_cache_is_copied(decoder, monkeypatch):
    monkeypatch.setattr(rooms, "LARGE", 2**40)  # as over a mesh
    mesh = make_mesh(MeshConfig(), ahead_of_time._devices("v5e:1x1"))
    config = DecodeConfig(decoder, max_new_tokens=NEW, mask_token_id=511, stop_ids=(0,))
    sizes = dict(slots=config.slots, output_slots=NEW, holds_back=config.holds_back, drafter=config.drafter)

    def prefilled(*arguments):
        with on_mesh(mesh):
            return start(*arguments, **sizes)

    def decoded(*arguments):
        with on_mesh(mesh):
            return run(Program.of(config), *arguments)

    def on_chip(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), tree)

    settings = on_chip(RowSettings.from_configs([config] * ROWS, range(ROWS), ON_ACCELERATOR))
    weights = on_chip(Weights.of(transformer_from(MODEL, init_params(MODEL, 0))))
    prompts = on_chip((jnp.zeros((ROWS, PROMPT), jnp.int32), jnp.zeros(ROWS, jnp.int32)))
    state = on_chip(jax.eval_shape(prefilled, weights, *prompts, settings))
    programs = (
        jax.jit(prefilled).lower(weights, *prompts, settings),
        jax.jit(decoded, donate_argnums=1).lower(weights, state, settings),
    )
    shape = f"bf16[{','.join(map(str, state.cache.k.shape))}]"
    for program in programs:
        text = program.compile().as_text()
        assert shape in text
        assert [line for line in text.splitlines() if shape in line and " copy(" in line] == []
