"""Decoding with an adapter of mask rows: what is committed is the base's, whatever the adapter drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import FULL
from tests.decode.models import LOOPS, config_of, tiny_model
from wedlm_jax.decode.generation import generate
from wedlm_jax.engine import Engine
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig, is_adapter_parameter
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import init_params, params_of, transformer_from

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 1]]


@functools.cache
def adapted(rows="mask") -> Model:
    base = tiny_model()
    config = dataclasses.replace(base.config, adapter=AdapterConfig(rank=2, rows=rows))
    random = np.random.default_rng(5)
    own = {
        name: jnp.asarray(0.4 * random.normal(size=x.shape), x.dtype)
        for name, x in sorted(jax.eval_shape(lambda: init_params(config, 0)).items())
        if is_adapter_parameter(name)
    }
    transformer = transformer_from(config, params_of(base.transformer) | own)
    return dataclasses.replace(base, transformer=transformer, config=config)


def ids(model, config):
    return [completion.ids for completion in generate(model, PROMPTS, config)]


@pytest.mark.parametrize("loop", ["ar", "verified", "lookup"] if FULL else ["verified"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoders_that_follow_the_ar_chain_return_the_text_of_the_base(loop, temperature):
    expected = ids(tiny_model(), config_of("ar", temperature=temperature))
    assert ids(adapted(), config_of(loop, temperature=temperature)) == expected


def test_the_drafts_are_the_adapters():
    """Else the test above would hold without one."""
    settings = config_of("verified", entropy_threshold=9.0)
    forwards = [[c.stats.forwards for c in generate(model, PROMPTS, settings)] for model in (tiny_model(), adapted())]
    streamed = [ids(model, config_of("streaming_eager")) for model in (tiny_model(), adapted())]
    assert forwards[0] != forwards[1] and streamed[0] != streamed[1]


@pytest.mark.skipif(not FULL, reason="compiles every loop twice; launch/test.sh --full")
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_every_decoder_and_the_engine_take_it(loop):
    """A row of a batch is what it is alone, and what the engine makes of it."""
    together = generate(adapted(), PROMPTS, config_of(loop))
    alone = [generate(adapted(), [prompt], config_of(loop))[0] for prompt in PROMPTS]
    assert [c.ids for c in together] == [c.ids for c in alone]
    served = Engine(adapted(), rows=2, context=64, steps=2)
    tickets = [served.submit(prompt, config_of(loop)) for prompt in PROMPTS]
    served.run()
    assert [ticket.completion.ids for ticket in tickets] == [c.ids for c in alone]


def test_the_mask_embedding_stands_for_a_mask_token():
    """No row of the vocabulary is read for masks: with another mask id, or none, the drafts are the same."""
    model = adapted()
    without = dataclasses.replace(model, mask_token_id=None)
    assert not without.config.needs_mask_token
    settings = config_of("streaming_eager", ban_mask=False)
    assert ids(without, settings) == ids(model, settings)
    with pytest.raises(UserError, match="no mask token"):
        generate(dataclasses.replace(tiny_model(), mask_token_id=None), PROMPTS, settings)
    assert adapted("all").config.needs_mask_token


@pytest.mark.skipif(not FULL, reason="compiles two loops; launch/test.sh --full")
def test_on_all_rows_ar_is_not_that_of_the_base():
    assert ids(adapted("all"), config_of("ar")) != ids(tiny_model(), config_of("ar"))
    assert ids(adapted("all"), config_of("verified")) == ids(adapted("all"), config_of("ar"))


def test_hidden_reads_the_mask_flags_as_decoding_does():
    model = adapted()
    tokens, positions = jnp.array([[1, 2, 3, 4]]), jnp.arange(4)[None]
    masked = jnp.array([[False, False, True, True]])
    hidden = model.hidden(tokens, positions=positions, masked=masked)
    plain = tiny_model().hidden(tokens, positions=positions)
    assert np.abs(hidden - plain)[0, 2:].max(-1).min() > 1e-3
    np.testing.assert_allclose(hidden[0, :2], plain[0, :2], atol=1e-6)
