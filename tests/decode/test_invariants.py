"""What holds for every decoder, whatever the model says."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax import Completion, DecodeConfig, generate
from wedlm_jax.data.tokenizer_training import train_tokenizer
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.first_drafts import masks_in_prefill
from wedlm_jax.decode.generation import SMALLEST_BUCKET, Batch, make_request
from wedlm_jax.decode.loop import Program, run, run_stepwise, start

from .models import LOOPS, MASK, TINY, config_of, reciting_model, start_sizes, tiny_model

PROMPTS = [[1, 2, 3], [4, 9, 0, 2, 7, 7, 1, 5], [6]]


def outcome(completion: Completion) -> tuple:
    return completion.ids, completion.finish_reason, completion.stats


def outcomes(prompts, config, **kwargs) -> list[tuple]:
    return [outcome(c) for c in generate(tiny_model(), prompts, config, **kwargs)]


def emitted(config) -> set[int]:
    return {token for c in generate(tiny_model(), PROMPTS, config) for token in c.ids}


@pytest.mark.parametrize("loop", LOOPS)
def test_the_compiled_loop_equals_the_python_loop(loop):
    configs = [config_of(loop), config_of(loop, temperature=0.9, top_k=4), config_of(loop, stop_ids=(9, 0))]
    traced = generate(tiny_model(), PROMPTS, configs, trace=True)
    assert [outcome(c) for c in traced] == outcomes(PROMPTS, configs)
    for config, completion in zip(configs, traced, strict=True):
        assert len(completion.trace) == completion.stats.forwards
        fed = sum(len(e["window"]) for e in completion.trace)
        assert (
            fed + masks_in_prefill(config, len(PROMPTS), tiny_model().window_table) == completion.stats.tokens_processed
        )
        assert sum(e["emitted"] for e in completion.trace) == completion.stats.generated_tokens


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_trace_says_was_filled_was_a_mask(loop):
    """So what AR decoding emits, behind the one token that it feeds, is not said to stand in that token's place."""
    for completion in generate(tiny_model(), PROMPTS, config_of(loop), trace=True):
        assert all(set(e["filled_positions"]) <= set(e["mask_positions"]) for e in completion.trace)


@pytest.mark.parametrize("loop", LOOPS)
def test_permuting_the_batch_permutes_the_outputs(loop):
    configs = [
        config_of(loop),
        config_of(loop, entropy_threshold=1.6, max_new_tokens=9),
        config_of(loop, stop_ids=(2,)),
    ]
    straight = outcomes(PROMPTS, configs)
    for order in ([2, 0, 1], [1, 2, 0]):
        assert outcomes([PROMPTS[i] for i in order], [configs[i] for i in order]) == [straight[i] for i in order]


@pytest.mark.parametrize("loop", ["streaming_eager", "verified"])
def test_a_row_alone_equals_the_row_in_a_batch(loop):
    """Row 0 keeps its number, which seeds its noise, so the claim holds at any temperature."""
    config = config_of(loop)
    in_batch = outcomes(PROMPTS, config)
    assert [outcomes([prompt], config)[0] for prompt in PROMPTS] == in_batch
    warm = config_of(loop, temperature=1.0)
    assert outcomes(PROMPTS[:1], warm) == outcomes(PROMPTS, warm)[:1]


@pytest.mark.parametrize("reorder", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_committed_cache_equals_the_cache_of_a_causal_prefill(loop, reorder):
    """Slots below the cursor hold what a plain causal pass over prompt and output would have put there."""
    config = dataclasses.replace(config_of(loop, temperature=0.7, reorder=reorder), mask_token_id=MASK)
    weights = tiny_model().weights

    def prefilled(prompts: list[list[int]], config: DecodeConfig):
        padded = np.array([p + [0] * (SMALLEST_BUCKET - len(p)) for p in prompts], np.int32)
        lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
        return start(weights, jnp.asarray(padded), lengths, settings, **start_sizes(config))

    settings = RowSettings.from_configs([config] * len(PROMPTS), range(len(PROMPTS)), tiny_model().window_table)
    state = run(Program.of(config), weights, prefilled(PROMPTS, config), settings)
    whole = [p + np.asarray(out)[:n].tolist() for p, out, n in zip(PROMPTS, state.output, state.generated, strict=True)]
    causal = prefilled(whole, config_of("ar"))
    for row, prompt in enumerate(PROMPTS):
        length = int(state.length[row])
        assert length > len(prompt) + 5
        for ours, expected in ((state.cache.k, causal.cache.k), (state.cache.v, causal.cache.v)):
            np.testing.assert_allclose(ours[:, row, :, :length], expected[:, row, :, :length], atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        dict(),
        dict(temperature=0.7),
        dict(temperature=1.0, top_k=3),
        dict(temperature=1.3, top_p=0.7),
        dict(stop_ids=(9,)),
    ],
    ids=str,
)
def test_verified_equals_autoregressive_token_for_token(sampling):
    saved = 0
    for seed, (window, tau) in itertools.product(range(3), [(3, 0.9), (4, 1.4), (4, float("inf")), (4, None)]):
        drafting = dict(window_size=window, entropy_threshold=tau)
        by_drafts = generate(tiny_model(seed), PROMPTS, config_of("verified", **drafting, seed=seed, **sampling))
        one_by_one = generate(tiny_model(seed), PROMPTS, config_of("ar", seed=seed, **sampling))
        for ours, expected in zip(by_drafts, one_by_one, strict=True):
            assert (ours.ids, ours.finish_reason) == (expected.ids, expected.finish_reason)
            assert ours.stats.forwards <= expected.stats.forwards
            saved += expected.stats.forwards - ours.stats.forwards
    assert saved > 0


def test_verified_takes_the_chain_whatever_the_drafts_say():
    chain, rng = [1, 2, 3, 4, 5, 6, 7] * 2, np.random.default_rng(0)
    forwards = []
    for wrong in (0.0, 0.3, 1.0):
        drafts = [int(9 if rng.random() < wrong else token) for token in chain]
        model = reciting_model(chain, drafts=drafts, vocab_size=TINY.vocab_size, mask_token_id=MASK)
        completion = generate(model, [[0]], config_of("verified", text_drafts=False))[0]
        assert completion.ids == chain
        forwards.append(completion.stats.forwards)
    assert forwards[0] < forwards[1] < forwards[2] == len(chain)


def test_autoregressive_decoding_is_the_unit_of_both_ratios():
    for completion in generate(tiny_model(), PROMPTS, config_of("ar", stop_ids=(9,), temperature=0.5)):
        assert (completion.stats.p_cache, completion.stats.tokens_per_forward) == (1.0, 1.0)


@pytest.mark.parametrize("loop", ["streaming_eager", "streaming_paper"])
def test_streaming_feeds_every_token_at_least_twice(loop):
    for tau, stop_ids, limit in itertools.product([None, 1.0, float("inf")], [(), (9, 2)], [1, 3, 14]):
        config = config_of(loop, entropy_threshold=tau, stop_ids=stop_ids, max_new_tokens=limit)
        for completion in generate(tiny_model(), PROMPTS, config):
            assert 0 < completion.stats.p_cache <= 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_mask_id_is_emitted_only_when_it_is_not_banned(loop, temperature):
    """The mask id is set to a token that the model emits even so."""
    free = [config_of(loop, mask_token_id=i, ban_mask=False, temperature=temperature) for i in range(TINY.vocab_size)]
    liked = next(config for config in free if config.mask_token_id in emitted(config))
    assert liked.mask_token_id not in emitted(dataclasses.replace(liked, ban_mask=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("loop", LOOPS)
def test_rows_of_the_vocabulary_behind_the_tokenizers_are_never_emitted(loop, temperature):
    """Checkpoints pad their vocabularies, as Qwen's do."""
    padded, config = dataclasses.replace(tiny_model()), config_of(loop, temperature=temperature)
    padded.num_tokens = 5
    assert max(emitted(config)) >= 5
    assert {token for c in generate(padded, PROMPTS, config) for token in c.ids} <= set(range(5))


def test_tokens_are_the_ids_of_the_tokenizer_and_those_that_end_a_text():
    tokenizer = train_tokenizer(["x"], 260)
    assert tiny_model().num_tokens == TINY.vocab_size
    assert dataclasses.replace(tiny_model(), tokenizer=tokenizer).num_tokens == len(tokenizer)
    assert dataclasses.replace(tiny_model(), tokenizer=tokenizer, eos_token_ids=(2, 300)).num_tokens == 301


@pytest.mark.parametrize("loop", LOOPS)
def test_a_mask_id_in_the_prompt_is_an_ordinary_token(loop):
    """Masks are tracked by a flag: the id in the prompt is neither refilled nor overwritten, and nothing waits for it."""
    for completion in generate(tiny_model(), [[MASK, 1, MASK]] * 3, config_of(loop)):
        assert len(completion.ids) == 14


@pytest.mark.parametrize("loop", ["streaming_eager", "ar"])
def test_copies_differ_by_their_noise_and_repeat_with_their_seed(loop):
    warm = config_of(loop, temperature=1.2, seed=5)
    copies = [c.ids for c in generate(tiny_model(), PROMPTS[:1], warm, n=3)]
    assert len(set(map(tuple, copies))) == 3
    assert [c.ids for c in generate(tiny_model(), PROMPTS[:1], warm, n=3)] == copies
    other = dataclasses.replace(warm, seed=6)
    assert [c.ids for c in generate(tiny_model(), PROMPTS[:1], other, n=3)] != copies
    cold = dataclasses.replace(warm, temperature=0.0)
    assert len({tuple(c.ids) for c in generate(tiny_model(), PROMPTS[:1], cold, n=3)}) == 1


def test_every_bit_of_a_seed_counts_and_small_ones_draw_as_jax_seeds_them():
    config = config_of("ar", seed=0)
    seeds = [5, 5 + 2**31, 5 + 2**32, 5 + 2**33, 5 + 2**62]
    configs = [dataclasses.replace(config, seed=seed) for seed in seeds]
    keys = RowSettings.from_configs(configs, [2] * len(seeds), tiny_model().window_table).key
    data = [tuple(np.asarray(jax.random.key_data(key))) for key in keys]
    assert len(set(data)) == len(seeds)
    assert data[0] == tuple(np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(5), 2))))


def test_decoders_in_one_call_do_not_disturb_each_other_and_copies_lie_side_by_side():
    """Two prompts of different decoders, three copies each: two batches, put back in the order of the prompts."""
    model, configs = tiny_model(), [config_of("ar"), config_of("streaming_eager")]
    together = generate(model, PROMPTS[:2], configs, n=3)
    for i in range(2):
        alone = generate(model, [PROMPTS[i]] * 3, configs[i])
        assert [outcome(c) for c in together[3 * i : 3 * i + 3]] == [outcome(c) for c in alone]


# For every field of DecodeConfig: settings under which it counts, and a changed value.
FIELDS: dict[str, tuple[DecodeConfig, object]] = {
    "decoder": (config_of("streaming_eager"), "verified"),
    "window_size": (config_of("streaming_eager"), 3),
    "entropy_threshold": (config_of("streaming_eager"), 1.8),
    "distance_penalty": (config_of("streaming_eager", entropy_threshold=1.6), 0.5),
    "fill_rule": (config_of("streaming_eager", entropy_threshold=1.6), "sum"),
    "text_drafts": (config_of("verified"), False),
    "verify": (config_of("streaming_eager"), "fallback"),
    "refill": (config_of("streaming_eager"), "paper"),
    "reorder": (config_of("streaming_eager", distance_penalty=0.0), False),
    "block_size": (config_of("blockwise"), 3),
    "confidence_threshold": (config_of("blockwise"), 0.2),
    "max_new_tokens": (config_of("ar"), 13),
    "temperature": (config_of("ar", temperature=0.3), 2.0),
    "top_k": (config_of("ar", temperature=2.0), 2),
    "top_p": (config_of("ar", temperature=2.0), 0.3),
    "stop_ids": (config_of("ar"), (8,)),
    "mask_token_id": (config_of("streaming_eager"), 3),
    "ban_mask": (config_of("streaming_eager", mask_token_id=0, temperature=1.0), False),
    "seed": (config_of("ar", temperature=2.0), 1),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(DecodeConfig) if f.name != "stop"])
def test_every_setting_changes_something(field):
    """`stop` needs a tokenizer and has its tests in test_stream.py."""
    config, value = FIELDS[field]
    changed = dataclasses.replace(config, **{field: value})
    assert outcomes(PROMPTS, config) != outcomes(PROMPTS, changed)


@pytest.mark.parametrize("loop", ["streaming_eager", "verified", "ar"])
def test_a_row_that_has_finished_costs_the_others_none_of_the_context_that_it_holds(loop):
    """Behind the slots that the running row needs the cache is poisoned: to read on, masked or not, would show."""
    model = tiny_model(0, dataclasses.replace(TINY, max_position_embeddings=2048))
    long, short = [3, 1, 4, 1, 5] * 150, [2, 7]
    configs = [config_of(loop, max_new_tokens=1), config_of(loop)]
    prompts = enumerate([long, short])
    requests = [make_request(model, prompt, configs[row], row=row, name="") for row, prompt in prompts]
    batch = Batch(model, requests)
    steps = run_stepwise(batch.program, model.weights, batch.state, batch.settings)
    state = next(state for state, _ in steps if not state.running[0])
    assert state.running[1]
    poisoned = jax.tree.map(lambda x: x.at[:, 1, :, 512:].set(jnp.nan), state.cache)
    with pytest.raises(StopIteration):
        state, _ = steps.send(dataclasses.replace(state, cache=poisoned))
        while True:
            state, _ = next(steps)
    assert batch.ids(state)[1] == generate(model, [short], configs[1])[0].ids
