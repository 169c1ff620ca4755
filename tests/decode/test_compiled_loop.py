"""The decode loop is one compiled program a shape: settings are data, and nothing in it reaches for the host."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax import DecodeConfig, generate
from wedlm_jax.decode import batches, generation, window
from wedlm_jax.decode import loop as decode_loop
from wedlm_jax.decode.batches import in_batches
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.generation import SMALLEST_BUCKET, make_request, row_bucket
from wedlm_jax.decode.state import FULL, RUNNING, STOPPED
from wedlm_jax.decode.verified import widths as verified_widths
from wedlm_jax.decode.window import feeding_widths
from wedlm_jax.engine import programs
from wedlm_jax.model.window_table import ON_ACCELERATOR, ON_CPU, ON_CPU_FROM_CACHE, WindowTable
from wedlm_jax.sharding import MeshConfig, make_mesh

from ..quick_jit import quick_jit
from .models import LOOPS, MASK, ROWS, TINY, config_of, reciting_model, start_sizes, tiny_model
from .test_precision_and_mesh import EVEN, cut_over

PROMPTS = [[1, 2, 3], [4, 5], [6]]
HOST = re.compile(r"callback|infeed|outfeed|\bsend\b|\brecv\b|host_transfer|host_compute", re.IGNORECASE)

# Every setting that is traced, changed within the bucket of LOOPS.
CHANGES = [
    dict(entropy_threshold=0.2),
    dict(entropy_threshold=None),
    dict(entropy_threshold=float("inf")),
    dict(distance_penalty=0.3),
    dict(fill_rule="sum"),
    dict(confidence_threshold=0.0),
    dict(confidence_threshold=0.9),
    dict(window_size=3),
    dict(block_size=3),
    dict(max_new_tokens=16),
    dict(max_new_tokens=1),
    dict(temperature=0.8, top_k=3, top_p=0.7, seed=7),
    dict(stop_ids=(1, 2, 3)),
    dict(stop_ids=(8,)),
    dict(mask_token_id=4),
    dict(text_drafts=False),
    dict(ban_mask=False),
]


def compiled() -> tuple[int, int]:
    return decode_loop.run._cache_size(), decode_loop.start._cache_size()


@pytest.mark.parametrize("name", LOOPS)
def test_changing_settings_prompts_or_weights_compiles_nothing(name):
    generate(tiny_model(), PROMPTS, config_of(name))
    generate(tiny_model(), PROMPTS, config_of(name, temperature=0.5))  # whether anything is drawn is compiled in
    before = compiled()
    for change in CHANGES:
        generate(tiny_model(), PROMPTS, config_of(name, **change))
    generate(tiny_model(1), [[3] * 16, [2] * 7, [1]], config_of(name))
    assert compiled() == before


def test_another_shape_is_another_program():
    """So the counts above can move."""
    model = reciting_model([1, 2], vocab_size=7, mask_token_id=6)
    before = compiled()
    for limit in (1, 1 + SMALLEST_BUCKET, 1 + 2 * SMALLEST_BUCKET):
        generate(model, [[0]], config_of("ar", max_new_tokens=limit))
    assert [now - then for now, then in zip(compiled(), before, strict=True)] == [3, 3]


def test_another_number_of_prompts_compiles_nothing_and_rows_that_fill_up_show_nowhere(caplog):
    config = config_of("verified", temperature=0.7, stop_ids=(5,))
    prompts = [[1 + i % 5] * (1 + i) for i in range(6)]
    five = generate(tiny_model(), prompts[:5], config)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        six = generate(tiny_model(), prompts, config)
    assert not [r.message for r in caplog.records if "Compiling" in r.message]
    assert len(five) == 5 and six[:5] == five
    by_steps = generate(tiny_model(), prompts[:5], config, trace=True)
    assert [dataclasses.replace(c, trace=None) for c in by_steps] == five
    assert [len(c.trace) for c in by_steps] == [c.stats.forwards for c in five]


def test_rows_fall_into_buckets_and_over_a_mesh_every_part_of_it_has_as_many():
    """Rounding adds less than half."""
    assert [row_bucket(n) for n in range(1, 18)] == [1, 2, 3, 4, 6, 6, 8, 8, *[12] * 4, *[16] * 4, 24]
    assert all(n <= row_bucket(n) < 1.5 * n for n in range(1, 999))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    assert [row_bucket(n, mesh) for n in (1, 4, 5, 8, 20)] == [4, 4, 8, 8, 24]


@pytest.mark.parametrize("number, batch_size, rows", [(7, 3, [3] * 3), (7, 6, [4] * 2), (5, 16, [6])])
def test_batches_of_a_file_have_one_shape_whatever_its_number_and_fill_up_without_a_trace(
    monkeypatch, number, batch_size, rows
):
    config, model, seen = config_of("verified", temperature=0.7), tiny_model(), []
    prompts = [[1 + i % 5] * (1 + i) for i in range(number)]
    requests = [make_request(model, prompt, config, row=row, name="") for row, prompt in enumerate(prompts)]
    expected, batch = generate(model, prompts, config), generation.Batch
    monkeypatch.setattr(generation, "Batch", lambda *args: seen.append(len(args[1])) or batch(*args))
    assert list(in_batches(model, requests, batch_size=batch_size)) == expected
    assert seen == rows


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cache_holds_no_more_than_the_context_of_the_model_and_the_window(loop):
    """Prompt and output are rounded up on their own, here to 128 and 16 tokens."""
    config = config_of(loop, max_new_tokens=9)
    prompts = [[1 + i % 5 for i in range(length)] for length in (71, 80 - 9, 3)]
    small, large = (tiny_model(0, dataclasses.replace(TINY, max_position_embeddings=n)) for n in (80, 4096))
    requests = [make_request(small, prompt, config, row=row, name="") for row, prompt in enumerate(prompts)]
    slots = generation.Batch(small, requests).state.cache.k.shape[-2]
    assert slots <= 80 + config.slots(small.window_table) + 15
    assert generate(small, prompts, config) == generate(large, prompts, config)


def test_over_a_mesh_a_batch_of_a_file_has_rows_for_every_part(monkeypatch):
    """Of other numbers each device would compute all."""
    seen = []
    monkeypatch.setattr(batches, "decode_batch", lambda model, requests, trace, rows: seen.append(rows) or requests)
    model = cut_over(tiny_model(0, EVEN), make_mesh(MeshConfig(data=3), jax.devices()[:3]))
    for batch_size, rows in ((16, 15), (3, 3), (2, 2)):
        assert list(in_batches(model, range(40), batch_size=batch_size)) == list(range(40))
        assert seen.pop() == rows


def test_no_batch_of_a_file_has_more_rows_than_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr(batches, "decode_batch", lambda model, requests, trace, rows: seen.append(rows) or requests)
    for batch_size in range(1, 18):
        assert list(in_batches(tiny_model(), range(17), batch_size=batch_size)) == list(range(17))
        assert max(seen) <= batch_size


def test_greedy_rows_alone_make_a_program_without_draws_and_draw_nothing_beside_others():
    greedy, drawn = config_of("verified"), config_of("verified", temperature=2.0, seed=1)
    texts = [
        decode_loop.run.lower(*arguments("verified", temperature=temperature)).as_text() for temperature in (0.0, 0.5)
    ]
    assert ["threefry" in text for text in texts] == [False, True]
    alone = generate(tiny_model(), PROMPTS, greedy)
    mixed = generate(tiny_model(), PROMPTS * 2, [greedy] * 3 + [drawn] * 3)
    assert mixed[:3] == alone
    assert mixed[3:] != alone


def test_a_second_call_compiles_nothing_at_all(caplog):
    """Not even one of the small programs around the loop."""
    config = config_of("streaming_eager", temperature=0.5)
    generate(tiny_model(), PROMPTS, config)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        generate(tiny_model(), [[7, 7], [1], [2]], dataclasses.replace(config, seed=3, stop_ids=(5,)))
        assert not [r.message for r in caplog.records if "Compiling" in r.message]
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
        assert [r.message for r in caplog.records if "Compiling" in r.message]


@functools.cache
def arguments(name: str, window_size: int = 4, temperature: float = 0.5) -> tuple:
    chosen = dict(temperature=temperature, window_size=window_size)
    config = dataclasses.replace(config_of(name, **chosen), mask_token_id=MASK)
    weights = tiny_model().weights
    prompt, lengths = jnp.ones((3, SMALLEST_BUCKET), jnp.int32), jnp.asarray([1, 2, 3], jnp.int32)
    settings = RowSettings.from_configs([config] * 3, range(3), tiny_model().window_table)
    state = decode_loop.start(weights, prompt, lengths, settings, **start_sizes(config))
    return decode_loop.Program.of(config), weights, state, settings


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_has_no_way_to_the_host(name):
    positional = arguments(name)
    text = decode_loop.run.lower(*positional).as_text()
    assert "stablehlo.while" in text
    assert not HOST.findall(text)


def test_the_compiled_program_has_no_way_to_the_host():
    positional = arguments("streaming_eager")
    text = decode_loop.run.lower(*positional).compile().as_text()
    assert " while(" in text
    assert not HOST.findall(text)


def test_a_callback_would_be_seen():
    """The search above finds what it looks for."""

    def talks(x):
        jax.debug.callback(print, x)
        return x

    assert HOST.search(jax.jit(talks).lower(1.0).as_text())


HALTED = np.zeros(ROWS, bool)


@pytest.mark.parametrize(
    ("program", "more"),
    [(decode_loop.run, {}), (decode_loop.run_step, {}), (decode_loop.run_steps, {"halted": HALTED, "steps": 4})],
)
def test_the_state_is_given_up_to_the_loop(program, more):
    """The cache is updated in place: its buffers are donated, not copied."""
    positional = arguments("streaming_eager")
    text = program.lower(*positional, **more).as_text()
    assert donated(text) >= len(jax.tree.leaves(positional[2]))


def test_the_engine_gives_up_the_caches_that_it_prefills_and_fills_rows_of():
    _, weights, state, settings = arguments("verified")
    lengths = jnp.asarray([1, 2, 3], jnp.int32)
    sizes = dict(chunk=SMALLEST_BUCKET, masks=0)
    prefilled = programs.prefill_behind.lower(
        weights, state.cache, state.prompt, 0 * lengths, lengths, settings, **sizes
    )
    assert donated(prefilled.as_text()) == len(jax.tree.leaves(state.cache))
    filled = programs.fill_rows.lower(
        weights, state, settings, jnp.arange(ROWS), state.cache, state.prompt, lengths, settings, None,
        holds_back=True, drafter=None,
    )  # fmt: skip
    assert donated(filled.as_text()) == len(jax.tree.leaves((state, settings)))


def donated(text: str) -> int:
    """Arguments of a lowered program whose memory it may write its results to."""
    return text.count("tf.aliasing_output") + text.count("jax.buffer_donor")


def copies_of(shape: tuple[int, ...], text: str) -> list[str]:
    return re.findall(rf"f32\[{','.join(map(str, shape))}\]\S* copy\(.*", text)


def test_a_step_writes_the_cache_in_place_at_every_width():
    """No copy of the cache in the compiled loop, though the step chooses between several widths."""
    positional = arguments("verified", window_size=8)
    assert len(verified_widths(positional[2].window.shape[1], ROWS, tiny_model().window_table, adapts=False)) >= 3
    text = decode_loop.run.lower(*positional).compile().as_text()
    shape = positional[2].cache.k.shape
    assert text.count(f"f32[{','.join(map(str, shape))}]") > 10
    assert copies_of(shape, text) == []


def test_what_a_width_needs_is_computed_only_where_that_width_is_chosen():
    """XLA would lift it out of the loops that stand for the choice, and compute it for all widths in every step."""
    text = decode_loop.run.lower(*arguments("verified", window_size=8)).compile().as_text()
    [step] = [
        part for part in text.split("\n\n") if re.search(r' while\(.*op_name="jit\(run\)/while/body/while"', part)
    ]
    computed = [line for line in step.splitlines() if " fusion(" in line]
    assert len(computed) > 10
    assert [line for line in computed if "while/body/while/body" in line] == []


def test_a_copied_cache_would_be_seen():
    """What is written and is wanted as it was, too, has to be copied."""
    shape = (2, 3, 5)
    text = jax.jit(lambda x: (x.at[0].set(1.0), x)).lower(jnp.ones(shape)).compile().as_text()
    assert copies_of(shape, text)


@pytest.mark.parametrize("name", ["verified", "streaming_eager"])
def test_the_forward_is_as_wide_as_what_is_fed(name):
    """The same window by several widths: a program for each, the least for the window and one slot that is committed, which is
    what a hard text asks for in every step, and the whole window at last."""
    widths = feeding_widths(16, ROWS, tiny_model().window_table, 8 + 1)
    assert widths[0] > 8 and widths[-1] == 16 and len(widths) >= 3
    text = decode_loop.run.lower(*arguments(name, window_size=8)).as_text()
    compiled = {width for width in range(1, 17) if f"tensor<3x{width}x{TINY.intermediate_size}xf32>" in text}
    assert compiled == set(widths)


def test_a_row_that_has_finished_does_not_widen_the_forward(monkeypatch):
    chosen: list[jax.Array] = []
    monkeypatch.setattr(
        window, "_switch_in_place", lambda number, branches, inputs, carry: chosen.append(number) or carry
    )
    _, _, state, settings = arguments("verified", window_size=8)

    @quick_jit
    def width(state, settings, finish):
        """The number of the one that is chosen; none is run."""
        state, fed = dataclasses.replace(state, finish=finish), jnp.array([2, 16, 9])
        window.window_forward(None, state, settings, fed, jnp.zeros((3, 16), bool), widths=(4, 9, 16), most_read=16)
        return chosen.pop()

    finished = [[STOPPED] * 3, [RUNNING, STOPPED, FULL], [RUNNING, STOPPED, RUNNING], [RUNNING] * 3]
    assert [int(width(state, settings, jnp.array(finish))) for finish in finished] == [0, 0, 1, 2]


# As products by tiles of 16 rows cost, measured.
IN_STEPS = WindowTable(((1, 1.0), (16, 1.5), (17, 2.5), (32, 2.5), (33, 4.0), (64, 4.0)))


@pytest.mark.parametrize("table", [ON_CPU, ON_CPU_FROM_CACHE, ON_ACCELERATOR, IN_STEPS])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("slots", "least"), [(2, 1), (8, 5), (16, 8), (16, 9), (32, 16), (32, 17), (64, 33), (64, 5)])
def test_rounding_up_to_a_width_costs_little_or_one_step(slots, least, rows, table):
    widths = feeding_widths(slots, rows, table, least)
    lowest = max(least, min(window.SMALLEST_WIDTH, slots))
    assert widths[-1] == slots and list(widths) == sorted(set(widths)) and len(widths) <= 8
    for fed in range(lowest, slots + 1):
        width = next(width for width in widths if width >= fed)
        cost = table.cost(rows * width) / table.cost(rows * fed)
        assert cost <= 1 + window.ROUNDING or width - fed < slots // 8


def test_where_slots_cost_nothing_one_width_is_compiled():
    assert feeding_widths(32, 1, ON_ACCELERATOR, 17) == (32,) and len(feeding_widths(32, 64, ON_ACCELERATOR, 17)) > 2
    assert feeding_widths(32, 1, IN_STEPS, 17) == (32,)  # all of them lie on one step


@pytest.mark.parametrize("decoder", ["streaming", "verified", "lookup", "blockwise", "ar"])
def test_the_refill_rule_parts_requests_of_streaming_alone(decoder):
    configs = [DecodeConfig(decoder, refill=refill) for refill in ("eager", "paper")]
    kinds = {(config.program(ON_CPU), decode_loop.Program.of(config)) for config in configs}
    assert len(kinds) == (2 if decoder == "streaming" else 1)


def test_sizes_fall_into_buckets():
    assert [DecodeConfig(window_size=w).slots(ON_CPU) for w in (1, 2, 3, 4, 5, 16, 17)] == [2, 4, 8, 8, 16, 32, 64]
    assert [DecodeConfig(window_size=w, refill="paper").slots(ON_CPU) for w in (1, 3, 16)] == [1, 4, 16]
    for decoder, slots in (("streaming", 32), ("lookup", 16), ("ar", 1)):
        assert DecodeConfig(decoder, window_size="auto").slots(ON_CPU) == slots
    assert DecodeConfig(decoder="blockwise", block_size=5).slots(ON_CPU) == 16
    assert DecodeConfig(decoder="ar", window_size=16).slots(ON_CPU) == 1
    assert DecodeConfig(decoder="lookup", window_size=16).slots(ON_CPU) == 16
