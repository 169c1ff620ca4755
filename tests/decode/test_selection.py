"""The rules on bare arrays: which slots are filled, what the entropy is, which tokens may be drawn and how often."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax import DecodeConfig
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.sampling import filter_logits, sample
from wedlm_jax.decode.selection import entropy, select_by_confidence, select_by_entropy

from .oracle import sampler_units


def settings_of(*configs: DecodeConfig) -> RowSettings:
    resolved = [dataclasses.replace(c, stop_ids=(), mask_token_id=c.mask_token_id or 0) for c in configs]
    return RowSettings.from_configs(resolved, range(len(resolved)))


def test_entropy_selection_equals_the_official_one_with_exact_ties():
    units = sampler_units()["select"]
    slots = 1 + max(max(u["remaining"]) for u in units)
    entropies, masked = np.zeros((len(units), slots), np.float32), np.zeros((len(units), slots), bool)
    for row, unit in enumerate(units):
        entropies[row, unit["remaining"]] = unit["entropy"]
        masked[row, unit["remaining"]] = True
    rows = settings_of(*(DecodeConfig(entropy_threshold=u["tau"], distance_penalty=u["lam"]) for u in units))
    chosen = select_by_entropy(
        jnp.asarray(entropies), jnp.asarray(masked), rows.entropy_threshold, rows.distance_penalty
    )
    for row, unit in enumerate(units):
        assert np.flatnonzero(chosen[row]).tolist() == [unit["remaining"][i] for i in unit["selected"]], unit
    assert sum("exact_tie" in u for u in units) > 3


def test_entropy_equals_the_official_one():
    for unit in sampler_units()["entropy"]:
        assert float(entropy(jnp.asarray(unit["logits"]))) == pytest.approx(unit["entropy"], abs=1e-4)


def test_entropy_of_impossible_tokens_is_not_nan():
    """A logit far below the others has probability 0 in float32, and 0 log 0 is 0."""
    assert float(entropy(jnp.asarray([0.0, -1e30, -2e5]))) == 0.0


def test_filters_keep_the_tokens_and_probabilities_of_the_official_ones():
    units = sampler_units()["filters"]
    rows = settings_of(*(DecodeConfig(top_k=u["top_k"], top_p=u["top_p"]) for u in units))
    logits = jnp.asarray([u["logits"] for u in units])[:, None]
    filtered = np.asarray(filter_logits(logits, rows.top_k, rows.top_p))[:, 0]
    for row, unit in zip(filtered, units, strict=True):
        assert np.flatnonzero(np.isfinite(row)).tolist() == unit["kept"]
        scaled = np.exp((row - row.max()) / unit["temperature"])
        np.testing.assert_allclose(scaled / scaled.sum(), unit["probs"], atol=1e-5)


def test_draws_follow_the_filtered_distribution():
    """Noise per position makes fair draws: frequencies over many positions meet the probabilities."""
    config = DecodeConfig(temperature=0.7, top_k=6, top_p=0.95, ban_mask=False)
    draws, logits = 20_000, np.array([2.0, 1.5, 1.0, 0.9, 0.0, -0.5, -1.0, -4.0], np.float32)
    rows = settings_of(config)
    tokens = sample(jnp.broadcast_to(jnp.asarray(logits), (1, draws, 8)), jnp.arange(draws)[None], rows)
    filtered = np.asarray(filter_logits(jnp.asarray(logits)[None, None], rows.top_k, rows.top_p))[0, 0]
    p = np.exp((filtered - filtered.max()) / config.temperature)
    p /= p.sum()
    frequency = np.bincount(np.asarray(tokens)[0], minlength=8) / draws
    assert (frequency[p == 0] == 0).all()
    assert np.all(np.abs(frequency - p) < 5 * np.sqrt(p * (1 - p) / draws) + 1e-9)


def test_each_position_and_each_row_has_noise_of_its_own():
    rows = settings_of(DecodeConfig(temperature=1.0), DecodeConfig(temperature=1.0))
    flat = jnp.zeros((2, 40, 50))
    tokens = np.asarray(sample(flat, jnp.broadcast_to(jnp.arange(40), (2, 40)), rows))
    assert len(set(tokens[0])) > 15
    assert (tokens[0] != tokens[1]).mean() > 0.8
    again = np.asarray(sample(flat[:, ::-1], jnp.broadcast_to(jnp.arange(40)[::-1], (2, 40)), rows))
    np.testing.assert_array_equal(again[:, ::-1], tokens)  # the position alone decides, not the place in the window


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38])
def test_a_temperature_close_to_zero_is_greedy(temperature):
    logits = jnp.asarray([[[5.0, 7.0, -3.0, 6.0]]])
    rows = settings_of(DecodeConfig(temperature=temperature, ban_mask=False))
    assert sample(logits, jnp.zeros((1, 1), jnp.int32), rows).tolist() == [[1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_id_is_drawn_only_where_it_is_not_banned(temperature):
    logits = jnp.broadcast_to(jnp.asarray([0.0, 0.0, 9.0, 1.0]), (2, 60, 4))
    rows = settings_of(
        DecodeConfig(mask_token_id=2, temperature=temperature),
        DecodeConfig(mask_token_id=2, temperature=temperature, ban_mask=False),
    )
    banned, free = np.asarray(sample(logits, jnp.broadcast_to(jnp.arange(60), (2, 60)), rows))
    assert 2 not in banned
    assert 2 in free


def test_selection_reads_masks_only_and_always_takes_one():
    masked = jnp.asarray([[False, True, False, True], [False] * 4])
    scores = jnp.asarray([[0.0, 3.0, 0.0, 2.0]] * 2)
    none_below = jnp.asarray([0.5, 0.5])
    by_entropy = select_by_entropy(scores, masked, none_below, jnp.zeros(2))
    assert by_entropy.tolist() == [[False, False, False, True], [False] * 4]
    by_confidence = select_by_confidence(-scores, masked, none_below)
    assert by_confidence.tolist() == [[False, False, False, True], [False] * 4]
