"""Decoders compared on the same prompts: exact lengths, warm calls, medians, ratios of totals."""

import dataclasses
import itertools
import math

import jax
import pytest

from tests.data.tiny import with_bos
from tests.decode.test_precision_and_mesh import cut_over
from tests.evals.models import tiny_model
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.tokenizer import encode_with_control_tokens
from wedlm_jax.decode import generation
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.errors import UserError
from wedlm_jax.evals.roofline import Rates, forward_seconds
from wedlm_jax.evals.speed import Work, compare, longest_prompt, own_length, prompts_of
from wedlm_jax.sharding import MeshConfig, make_mesh

PROBLEMS = [Problem("echo", f"Question {i}: what? ", f"Answer {i}.", str(i)) for i in range(6)]
WORK = Work("echo", batch=2, prompt_tokens=24, output_tokens=8)
AR, FAST = DecodeConfig(decoder="ar"), DecodeConfig(decoder="verified", window_size=5)


@pytest.mark.parametrize("tokens", [1, 5, 24, 60])
def test_every_prompt_has_exactly_the_length_asked_for_and_ends_in_a_problem_of_its_own(tokens):
    model = tiny_model()
    prompts = prompts_of(model, PROBLEMS, Work("echo", 3, tokens, 8))
    assert [len(prompt) for prompt in prompts] == [tokens] * 3
    if tokens >= 24:
        for i, prompt in enumerate(prompts):
            text = model.tokenizer.decode(prompt)
            assert text.endswith(PROBLEMS[i].prompt) and f"Answer {i}" not in text


def test_prompts_begin_as_their_tokenizer_begins_texts_whatever_is_cut_off():
    tokenizer = with_bos()
    model = dataclasses.replace(tiny_model(), tokenizer=tokenizer)
    for tokens in (1, 5, 60):
        for prompt in prompts_of(model, PROBLEMS, Work("echo", 3, tokens, 8)):
            assert len(prompt) == tokens and prompt[0] == tokenizer.bos_token_id not in prompt[1:]
    longest = longest_prompt(model, PROBLEMS)
    assert {len(ids) for ids in prompts_of(model, PROBLEMS, Work("echo", 6, longest, 8))} == {longest}
    length = own_length(model, PROBLEMS)
    assert prompts_of(model, PROBLEMS, Work("echo", 1, length, 8, alone=True)) == [
        encode_prompt(model, PROBLEMS[0].prompt)
    ]


def test_a_prompt_longer_than_all_problems_is_refused_with_what_to_lower():
    with pytest.raises(UserError, match="make .* tokens, and prompts of 100000 are wanted; lower --prompts"):
        prompts_of(tiny_model(), PROBLEMS, Work("echo", 1, 100_000, 8))


def test_the_longest_prompt_is_the_one_that_every_row_can_have():
    model = tiny_model()
    problems = [*PROBLEMS, Problem("echo", "Short? ", "A solution that is longer than those of the others.", "")]
    longest = longest_prompt(model, problems)
    assert [len(ids) for ids in prompts_of(model, problems, Work("echo", 7, longest, 8))] == [longest] * 7
    with pytest.raises(UserError):
        prompts_of(model, problems, Work("echo", 7, longest + 1, 8))


def test_a_prompt_may_be_one_problem_alone_of_the_commonest_length():
    problems = [*PROBLEMS, Problem("echo", "Quite another question, and a longer one? ", "Yes.", "")]
    model = tiny_model()
    length = own_length(model, problems)
    prompts = prompts_of(model, problems, Work("echo", 8, length, 8, alone=True))
    own = [encode_with_control_tokens(model.tokenizer, problem.prompt) for problem in problems]
    lengths = [len(ids) for ids in own]
    assert lengths.count(length) == max(lengths.count(n) for n in lengths)
    assert prompts == list(itertools.islice(itertools.cycle(ids for ids in own if len(ids) == length), 8))


class FakeGenerate:
    """AR takes 8 s for 8 tokens in 8 forwards, the other 2 s in 4, and of its 16 slots 4 are masks in prefill; the first token
    1 s each, and compilation 100 s."""

    def __init__(self, monkeypatch):
        self.met: set[tuple] = set()
        self.now = 0.0
        monkeypatch.setattr("wedlm_jax.evals.speed.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("wedlm_jax.evals.speed.generate_rows", self)

    def __call__(self, model, prompts, config):
        call = config.decoder, config.max_new_tokens
        self.now += 0.0 if call in self.met else 100.0
        self.met.add(call)
        if config.max_new_tokens == 1:
            self.now += 1.0
            return [Completion([7], "length", Stats(1, 1, 1)) for _ in prompts]
        self.now += 8.0 if config.decoder == "ar" else 2.0
        forwards = 8 if config.decoder == "ar" else 4
        ids = list(range(8)) if config.decoder == "ar" else [*range(7), 99]
        return [
            Completion(list(range(8)) if row == 0 else ids, "length", Stats(8, forwards, 8 if forwards == 8 else 16))
            for row, _ in enumerate(prompts)
        ]


def test_times_are_of_warm_calls_and_ratios_of_totals(monkeypatch):
    FakeGenerate(monkeypatch)
    ar, fast = compare(tiny_model(), WORK, PROBLEMS, [AR, FAST], Rates(1e9, 1e9), repeats=3)
    assert (ar.seconds, fast.seconds) == (8.0, 2.0)
    assert (ar.first_token_seconds, fast.first_token_seconds) == (1.0, 1.0)
    assert (ar.tokens_per_second, fast.tokens_per_second) == (2.0, 8.0)
    assert (ar.speedup_over_ar, fast.speedup_over_ar) == (1.0, 4.0)
    assert (ar.tokens_per_forward, fast.tokens_per_forward) == (1.0, 2.0)
    assert (ar.p_cache, fast.p_cache) == (1.0, 0.5)
    assert (ar.forward_milliseconds, fast.forward_milliseconds) == pytest.approx((1000.0, 1000 / 3))
    assert (ar.equal_to_ar, fast.equal_to_ar) == (2, 1)
    by_rates = [
        forward_seconds(tiny_model().config, Rates(1e9, 1e9), rows=2, slots=n, read=n, context=28) for n in (1, 3)
    ]
    assert [1e-3 * x.roofline_milliseconds for x in (ar, fast)] == pytest.approx(by_rates)
    assert 0 < ar.roofline_milliseconds < fast.roofline_milliseconds  # three times as many slots are fed


def test_over_a_mesh_every_part_of_a_batch_reads_all_weights_which_the_tensor_axis_alone_shares(monkeypatch):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices (tests/conftest.py asks for them)")
    FakeGenerate(monkeypatch)
    model, reading = tiny_model(), Rates(1e30, 1e9)
    shared = cut_over(model, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8]))
    for batch, of_a_part in ((1, 1), (8, 2)):
        (ar,) = compare(shared, dataclasses.replace(WORK, batch=batch), PROBLEMS, [AR], reading, repeats=1)
        least = forward_seconds(model.config, reading, rows=of_a_part, slots=1, read=1, context=28)
        assert 1e-3 * ar.roofline_milliseconds == pytest.approx(least / 2)


@pytest.mark.parametrize(
    "config", [DecodeConfig(window_size=2), DecodeConfig("blockwise", block_size=2)], ids=lambda c: c.decoder
)
def test_of_what_streaming_and_blockwise_feed_no_more_than_a_window_or_a_block_is_read(monkeypatch, config):
    FakeGenerate(monkeypatch)
    rates = Rates(1e9, 1e30)
    _, ours = compare(tiny_model(), WORK, PROBLEMS, [AR, config], rates, repeats=1)
    least = forward_seconds(tiny_model().config, rates, rows=2, slots=4, read=2, context=28)
    assert 1e-3 * ours.roofline_milliseconds == pytest.approx(least)


def test_a_speed_of_a_real_model_is_of_the_tokens_that_it_decodes():
    ar, fast = compare(tiny_model(), WORK, PROBLEMS, [AR, FAST], Rates(1e9, 1e9), repeats=1)
    assert ar.equal_to_ar == fast.equal_to_ar == 2  # verified decoding is exact
    assert ar.tokens_per_forward == ar.p_cache == 1 and ar.generated_tokens == fast.generated_tokens
    assert ar.seconds > 0 and not math.isinf(ar.tokens_per_second)


def test_what_is_timed_is_a_batch_of_exactly_the_rows_asked_for(monkeypatch):
    seen, batch = set(), generation.Batch
    monkeypatch.setattr(generation, "Batch", lambda *args: seen.add(len(args[1])) or batch(*args))
    compare(tiny_model(), Work("echo", 5, 24, 2), PROBLEMS, [AR], Rates(1e9, 1e9), repeats=1)
    assert seen == {5}


def test_the_first_token_of_a_block_is_there_when_the_block_is(monkeypatch):
    """A block that max_new_tokens cuts to one token would be there at once."""
    asked = []

    def generate(model, prompts, config):
        asked.append((config.decoder, config.max_new_tokens))
        return [Completion([7], "length", Stats(1, 1, 1)) for _ in prompts]

    monkeypatch.setattr("wedlm_jax.evals.speed.generate_rows", generate)
    for size in (4, 32):
        asked.clear()
        configs = [AR, DecodeConfig(decoder="blockwise", block_size=size)]
        compare(tiny_model(), WORK, PROBLEMS, configs, Rates(1e9, 1e9), repeats=1)
        soonest = min(size, WORK.output_tokens)
        assert set(asked) == {
            ("ar", 1),
            ("ar", WORK.output_tokens),
            ("blockwise", soonest),
            ("blockwise", WORK.output_tokens),
        }
