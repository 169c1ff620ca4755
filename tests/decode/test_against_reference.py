"""The decode loop equals the list-based reference: tokens, finish, forwards and token instances, over random cases.

The reference runs in float64. A row whose closest decision is nearer than `TIE` to a tie may come out either way in float32;
it is not compared, and counted.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wedlm_jax import Completion, DecodeConfig, generate
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.window_table import ON_ACCELERATOR

from ..conftest import FULL, examples
from ..reference.decoding import Row, decode
from .models import LOOPS, MASK, ROWS, TINY, reference_of, tiny_model

TIE = 1e-4
TOKENS = st.integers(0, TINY.vocab_size - 1)
LONG = dataclasses.replace(TINY, max_position_embeddings=512)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn otherwise than for the loops that the tests share."""

    window_size: str | None = None  # None: drawn
    sizes: tuple[int, int] | None = None  # of windows and blocks; None: those of LOOPS
    most_new: int = 14
    prompts: st.SearchStrategy = st.lists(TOKENS, min_size=1, max_size=12)
    model: ModelConfig = TINY
    count: int = 30  # batches of an ordinary run
    discarded: float = 0.05  # share of rows, at most


AUTO = Case(window_size="auto", count=8)  # compiles eight widths
# Two buckets of windows. Of 16 masks, two are more often nearly alike than of 4.
WIDE = Case(sizes=(8, 16), most_new=20, discarded=0.1)
# The cache is read up to slot 288 or as a whole, and a row comes from one to the other while it decodes.
LONG_PROMPTS = Case(
    sizes=(9, 16),
    prompts=st.builds(
        lambda length, seed: np.random.default_rng(seed).integers(0, TINY.vocab_size, length).tolist(),
        st.integers(257, 288), st.integers(0, 999),
    ),
    model=LONG, count=6,
)  # fmt: skip
CASES = {
    **{loop: (loop, Case()) for loop in LOOPS},
    "verified, automatic windows": ("verified", AUTO),
    "streaming_fallback, long prompts": ("streaming_fallback", LONG_PROMPTS),
    **({f"{loop}, wide": (loop, WIDE) for loop in LOOPS if loop != "ar"} if FULL else {}),
}


@st.composite
def requests(draw, loop: str, case: Case = Case()) -> tuple[list[int], DecodeConfig]:
    """A prompt and settings that run in one loop of LOOPS."""
    fields, sizes = LOOPS[loop]
    smallest, largest = case.sizes or sizes
    sampled = draw(st.booleans())
    return draw(case.prompts), DecodeConfig(
        **fields,
        window_size=case.window_size or draw(st.integers(smallest, largest)),
        block_size=draw(st.integers(smallest, largest)),
        # Most of them fill several masks of a model that is sure of little.
        entropy_threshold=draw(st.sampled_from([*4 * [float("inf")], 1.8, 1.4, 1.0, 0.7, 0.3, 0.0, None])),
        distance_penalty=draw(st.sampled_from([0.0, 0.02, 0.1, 0.5])),
        fill_rule=draw(st.sampled_from(["auto", "each", "sum", "run"])),
        text_drafts=loop != "verified" or draw(st.sampled_from([True, True, False])),
        reorder=draw(st.sampled_from([True, True, False])),
        confidence_threshold=draw(st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0])),
        max_new_tokens=draw(st.integers(1, case.most_new)),
        temperature=draw(st.sampled_from([0.3, 0.8, 1.5])) if sampled else 0.0,
        top_k=draw(st.sampled_from([0, 1, 3, 100])),
        top_p=draw(st.sampled_from([0.1, 0.6, 0.9, 1.0])),
        stop_ids=tuple(draw(st.one_of(st.just([]), st.lists(TOKENS, min_size=1, max_size=2)))),
        mask_token_id=draw(st.sampled_from([MASK, MASK, 3])),
        ban_mask=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def batches(draw, loop: str, case: Case = Case()) -> tuple[int, list[list[int]], list[DecodeConfig]]:
    """A weight seed, and a ragged batch of rows that share a loop and nothing else."""
    drawn = [draw(requests(loop, case)) for _ in range(ROWS)]
    return draw(st.integers(0, 2)), [prompt for prompt, _ in drawn], [config for _, config in drawn]


@jax.jit
def _noise(seed, row):
    key = jax.random.fold_in(jax.random.key(seed), row)
    keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(np.arange(2 * LONG.max_position_embeddings))
    return jax.vmap(lambda k: jax.random.gumbel(k, (TINY.vocab_size,), mode="high"))(keys)


def expected(seed: int, prompts: list[list[int]], configs: list[DecodeConfig], of: ModelConfig = TINY) -> list[Row]:
    model = reference_of(tiny_model(seed, of))
    rows = []
    for number, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        noise = np.asarray(_noise(config.seed, number), np.float64)
        rows.append(decode(model, prompt, config, noise.__getitem__))
    return rows


def check_equals_autoregressive(row: Row, ours: Completion) -> None:
    """At any temperature and with any drafts, by the same noise."""
    alone = decode(row.model, row.prompt, dataclasses.replace(row.config, decoder="ar"), row.noise)
    if alone.margin >= TIE:
        assert (ours.ids, ours.finish_reason) == (alone.emitted, alone.finish)


@pytest.mark.parametrize(("loop", "case"), CASES.values(), ids=CASES)
def test_decoding_equals_the_list_based_reference(loop, case):
    compared, discarded, several_a_forward = 0, 0, 0

    @settings(max_examples=examples(case.count, 400))
    @given(batches(loop, case))
    def check(batch):
        nonlocal compared, discarded, several_a_forward
        seed, prompts, configs = batch
        model = dataclasses.replace(tiny_model(seed, case.model))
        model.window_table = ON_ACCELERATOR  # so cheap that automatic windows are as wide as they can be
        completions = generate(model, prompts, configs)
        for row, ours in zip(expected(seed, prompts, configs, case.model), completions, strict=True):
            if row.margin < TIE:
                discarded += 1
                continue
            assert ours.ids == row.emitted
            assert ours.finish_reason == row.finish
            assert ours.stats.forwards == row.forwards
            assert ours.stats.tokens_processed == row.processed
            if row.config.decoder in ("verified", "lookup"):
                check_equals_autoregressive(row, ours)
            compared += 1
            several_a_forward += row.forwards < len(row.emitted)

    check()
    print(f"{loop}: {compared} rows compared, {discarded} discarded, {several_a_forward} with several tokens a forward")
    assert discarded <= case.discarded * (compared + discarded)
    assert several_a_forward > 0.1 * compared or loop == "ar"  # parallel decoding did decode in parallel


def test_a_window_of_one_decodes_as_the_reference():
    config = DecodeConfig(
        window_size=1, entropy_threshold=0.4, refill="paper", max_new_tokens=6, stop_ids=(), mask_token_id=MASK
    )
    row, ours = expected(0, [[1, 2, 3]], [config])[0], generate(tiny_model(0), [[1, 2, 3]], config)[0]
    assert row.margin > TIE
    assert (ours.ids, ours.stats.forwards, ours.stats.tokens_processed) == (row.emitted, row.forwards, row.processed)


def test_the_reference_can_fail():
    """A wrong penalty, threshold, refill or seed gives other tokens: the comparison above sees each of them."""
    base = DecodeConfig(
        window_size=8, max_new_tokens=14, entropy_threshold=1.0, stop_ids=(), mask_token_id=MASK, temperature=0.8
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8]]
    right = expected(1, prompts, [base] * ROWS)
    for change in (
        dict(distance_penalty=0.5),
        dict(entropy_threshold=0.7),
        dict(refill="paper"),
        dict(reorder=False),
        dict(seed=1),
        dict(temperature=1.5),
        dict(top_k=2),
        dict(window_size=7),
    ):
        wrong = expected(1, prompts, [dataclasses.replace(base, **change)] * ROWS)
        assert [(r.emitted, r.processed) for r in wrong] != [(r.emitted, r.processed) for r in right], change
