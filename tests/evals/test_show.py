"""What the terminal shows is what the trace says."""

import io
import re

import pytest
from rich.console import Console

from tests.evals.models import tiny_model
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import generate
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.evals.show import device, results_table
from wedlm_jax.evals.show_texts import coloured_by_step, filling_steps
from wedlm_jax.evals.sweep import Row
from wedlm_jax.sharding import MeshConfig

PROMPT = [5, 6, 7]


def test_what_it_ran_on_counts_the_devices():
    assert re.fullmatch(r"CPU with \d+ cores", device())
    assert re.fullmatch(r"4 x CPU with \d+ cores \(data 2, tensor 2\)", device(MeshConfig(data=2, tensor=2)))


def entry(emitted, masks, filled):
    return {
        "emitted": emitted, "mask_positions": masks, "filled_positions": list(filled), "filled_tokens": list(filled.values())
    }  # fmt: skip


def completed(ids, trace):
    return Completion(ids, "length", Stats(len(ids), len(trace), 9), trace=trace)


def test_a_streamed_token_has_the_step_that_filled_it():
    trace = [entry(0, [3, 4, 5], {4: 11}), entry(0, [3, 5], {3: 10, 5: 12}), entry(3, [], {})]
    assert filling_steps(completed([10, 11, 12], trace), len(PROMPT)) == [2, 1, 2]


def test_an_accepted_draft_has_its_own_step_and_the_ar_token_the_step_that_emitted_it():
    trace = [entry(1, [3, 4, 5], {4: 11, 5: 99}), entry(2, [], {})]
    # Forward 1 emits its AR token and drafts 11, 99; forward 2 accepts 11 and puts its AR token in the place of 99.
    assert filling_steps(completed([10, 11, 12], trace), len(PROMPT)) == [1, 1, 2]


def test_a_draft_that_was_masked_again_does_not_count_even_if_the_token_returns():
    trace = [entry(1, [3, 4, 5], {4: 98, 5: 12}), entry(1, [], {}), entry(1, [5], {})]
    assert filling_steps(completed([10, 11, 12], trace), len(PROMPT)) == [1, 2, 3]


def test_tokens_that_a_stop_string_cut_off_have_no_step():
    trace = [entry(1, [3, 4, 5], {4: 11, 5: 12}), entry(3, [], {})]  # the second forward emits three and one is kept
    assert filling_steps(completed([10, 11], trace), len(PROMPT)) == [1, 1]


@pytest.mark.parametrize("decoder", ["ar", "verified", "streaming", "blockwise"])
def test_every_token_of_a_real_trace_has_a_step_of_the_decode(decoder):
    config = DecodeConfig(decoder=decoder, window_size=4, block_size=4, entropy_threshold=5.0, max_new_tokens=10)
    (completion,) = generate(tiny_model(), [PROMPT], config, trace=True)
    steps = filling_steps(completion, len(PROMPT))
    assert len(steps) == len(completion.ids)
    assert all(1 <= step <= completion.stats.forwards for step in steps)
    if decoder == "ar":
        assert steps == list(range(1, len(steps) + 1))


def test_without_colour_the_steps_are_numbers_and_with_colour_the_text_is_untouched():
    pieces, steps = [" a", " b", " c"], [2, 2, 1]
    assert coloured_by_step(pieces, steps, colour=False).plain.startswith("2[ a b]1[ c]\n")
    coloured = coloured_by_step(pieces, steps, colour=True)
    assert coloured.plain.startswith(" a b c\n")
    assert len({str(span.style) for span in coloured.spans}) == 2
    assert "1" in coloured.plain.splitlines()[1] and "2" in coloured.plain.splitlines()[1]


def row(**changes):
    values = dict(
        task="counting", label="verified", weights="adapted",
        settings={"decoder": "verified", "entropy_threshold": 0.4, "window_size": 16},
        n=40, batch_size=1, correct=36, accuracy=0.9, low=0.77, high=0.96, generated_tokens=400, tokens_per_forward=4.25,
        p_cache=0.21, tokens_per_second=812.0, speedup_over_ar=1.5, equal_to_ar=40, unfinished=0,
    )  # fmt: skip
    return Row(**(values | changes))


def test_the_table_says_every_number_and_what_p_cache_can_be():
    console = Console(file=io.StringIO(), width=80)
    text_row = row(task="text", accuracy=None, low=None, high=None, equal_to_ar=None)
    wide = row(n=200, accuracy=1.0, low=0.98, high=1.0, equal_to_ar=200, tokens_per_second=12345.0)
    console.print(results_table([row(), row(label="streaming, tau=0.25", equal_to_ar=17), text_row, wide], "title"))
    text = " ".join(console.file.getvalue().split())
    numbers = ("90 (77-96)", "4.25", "0.21", "812", "1.50x", "40/40", "17/40", "100 (98-100)", "12345", "200/200")
    for shown in (
        "counting n = 40",
        *numbers,
        "stays at or below 0.5, but for the AR tokens of verify=fallback",
        "block-wise may pass it",
    ):
        assert shown in text
    assert "None" not in text
