"""window_size="auto": the window follows what is accepted and what a slot costs all rows, and the tokens do not notice."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from wedlm_jax import DecodeConfig, Engine, generate
from wedlm_jax.decode import generation
from wedlm_jax.decode.auto_window import next_window, window_in_play
from wedlm_jax.decode.first_drafts import masks_in_prefill, riding_masks
from wedlm_jax.decode.generation import Batch, make_request, row_bucket
from wedlm_jax.decode.verified import widths
from wedlm_jax.engine import rows as engine_rows
from wedlm_jax.model.window_table import AUTO_WINDOWS, ON_ACCELERATOR, ON_CPU, ON_CPU_FROM_CACHE, WindowTable
from wedlm_jax.sharding import MeshConfig, make_mesh

from ..conftest import FULL
from .models import LOOPS, MASK, TINY, config_of, reciting_model, tiny_model
from .test_precision_and_mesh import cut_over

PROMPTS = [[1, 2, 3], [4, 9, 0, 2, 7, 7, 1, 5], [6]]


@pytest.mark.parametrize(
    ("window", "lead", "accepted", "then"),
    [
        (16, 9, 8, 32),
        (16, 9, 7, 16),
        (16, 9, 2, 16),
        (16, 9, 1, 8),
        (16, 2, 1, 8),
        (16, 1, 1, 16),
        (4, 2, 1, 4),
        (4, 2, 2, 8),
        (8, 2, 1, 4),
        (32, 32, 32, 32),
        (32, 9, 1, 16),
        (32, 1, 1, 32),
    ],
)
def test_the_window_doubles_at_half_accepted_and_halves_where_no_draft_was_right(window, lead, accepted, then):
    assert next_window(*(jnp.array([x]) for x in (window, lead, accepted))).tolist() == [then]


def batch_of(rows: int, window_table: WindowTable, **fields) -> Batch:
    model = dataclasses.replace(tiny_model())
    model.window_table = window_table
    config = config_of("verified", **{"window_size": "auto", **fields})
    return Batch(model, [make_request(model, [1], config, row=row, name="prompt") for row in range(rows)])


@pytest.mark.parametrize(("rows", "widest"), [(1, 32), (3, 32), (4, 16), (19, 16), (20, 8), (158, 8), (159, 4)])
def test_the_more_rows_the_narrower_is_the_window(rows, widest):
    assert ON_ACCELERATOR.widest(rows) == widest


@pytest.mark.parametrize("running", [1, 64])
def test_rows_that_have_finished_narrow_it_as_well_because_a_forward_computes_them(running):
    batch = batch_of(64, ON_ACCELERATOR)
    state = dataclasses.replace(batch.state, finish=jnp.where(jnp.arange(64) < running, 0, 1))
    assert window_in_play(state, batch.settings).tolist() == [8] * 64


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (tests/conftest.py asks for them)")
@pytest.mark.parametrize(("rows", "computed"), [(4, 1), (20, 5), (6, 6)])
def test_over_a_mesh_it_goes_by_the_rows_that_a_device_computes(monkeypatch, rows, computed):
    """By all of them where they cannot be cut evenly: every device then computes all."""
    model = cut_over(tiny_model(), make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4]))
    model.window_table = ON_ACCELERATOR
    assert row_bucket(1, model.mesh) == 4
    for module, opening in ((generation, "start"), (engine_rows, "open_rows")):
        monkeypatch.setattr(module, opening, lambda *args, **sizes: None)
    request = make_request(model, [1], config_of("verified", window_size="auto"), row=0, name="prompt")
    group = engine_rows.RowGroup(model, request.config, rows, context=32)
    expected = [ON_ACCELERATOR.widest(computed)] * rows
    assert Batch(model, [request] * rows).settings.window_size.tolist() == expected
    assert group._settings.window_size.tolist() == expected


@pytest.mark.parametrize(
    ("window", "window_table", "rows", "masks"),
    [
        ("auto", ON_ACCELERATOR, 1, 31),
        ("auto", ON_ACCELERATOR, 17, 15),
        ("auto", ON_CPU, 1, 7),
        ("auto", ON_CPU, 17, 3),
        ("auto", ON_CPU_FROM_CACHE, 3, 3),
        (5, ON_CPU, 1, 4),
        (8, ON_CPU, 9, 7),
        (1, ON_CPU, 2, 0),
    ],
)
def test_prefill_drafts_from_the_masks_of_the_window_that_a_row_starts_with_and_counts_as_many(
    window, window_table, rows, masks
):
    batch = batch_of(rows, window_table, window_size=window, entropy_threshold=float("inf"))
    config = batch.requests[0].config
    assert (
        masks_in_prefill(config, rows, window_table)
        == masks
        <= riding_masks(config.drafter, config.slots(window_table))
    )
    assert batch.state.processed.tolist() == [masks] * rows
    assert batch.state.filled.sum(axis=1).tolist() == [1 + masks] * rows  # all of them, and the pending token
    assert masks_in_prefill(config_of("lookup"), rows, window_table) == 0


@pytest.mark.parametrize("window_table", [ON_ACCELERATOR, ON_CPU, ON_CPU_FROM_CACHE, WindowTable.linear(1.0)])
def test_nothing_is_compiled_for_windows_that_a_model_is_too_dear_for(window_table):
    auto = DecodeConfig("verified", window_size="auto")
    widest = window_table.widest(1)
    assert auto.slots(window_table) == 2 * widest == batch_of(1, window_table).state.window.shape[1]
    for rows in (2, 8, 64):
        assert window_table.widest(rows) <= widest
    fixed = DecodeConfig("verified", window_size=widest)
    assert fixed.slots(window_table) == auto.slots(window_table) and fixed.program(window_table) != auto.program(
        window_table
    )
    assert set(widths(2 * widest, 1, window_table, adapts=False)) <= set(
        widths(2 * widest, 1, window_table, adapts=True)
    )


def test_windows_of_a_trace_follow_the_rule():
    """Drafts that are all right widen the window to the end of the ladder, those that are all wrong narrow it."""
    chain = list(range(1, 10)) * 10
    for wrong, reached in ((0.0, AUTO_WINDOWS[-1]), (1.0, AUTO_WINDOWS[0])):
        drafts = [0 if wrong else token for token in chain]
        model = reciting_model(chain, drafts=drafts, vocab_size=TINY.vocab_size, mask_token_id=MASK)
        model.window_table = ON_ACCELERATOR
        settings = dict(window_size="auto", entropy_threshold=float("inf"), text_drafts=False)
        config = config_of("verified", **settings, max_new_tokens=len(chain))
        [completion] = generate(model, [[0]], config, trace=True)
        assert completion.ids == chain
        assert len(completion.trace[0]["window"]) == 2 * AUTO_WINDOWS[-1]  # all drafted in prefill
        fed = [len(entry["window"]) for entry in completion.trace]
        assert reached <= fed[-1] <= 2 * reached, fed


# What is drawn is compared with AR in test_against_reference, too.
@pytest.mark.parametrize(
    "sampling", [{}, *([{"temperature": 0.8}, {"temperature": 1.2, "top_k": 3}] if FULL else [])], ids=str
)
def test_tokens_are_those_of_ar_and_of_any_window(sampling):
    auto = generate(tiny_model(), PROMPTS, config_of("verified", window_size="auto", **sampling))
    alone = generate(tiny_model(), PROMPTS, config_of("ar", **sampling))
    assert [(c.ids, c.finish_reason) for c in auto] == [(c.ids, c.finish_reason) for c in alone]


def test_a_fixed_window_does_not_move():
    fixed, auto = DecodeConfig("verified", window_size=16), DecodeConfig("verified", window_size="auto")
    assert not fixed.adapts and auto.adapts


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "verified"] if FULL else ["blockwise", "lookup"])
def test_for_other_decoders_it_is_sixteen(loop):
    """A service may have it as its default, and a request another decoder."""
    automatic, fixed = (config_of(loop, window_size=window, max_new_tokens=4) for window in ("auto", 16))
    expected = generate(tiny_model(), PROMPTS, fixed)
    assert generate(tiny_model(), PROMPTS, automatic) == expected
    served = Engine(tiny_model(), rows=3, context=32)
    assert served.submit(PROMPTS[0], automatic).result().ids == expected[0].ids
