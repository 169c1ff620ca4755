"""The rules on bare arrays: which slots are filled, what the entropy is, which tokens may be drawn and how often."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax import DecodeConfig
from wedlm_jax.decode import sampling, window
from wedlm_jax.decode.config import LARGEST_FLOAT, RowSettings
from wedlm_jax.decode.sampling import filter_logits, position_noise, sample
from wedlm_jax.decode.selection import RULES, select_by_confidence, select_by_entropy, select_drafts
from wedlm_jax.model.window_table import ON_CPU
from wedlm_jax.ops.categorical import entropy

from .oracle import sampler_units

DRAWS = 20_000


def settings_of(*configs: DecodeConfig) -> RowSettings:
    resolved = [dataclasses.replace(c, stop_ids=(), mask_token_id=c.mask_token_id or 0) for c in configs]
    return RowSettings.from_configs(resolved, range(len(resolved)), window_table=ON_CPU)


@jax.jit
def drawn(logits: jax.Array, settings: RowSettings) -> jax.Array:
    """A token for each row of `settings` and each position 0, 1, ... from the same logits [V]."""
    rows = settings.temperature.shape[0]
    shape = (rows, DRAWS, logits.shape[0])
    return sample(jnp.broadcast_to(logits, shape), jnp.broadcast_to(jnp.arange(DRAWS), shape[:2]), settings)


def test_entropy_selection_equals_the_official_one_with_exact_ties():
    units = sampler_units()["select"]
    slots = 1 + max(max(u["remaining"]) for u in units)
    entropies, masked = np.zeros((len(units), slots), np.float32), np.zeros((len(units), slots), bool)
    for row, unit in enumerate(units):
        entropies[row, unit["remaining"]] = unit["entropy"]
        masked[row, unit["remaining"]] = True
    rows = settings_of(*(DecodeConfig(entropy_threshold=u["tau"], distance_penalty=u["lam"]) for u in units))
    chosen = select_by_entropy(
        jnp.asarray(entropies), jnp.asarray(masked), rows.entropy_threshold, rows.distance_penalty, rows.rule
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


def test_filters_keep_the_likeliest_by_their_places_and_ties_with_the_last_of_them():
    logits = jnp.asarray([[[3.0, 1.0, 2.0, 2.0, -jnp.inf, 2.0]]])
    kept = {
        (k, p): np.flatnonzero(np.isfinite(filter_logits(logits, jnp.asarray([k]), jnp.asarray([p]))[0, 0])).tolist()
        for k, p in ((1, 1.0), (2, 1.0), (5, 1.0), (0, 1.0), (0, 1e-30), (2, 0.7))
    }
    assert kept[1, 1.0] == kept[0, 1e-30] == [0]
    assert kept[2, 1.0] == [0, 2, 3, 5]
    assert kept[2, 0.7] == [0, 2, 3]  # of ties at the limit of top-p the first
    assert kept[5, 1.0] == kept[0, 1.0] == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("V", [1, 2, 63, 64, 65, 1000])
def test_filters_keep_what_sorting_would(V):
    """Rows with top-k, top-p, both and none side by side, logits with many ties, zeros of both signs and impossible tokens."""
    random = np.random.default_rng(V)
    B, T = 24, 5
    logits = np.round(random.normal(size=(B, T, V)) * 8) / 4
    logits[logits == 0] = random.choice([0.0, -0.0], size=(logits == 0).sum())
    logits[:, :, 1:] = np.where(random.random((B, T, V - 1)) < 0.2, -np.inf, logits[:, :, 1:])
    top_k = random.choice([0, 1, 2, 7, 63, V, 2 * V], size=B)
    top_p = random.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-30], size=B)
    kept = np.isfinite(jax.jit(filter_logits)(*(jnp.asarray(x, t) for x, t in
        ((logits, "float32"), (top_k, "int32"), (top_p, "float32")))))  # fmt: skip
    near_a_limit = 0
    for b, t in np.ndindex(B, T):
        row = logits[b, t]
        order = np.argsort(-row, kind="stable")
        least = row[order[min(top_k[b] or V, V) - 1]]
        p = np.where(row >= least, np.exp(row - row.max()), 0)
        before = np.concatenate([[0], np.cumsum(p[order] / p.sum())[:-1]])
        expected = np.zeros(V, bool)
        expected[order] = (before < top_p[b]) & (p[order] > 0)
        expected[order[0]] = True
        # Sums in float32 may fall on the other side of a limit that a cumulated probability meets to seven digits.
        if np.abs(before[1:] - top_p[b]).min(initial=1) < 1e-6 and top_p[b] < 1:
            near_a_limit += 1
            continue
        assert kept[b, t].tolist() == expected.tolist(), (b, t, top_k[b], top_p[b])
    assert near_a_limit < B * T / 10


def test_draws_follow_the_filtered_distribution():
    """Noise per position makes fair draws: frequencies over many positions meet the probabilities."""
    config = DecodeConfig(temperature=0.7, top_k=6, top_p=0.95, ban_mask=False)
    logits, rows = np.array([2.0, 1.5, 1.0, 0.9, 0.0, -0.5, -1.0, -4.0], np.float32), settings_of(config, config)
    filtered = np.asarray(filter_logits(jnp.asarray(logits)[None, None], rows.top_k[:1], rows.top_p[:1]))[0, 0]
    p = np.exp((filtered - filtered.max()) / config.temperature)
    p /= p.sum()
    first, second = tokens = np.asarray(drawn(logits, rows))
    for frequency in (np.bincount(row, minlength=8) / DRAWS for row in tokens):
        assert (frequency[p == 0] == 0).all()
        assert np.all(np.abs(frequency - p) < 5 * np.sqrt(p * (1 - p) / DRAWS) + 1e-9)
    # Rows and neighbouring positions are independent: they agree as often as two fair draws do.
    for agreement in ((first == second).mean(), (first[1:] == first[:-1]).mean()):
        assert abs(agreement - (p**2).sum()) < 5 * np.sqrt(0.25 / DRAWS)


def test_drawing_sorts_no_vocabulary():
    """Of Qwen's a sort takes longer than a forward; what has no filter looks for nothing."""
    rows = settings_of(DecodeConfig(temperature=1.0, top_k=5, top_p=0.9))
    program = str(jax.make_jaxpr(sample)(jnp.zeros((1, 2, 100)), jnp.zeros((1, 2), jnp.int32), rows))
    assert re.findall(r"\b(cond|sort|top_k|cumsum|reduce_window)\[", program) == ["cond", "cond"]


def test_a_large_vocabulary_is_drawn_from_in_little_memory_and_the_tokens_are_the_same(monkeypatch):
    """What drawing makes on the way was eight times as large as the logits: gigabytes of 16 windows of 32 slots of Qwen's."""
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(3, 16, 16_384)) * 3, "float32")
    rows = settings_of(
        DecodeConfig(temperature=1.0), DecodeConfig(), DecodeConfig(temperature=0.7, top_k=20, top_p=0.95)
    )
    positions = jnp.asarray(random.integers(0, 99, size=(3, 16)), "int32")
    program = jax.jit(sample).lower(logits, positions, rows).compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * logits.nbytes
    monkeypatch.setattr(sampling, "LARGE_VOCABULARY", 2**30)
    jax.clear_caches()
    np.testing.assert_array_equal(program(logits, positions, rows), jax.jit(sample)(logits, positions, rows))


def test_what_logits_of_a_large_vocabulary_say_is_read_in_little_memory_and_is_the_same(monkeypatch):
    """Of all rows at once two more arrays as large as the logits were held."""
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(8, 4, 16_384)) * 3, "float32")
    rows = settings_of(*[DecodeConfig(temperature=1.0), DecodeConfig()] * 4)
    state = SimpleNamespace(filled=jnp.asarray(random.random((8, 4)) < 0.5), length=jnp.arange(8))

    def read(logits, rows):
        made_here = jnp.tanh(logits)  # as those of a forward are
        return window.read_slots(made_here, jnp.broadcast_to(jnp.arange(4), (8, 4)), state, rows, entropy)

    program = jax.jit(read).lower(logits, rows).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.9 * logits.nbytes
    monkeypatch.setattr(sampling, "LARGE_VOCABULARY", 2**30)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, program(logits, rows), jax.jit(read)(logits, rows))


def test_the_noise_reaches_tokens_of_a_vocabulary_s_tail():
    """Of n Gumbel draws the largest is about log n: 17.3 here, where draws of 23 bits end at 15.9."""
    noise = jax.jit(position_noise, static_argnames="V")(jax.random.key(0), jnp.arange(256), V=131_072)
    assert 16.2 < float(noise.max()) < 22
    assert float(noise.mean()) == pytest.approx(np.euler_gamma, abs=2e-3)


def test_the_noise_belongs_to_the_position_and_not_to_the_place_in_the_window():
    rows = settings_of(DecodeConfig(temperature=1.0), DecodeConfig(temperature=1.0))
    flat, positions = jnp.zeros((2, 40, 8)), jnp.broadcast_to(jnp.arange(40), (2, 40))
    draw = jax.jit(sample)
    backwards = draw(flat, positions[:, ::-1], rows)[:, ::-1]
    np.testing.assert_array_equal(draw(flat, positions, rows), backwards)


def test_temperatures_close_to_zero_are_greedy_and_only_the_banned_mask_id_is_never_drawn():
    logits = np.array([50.0, 70.0, -30.0, 60.0, 0.0, 0.0, 0.0, 0.0], np.float32)
    rows = settings_of(
        *(DecodeConfig(temperature=t, ban_mask=False) for t in (0.0, 1e-3, 1e-30, 2e-38)),
        DecodeConfig(mask_token_id=1),
        DecodeConfig(mask_token_id=1, temperature=1.0),
        DecodeConfig(mask_token_id=1, temperature=1.0, ban_mask=False),
    )
    *greedy, banned, banned_at_1, free = np.asarray(drawn(logits, rows))
    assert {int(t) for row in greedy for t in row} == {1}
    assert set(banned) == {3}
    assert 1 not in banned_at_1
    assert 1 in free


def test_the_highest_temperatures_draw_from_all_that_may_be_drawn():
    """There XLA's 1 / T is 0."""
    logits = np.array([50.0, 70.0, -30.0, 60.0, 0.0, 0.0, 0.0, 0.0], np.float32)
    rows = settings_of(*(DecodeConfig(temperature=t, top_k=4) for t in (1e10, 2e38, LARGEST_FLOAT)))
    assert [set(row) for row in np.asarray(drawn(logits, rows))] == [{1, 3, 4, 5, 6, 7}] * 3


def test_rows_of_a_vocabulary_that_are_no_tokens_are_chosen_only_where_the_mask_id_may_be():
    configs = [DecodeConfig(temperature=t, stop_ids=(), mask_token_id=0) for t in (0.0, 1.0)]
    configs.append(dataclasses.replace(configs[0], ban_mask=False))
    rows = RowSettings.from_configs(configs, range(3), ON_CPU, num_tokens=6)
    greedy, at_1, free = np.asarray(drawn(np.array([0, 1, 1, 2, 0, 0, 9, 9], np.float32), rows))
    assert set(greedy) == {3} and set(at_1) == {1, 2, 3, 4, 5} and set(free) == {6}


def test_rules_for_slots_that_are_filled_together():
    """By hand: entropies 0.3, 0.5, 0.1, 0.2 at the masks, and a slot between them that is filled."""
    adjusted = jnp.asarray([[0.3, jnp.inf, 0.5, 0.1, 0.2]])
    masked = jnp.isfinite(adjusted)

    def filled(rule: str, tau: float) -> list[int]:
        return np.flatnonzero(RULES[rule](adjusted, masked, jnp.asarray([tau]))[0]).tolist()

    assert [filled("each", tau) for tau in (0.1, 0.25, 0.5, 0.6)] == [[], [3, 4], [0, 3, 4], [0, 2, 3, 4]]
    assert [filled("sum", tau) for tau in (0.1, 0.35, 0.5, 0.65, 1.2)] == [[], [3, 4], [3, 4], [0, 3, 4], [0, 2, 3, 4]]
    assert [filled("run", tau) for tau in (0.2, 0.4, 0.6)] == [[], [0], [0, 2, 3, 4]]
    for rule in RULES:
        assert filled(rule, float("inf")) == [0, 2, 3, 4] and filled(rule, -float("inf")) == []


def test_ties_go_left_and_an_entropy_at_the_threshold_does_not_pass():
    """Of numbers that float32 sums exactly."""
    adjusted = jnp.asarray([[0.25, 0.5, jnp.inf, 0.25, 0.25]])
    masked = jnp.isfinite(adjusted)

    def filled(rule: str, tau: float) -> list[int]:
        return np.flatnonzero(RULES[rule](adjusted, masked, jnp.asarray([tau]))[0]).tolist()

    assert [filled("sum", tau) for tau in (0.25, 0.3, 0.5, 0.6)] == [[], [0], [0], [0, 3]]
    assert [filled("sum", tau) for tau in (0.8, 2.0)] == [[0, 3, 4], [0, 1, 3, 4]]
    assert filled("each", 0.25) == [] and filled("run", 0.25) == [] and filled("run", 0.5) == [0]


def test_drafts_go_left_where_none_passes():
    masked = jnp.asarray([[False, True, True], [False] * 3])
    chosen = select_drafts(jnp.asarray([[0.0, 3.0, 2.0]] * 2), masked, jnp.ones(2), jnp.zeros(2), jnp.zeros(2, int))
    assert chosen.tolist() == [[False, True, False], [False] * 3]


def test_selection_reads_masks_only_and_always_takes_one():
    masked = jnp.asarray([[False, True, False, True], [False] * 4])
    scores = jnp.asarray([[0.0, 3.0, 0.0, 2.0]] * 2)
    none_below = jnp.asarray([0.5, 0.5])
    by_entropy = select_by_entropy(scores, masked, none_below, jnp.zeros(2), jnp.zeros(2, int))
    assert by_entropy.tolist() == [[False, False, False, True], [False] * 4]
    by_confidence = select_by_confidence(-scores, masked, none_below)
    assert by_confidence.tolist() == [[False, False, False, True], [False] * 4]


def test_a_confidence_at_the_threshold_passes_and_of_the_most_confident_the_first_is_filled():
    """With none that passes in the second pair."""

    def filled(confidences: list[list[float]], thresholds: list[float]) -> list[list[int]]:
        chosen = select_by_confidence(jnp.asarray(confidences), jnp.ones((2, 4), bool), jnp.asarray(thresholds))
        return [np.flatnonzero(row).tolist() for row in chosen]

    assert filled([[0.5, 0.75, 0.75, 1.0], [1.0, 1.0, 0.5, 0.25]], [0.75, 1.0]) == [[1, 2, 3], [0, 1]]
    assert filled([[0.5, 0.625, 0.625, 0.25], [1.0, 1.0, 0.5, 0.25]], [0.75, float("inf")]) == [[1], [0]]
