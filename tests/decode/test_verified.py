"""Verified decoding and lookup: the AR distribution itself, what they report of it, and where lookup's drafts come from."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from wedlm_jax import DecodeConfig, generate
from wedlm_jax.decode.lookup import find_drafts

from ..reference.decoding import continuation
from .models import MASK, TINY, config_of, reciting_model, reference_of, tiny_model

COPIES = 2000
PROMPT = [1, 2, 3]


def next_probabilities(tokens: list[int], config: DecodeConfig) -> np.ndarray:
    """What AR decoding draws behind `tokens`, by the reference model: top-k, then top-p, then temperature; no mask id."""
    logits = reference_of(tiny_model(1)).logits(tokens, list(range(len(tokens))))[-1]
    logits[MASK] = -np.inf
    ranked = np.argsort(-logits)[: config.top_k]
    p = np.exp(logits[ranked] - logits[ranked[0]])
    kept = ranked[np.cumsum(p / p.sum()) - p / p.sum() < config.top_p]
    weights = np.zeros(TINY.vocab_size)
    weights[kept] = np.exp((logits[kept] - logits[kept[0]]) / config.temperature)
    return weights / weights.sum()


def chance(counts: dict[tuple, int], config: DecodeConfig) -> float:
    """p-value of these counts of token triples under the AR distribution; rare triples are pooled."""
    expected: dict[tuple, float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*head, int(token)): p * q[token]
            for head, p in expected.items()
            for q in [next_probabilities([*PROMPT, *head], config)]
            for token in np.flatnonzero(q)
        }
    common = [triple for triple, p in expected.items() if p * COPIES >= 5]
    observed = [counts.get(triple, 0) for triple in common]
    theory = [expected[triple] * COPIES for triple in common]
    return chisquare([*observed, COPIES - sum(observed)], [*theory, COPIES - sum(theory)]).pvalue


def test_sampled_sequences_follow_the_autoregressive_distribution():
    """Not token by token but as sequences: counts of whole triples over many copies of a prompt, each with its own noise."""
    warm = dict(temperature=0.9, top_k=5, top_p=0.95, max_new_tokens=3)
    config = config_of("verified", entropy_threshold=float("inf"), **warm)
    triples = {}
    for loop in ("verified", "ar"):
        completions = generate(tiny_model(1), [PROMPT], config_of(loop, entropy_threshold=float("inf"), **warm), COPIES)
        triples[loop] = [tuple(c.ids) for c in completions]
    assert triples["verified"] == triples["ar"]
    counts = {triple: triples["verified"].count(triple) for triple in set(triples["verified"])}
    assert chance(counts, config) > 1e-3
    assert chance(counts, config_of("verified", **{**warm, "temperature": 1.3})) < 1e-6  # so the test can fail


@pytest.mark.parametrize("loop", ["ar", "verified", "lookup"])
def test_log_probabilities_are_those_of_the_autoregressive_model(loop):
    """Unfiltered and at temperature 1, whatever the tokens were drawn with."""
    model = reference_of(tiny_model())
    for completion in generate(tiny_model(), [PROMPT] * 3, config_of(loop, temperature=1.3, top_k=4)):
        tokens = PROMPT + completion.ids
        logits = model.logits(tokens, list(range(len(tokens))))[len(PROMPT) - 1 : -1]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(
            completion.log_probs, log_p[np.arange(len(completion.ids)), completion.ids], atol=1e-4
        )


def test_the_fallback_reports_the_log_probabilities_of_its_autoregressive_tokens_and_none_of_others():
    model, read, unread = reference_of(tiny_model()), 0, 0
    for tau in (0.3, 0.7, 1.4):
        for completion in generate(tiny_model(), [PROMPT] * 3, config_of("streaming_fallback", entropy_threshold=tau)):
            tokens = PROMPT + completion.ids
            logits = model.logits(tokens, list(range(len(tokens))))[len(PROMPT) - 1 : -1]
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            for place, (token, found) in enumerate(zip(completion.ids, completion.log_probs, strict=True)):
                if found is not None:
                    assert (
                        found == pytest.approx(log_p[place, token], abs=1e-4) and token == log_p[place, :MASK].argmax()
                    )
                read, unread = read + (found is not None), unread + (found is None)
            assert completion.acceptance is None
    assert read > 10 and unread > 10


def test_acceptance_accounts_for_every_token():
    """A forward emits the drafts that agree and one token more; a draft is checked only behind one that agreed."""
    for loop, seed in itertools.product(["verified", "lookup"], range(2)):
        config = config_of(loop, entropy_threshold=1.4)
        for completion in generate(tiny_model(seed), [PROMPT] * 3, config):
            checked, agreed = (list(column) for column in zip(*completion.acceptance, strict=True))
            cut = completion.stats.forwards + sum(agreed) - len(completion.ids)
            assert cut in (0, 1)  # where the last forward ends with a draft, the token behind it is not emitted
            assert all(of >= yes for of, yes in zip(checked, agreed, strict=True))
            assert all(later <= yes for later, yes in zip(checked[1:], agreed, strict=False))


def test_acceptance_by_distance_of_known_drafts():
    """Drafts that are right at every second position alone: the first is always right or always wrong, the second never."""
    chain = [1, 2] * 6
    model = reciting_model(chain, drafts=[1, 9] * 6, vocab_size=11, mask_token_id=MASK)
    config = config_of("verified", max_new_tokens=12, entropy_threshold=None, text_drafts=False)
    completion = generate(model, [[0]], config)[0]
    assert completion.ids == chain
    assert completion.stats.forwards + sum(yes for _, yes in completion.acceptance) == 12
    assert len(completion.acceptance) == 1


def test_decoders_without_an_autoregressive_chain_report_none():
    for loop in ("streaming_eager", "blockwise"):
        completion = generate(tiny_model(), [PROMPT] * 3, config_of(loop))[0]
        assert completion.log_probs is None and completion.acceptance is None
    assert generate(tiny_model(), [PROMPT] * 3, config_of("ar"))[0].acceptance is None


@pytest.mark.parametrize("longest", [3, 8])
def test_lookup_drafts_what_followed_the_longest_and_latest_match(longest):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 20, size=200)
    histories = rng.integers(0, 3, size=(200, 20))
    histories[::4] = np.arange(20) % 5  # these repeat themselves
    found = jax.jit(find_drafts, static_argnames=("slots", "longest"))(
        jnp.asarray(histories), jnp.asarray(lengths), jnp.full(200, 5), slots=7, longest=longest
    )
    drafts, count, matched = (np.asarray(x).tolist() for x in found)
    for history, length, row, n, tokens in zip(histories.tolist(), lengths, drafts, count, matched, strict=True):
        assert (row[:n], tokens) == continuation(history[:length], 5, longest)
    assert {0, 1, 5} <= set(count) and {0, longest} <= set(matched)


def test_lookup_fills_its_window_with_text_that_repeats_itself():
    model = reciting_model([5] * 24, vocab_size=11, mask_token_id=MASK)
    completion = generate(model, [[5]], config_of("lookup", max_new_tokens=24))[0]
    assert completion.ids == [5] * 24
    # Windows of 4, once three tokens are matched; with one draft each it would be 13.
    assert completion.stats.forwards <= 9


def test_lookup_needs_no_mask_id_and_copies_in_few_forwards():
    passage = [3, 1, 4, 1, 5, 9, 2, 6]
    model = reciting_model([*passage[1:], 0, *passage], vocab_size=11, mask_token_id=MASK)
    model.mask_token_id = None
    completion = generate(model, [[3]], config_of("lookup", max_new_tokens=16))[0]
    assert completion.ids == [*passage[1:], 0, *passage]
    assert completion.stats.forwards < 16


def forwards_of_verified(chain: list[int], drafts: list[int]) -> tuple[int, int]:
    """With drafts of text and of masks alone, for a model that says `chain` and whose masks say `drafts`."""
    model = reciting_model(chain, drafts=drafts, vocab_size=11, mask_token_id=MASK)
    settings = dict(max_new_tokens=len(chain), entropy_threshold=0.7)
    both, alone = (generate(model, [[0]], config_of("verified", **settings, text_drafts=of))[0] for of in (True, False))
    assert both.ids == alone.ids == chain
    return both.stats.forwards, alone.stats.forwards


def test_text_is_drafted_where_masks_are_wrong_and_the_text_repeats_itself():
    both, alone = forwards_of_verified([1, 2, 3, 4, 5] * 3, [9] * 15)
    assert alone == 15  # every draft of the masks is wrong
    assert both == 6 + 3  # nothing repeats in the first 6 tokens; then up to 3 drafts and a token behind them a forward


def test_text_leaves_masks_that_are_right_alone():
    """A single token that came before, each time with another one behind it, does not take the place of three right drafts."""
    chain = [1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7]
    both, alone = forwards_of_verified(chain, chain)
    assert both == alone == 3


def test_mask_drafts_whose_place_wrong_text_took_come_back():
    """The masks fail at the second 2, so text is tried: two tokens match. It is wrong, and what masks drafted before is right."""
    chain = [1, 2, 3, 1, 2, 4, 5, 6, 7]
    both, alone = forwards_of_verified(chain, drafts=[1, 2, 3, 1, 9, 4, 5, 6, 7])
    assert (both, alone) == (4, 3)
