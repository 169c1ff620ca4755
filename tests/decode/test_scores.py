"""Scores of a text are those of one plain forward, whatever its length, and need no more memory than some of its logits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.decode import scores
from wedlm_jax.decode.scores import score
from wedlm_jax.errors import UserError
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.sharding import MeshConfig, make_mesh

from ..evals.models import tiny_model
from .models import tiny_model as tiny
from .test_precision_and_mesh import EVEN, cut_over


@pytest.mark.parametrize("length", [1, 7, 350])  # one chunk of positions, and two
def test_scores_are_those_of_one_plain_forward(length):
    model = tiny_model()
    ids = np.random.default_rng(0).integers(1, 500, length).tolist()
    positions = jnp.arange(length)[None]
    log_p = np.asarray(jax.nn.log_softmax(model(jnp.asarray([ids]), positions=positions)))[0]
    found = score(model, ids)
    np.testing.assert_allclose(found.log_probs, log_p[np.arange(length - 1), ids[1:]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropies, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(found.likeliest, log_p.argmax(-1))
    np.testing.assert_allclose(found.largest, log_p.max(-1), rtol=1e-5)
    hidden = model.hidden(jnp.asarray([ids]), positions=positions)[0, -1]
    np.testing.assert_allclose(found.hidden, hidden, rtol=1e-5, atol=1e-5)


def test_the_likeliest_token_has_the_very_log_probability_of_the_likeliest():
    """lm-eval calls a text greedy where the two are equal."""
    model, ids = tiny_model(), [5]
    for _ in range(6):
        ids.append(int(score(model, ids).likeliest[-1]))
    found = score(model, ids)
    np.testing.assert_array_equal(found.log_probs, found.largest[:-1])


def test_a_banned_token_is_never_the_likeliest_and_changes_no_probability():
    model, ids = tiny_model(), [5, 9, 7, 2]
    plain = score(model, ids)
    banned = int(plain.likeliest[2])
    found = score(model, ids, banned)
    log_p = np.array(jax.nn.log_softmax(model(jnp.asarray([ids]), positions=jnp.arange(4)[None])))[0]
    log_p[:, banned] = -np.inf
    np.testing.assert_array_equal(found.likeliest, log_p.argmax(-1))
    np.testing.assert_array_equal(found.log_probs, plain.log_probs)


def test_several_devices_score_what_one_scores():
    ids, mesh = [5, 9, 7, 2], make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    alone, cut = (score(model, ids) for model in (tiny(0, EVEN), cut_over(tiny(0, EVEN), mesh)))
    np.testing.assert_allclose(cut.log_probs, alone.log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cut.likeliest, alone.likeliest)


def test_the_logits_of_few_positions_are_held_at_a_time_however_long_the_text(monkeypatch):
    seen, logits = [], Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda self, hidden: seen.append(hidden.shape) or logits(self, hidden))
    given = np.zeros((1, 2048), np.int32), np.int32(2000), np.int32(-1), np.int32(11)
    scores._score.lower(tiny_model().weights, *given)
    assert {math.prod(shape[:-1]) for shape in seen} == {scores.SCORED_AT_ONCE}


def test_a_text_that_memory_does_not_hold_is_one_line(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20 bytes.")

    monkeypatch.setattr(scores, "_score", full)
    with pytest.raises(UserError, match="out of memory with one forward over 32 tokens, .* lower max_new_tokens"):
        score(tiny_model(), [5, 9, 7, 20])
