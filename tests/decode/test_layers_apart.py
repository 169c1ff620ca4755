"""Decoding with layers held apart, as large models on a CPU hold them: the same tokens, and a cache that is written in place."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wedlm_jax.decode import loop as decode_loop
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.generation import generate
from wedlm_jax.engine import Engine
from wedlm_jax.model import weights as rooms
from wedlm_jax.model.handle import Model
from wedlm_jax.model.int8 import in_int8

from ..conftest import FULL
from .models import LOOPS, ROWS, config_of, start_sizes, tiny_model

PROMPTS = [[1, 2, 3], [4], [5, 6]]


@pytest.fixture(params=["views", "turned", "turned, int8"])
def both(request, monkeypatch) -> tuple[Model, Model]:
    """One model with its layers apart, and as it was."""
    monkeypatch.setattr(rooms, "LARGE", 0)
    turned = request.param != "views"
    if turned:
        monkeypatch.setattr(rooms, "PROCESSOR_CACHE", 0)
    in_stack = in_int8(tiny_model()) if "int8" in request.param else tiny_model()
    model = dataclasses.replace(in_stack)  # with weights of its own
    with model.weights_for(8).transformer() as transformer:
        assert isinstance(transformer.layers, nnx.List)
        assert transformer.layers[0].mlp.up_proj.turned == turned
    with model.weights.transformer() as transformer:
        assert not transformer.layers[0].mlp.up_proj.turned
    return model, in_stack


@pytest.mark.parametrize("loop", LOOPS if FULL else ["verified", "streaming_eager"])
def test_every_decoder_says_the_same(loop, both):
    apart, in_stack = both
    config = config_of(loop)
    assert generate(apart, PROMPTS, config) == generate(in_stack, PROMPTS, config)


def test_positions_below_zero_turn_as_any_others():
    """Attention reads differences of positions alone."""
    in_stack = tiny_model()
    apart, tokens = rooms.with_layers_apart(in_stack.transformer), jnp.array([[1, 2, 3, 4]])
    hidden, shifted = (apart.hidden(tokens, positions=jnp.arange(4)[None] - shift) for shift in (0, 3))
    np.testing.assert_allclose(shifted, hidden, atol=1e-4)
    np.testing.assert_allclose(hidden, in_stack.transformer.hidden(tokens, positions=jnp.arange(4)[None]), atol=1e-4)


def test_the_engine_says_the_same_and_reuses_prefixes(both):
    apart, in_stack = both
    config = config_of("verified")
    engine = Engine(apart, rows=2, context=40, steps=3)
    tickets = [engine.submit(prompt, config) for prompt in [*PROMPTS, [1, 2, 3, 4, 5]]]
    engine.run()
    followed = engine.submit([1, 2, 3, 4, 5, *tickets[-1].completion.ids[:-1]], config)
    engine.run()
    assert followed.reused_tokens > 4
    prompts = [ticket.request.prompt for ticket in (*tickets, followed)]
    expected = [generate(in_stack, [prompt], config)[0] for prompt in prompts]
    assert [ticket.completion for ticket in (*tickets, followed)] == expected


def test_a_step_writes_every_layer_s_cache_in_place(both):
    apart, _ = both
    config = dataclasses.replace(config_of("verified"), window_size=8, mask_token_id=0)
    settings, weights = RowSettings.from_configs([config] * ROWS, range(ROWS), apart.window_table), apart.weights_for(8)
    prompt, lengths = np.ones((ROWS, 8), np.int32), np.full(ROWS, 8, np.int32)
    state = decode_loop.start(weights, prompt, lengths, settings, **start_sizes(config))
    program = decode_loop.Program.of(config)
    text = decode_loop.run.lower(program, weights, state, settings).compile().as_text()
    shape = re.escape(f"f32[{','.join(map(str, state.cache[0].k.shape))}]")
    assert len(re.findall(shape, text)) > 10
    assert re.findall(rf"{shape}\S* copy\(.*", text) == []
