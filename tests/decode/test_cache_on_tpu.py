"""Decoding compiled for a TPU that is not there: prefill and loop write the cache where it lies."""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import forward_for_tpu
from benchmarks.forward_for_gpu import STARTED, operations
from tests.conftest import FULL
from tests.decode.absent import compiled_for, zeros
from tests.optimized import optimized  # noqa: F401  for every test of this file
from wedlm_jax import absent_devices
from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.first_drafts import riding_masks
from wedlm_jax.decode.loop import Program, run, start
from wedlm_jax.engine import programs
from wedlm_jax.engine.memory import cache_slots
from wedlm_jax.model import weights as rooms
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import param_shapes, transformer_from
from wedlm_jax.model.weights import Weights
from wedlm_jax.model.window_table import ON_ACCELERATOR
from wedlm_jax.ops.attention import trial, window_tpu
from wedlm_jax.program_costs import collectives
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)

MODEL = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=128,
    dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
WIDE = dataclasses.replace(MODEL, hidden_size=2048, intermediate_size=6144, num_layers=3, num_heads=16, num_kv_heads=8)
ROWS, PROMPT, NEW = (8, 1024, 1024) if FULL else (2, 128, 1024)  # prefill takes long to compile for many tokens


def on_chip(tree, mesh):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), tree)


def assert_no_copy_of_cache(text, cache):
    shape = f"bf16[{','.join(map(str, cache.k.shape))}]"
    assert shape in text
    assert [line for line in text.splitlines() if shape in line and (" copy(" in line or " copy-start(" in line)] == []


@pytest.mark.parametrize(
    ("attention", "head_dim"), [("auto", 128), ("xla", 64), *([("auto", 64), ("xla", 128)] if FULL else [])]
)
@pytest.mark.parametrize("decoder", ["ar", "verified"] if FULL else ["verified"])
def test_no_cache_is_copied(decoder, attention, head_dim, monkeypatch):
    """By the kernel that "auto" takes for windows, and by XLA; of heads that are half as wide as a lane, too."""
    monkeypatch.setattr(rooms, "LARGE", 2**40)  # as over a mesh
    monkeypatch.setattr(trial, "failure", lambda *_: None)
    model = dataclasses.replace(MODEL, attention=attention, head_dim=head_dim)
    mesh = make_mesh(MeshConfig(), absent_devices.devices("v5e:1x1"))
    config = DecodeConfig(decoder, max_new_tokens=NEW, mask_token_id=511, stop_ids=(0,))
    sizes = dict(
        slots=config.slots(ON_ACCELERATOR), output_slots=NEW, holds_back=config.holds_back, drafter=config.drafter
    )

    def prefilled(*arguments):
        with on_mesh(mesh):
            return start(*arguments, **sizes)

    def decoded(*arguments):
        with on_mesh(mesh):
            return run(Program.of(config), *arguments)

    settings = on_chip(RowSettings.from_configs([config] * ROWS, range(ROWS), ON_ACCELERATOR), mesh)
    weights = on_chip(Weights.of(transformer_from(model, zeros(model))), mesh)
    prompts = on_chip((jnp.zeros((ROWS, PROMPT), jnp.int32), jnp.zeros(ROWS, jnp.int32)), mesh)
    state = on_chip(jax.eval_shape(prefilled, weights, *prompts, settings), mesh)
    lowered = (
        jax.jit(prefilled).lower(weights, *prompts, settings),
        jax.jit(decoded, donate_argnums=1).lower(weights, state, settings),
    )
    prefill, loop = (program.compile().as_text() for program in lowered)
    assert_no_copy_of_cache(prefill, state.cache)
    assert_no_copy_of_cache(loop, state.cache)
    assert ("attend_window" in loop) == (attention == "auto")


LARGEST = [(64, 64, 8, jnp.float32)] + ([(64, 64, 2, jnp.bfloat16)] if FULL else [])


@pytest.mark.parametrize(("queries", "heads", "kv_heads", "dtype"), LARGEST)
def test_the_largest_windows_that_the_kernel_takes_fit_into_a_chips_memory(queries, heads, kv_heads, dtype):
    """More queries than a trial has. Of the chips a v5p needs most."""
    mesh = make_mesh(MeshConfig(), absent_devices.devices("v5p:1x1x1"))
    shapes = (ROWS, queries, heads, 128), *[(4, ROWS, kv_heads, 4112, 128)] * 2
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    assert window_tpu.unsupported(q, k) is None

    def attend(*arrays):
        with on_mesh(mesh):
            return window_tpu.attend_window(*arrays)

    layer, end = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (ROWS, queries)))
    jax.jit(attend).lower(*on_chip((q, k, v, layer, end), mesh)).compile()


@pytest.fixture
def as_tpus(monkeypatch):
    """This machine's devices, over which weights are laid out first, taken for TPUs."""
    monkeypatch.setattr(trial, "failure", lambda *_: None)
    monkeypatch.setattr(rooms, "CPU", ())
    monkeypatch.setattr(rooms, "TPUS", ("cpu",))


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 2), (1, 2, 2)] if FULL else [(2, 1, 2)], ids=str)
def test_over_several_chips_no_cache_is_copied_and_no_kernel_of_heads_gathered(sizes, as_tpus):
    chips = absent_devices.devices("v5e:2x2")
    config = DecodeConfig("verified", max_new_tokens=NEW, mask_token_id=511, stop_ids=(0,))
    model = dataclasses.replace(MODEL, num_heads=16)  # a device's part of them is as many as no kernel has
    _, loop, state = compiled_for(chips, MeshConfig(*sizes), model, config, rows=ROWS, prompt=PROMPT)
    text = loop.compile().as_text()
    held = state.cache.k.sharding.shard_shape(state.cache.k.shape)
    assert held != state.cache.k.shape and "attend_window" in text
    assert_no_copy_of_cache(text, jax.tree.map(lambda x: jax.ShapeDtypeStruct(held, x.dtype), state.cache))
    assert f"bf16[{','.join(map(str, state.cache.k.shape))}]" not in text
    # Heads are cut over the axis tensor, the depth over fsdp and data, over which a batch that they cut gathers it.
    N, K, D, H = model.num_heads, model.num_kv_heads, model.hidden_size, model.head_dim
    whole = [f"bf16[{layers}{heads},{D},{H}]" for layers in ("", "1,") for heads in (N, K)]
    assert f"{N // sizes[2]},{D},{H}]" in text, "the search can find"
    assert [line for line in text.splitlines() if "all-gather" in line and any(x in line for x in whole)] == []


def test_decoding_one_token_at_a_time_copies_no_weights_and_multiplies_in_the_matrix_unit(as_tpus):
    config = DecodeConfig("ar", max_new_tokens=NEW, mask_token_id=511, stop_ids=(0,))
    chip = absent_devices.devices("v5e:1x1")
    _, lowered, _ = compiled_for(chip, MeshConfig(1, 1, 1), WIDE, config, rows=1, prompt=PROMPT)
    text = lowered.compile().as_text()
    of_heads = rf"bf16\[{WIDE.num_layers},\d+,\d+,\d+\]\S*"
    assert len(re.findall(of_heads, text)) > 4, "the search can find"
    assert re.findall(rf"{of_heads} copy\(", text) == []
    matrices = [name for name, x in param_shapes(WIDE).items() if x.ndim > 2 or name == "lm_head.kernel"]
    assert len(matrices) == 8 and len(re.findall(r" convolution\(", text)) >= len(matrices)


@pytest.mark.skipif(not FULL, reason="compiles six forwards; launch/test.sh --full")
def test_the_benchmark_of_a_forward_finds_what_the_layout_and_the_matrix_unit_save(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["forward_for_tpu"])
    forward_for_tpu.main()
    cells = [line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines()[-6:]]
    assert [int(window) for window, *_ in cells] == 3 * [1] + 3 * [16]
    forward, call, temporaries = ([float(line[column]) for line in cells] for column in (1, 2, 3))
    assert forward[0] > 1.5 * forward[2] and forward[5] < 1.2 * forward[2]
    assert call[1] > call[2] == call[5] == 0 and temporaries[3] > 100 > temporaries[5]


def test_kernels_of_int8_become_bfloat16_inside_the_products(monkeypatch):
    monkeypatch.setattr(rooms, "LARGE", 2**40)
    monkeypatch.setattr(trial, "failure", lambda *_: None)
    int8 = dataclasses.replace(MODEL, kernel_dtype="int8")
    config = DecodeConfig("verified", max_new_tokens=NEW, mask_token_id=511, stop_ids=(0,))
    chip = absent_devices.devices("v5e:1x1")
    _, loop, _ = compiled_for(chip, MeshConfig(1, 1, 1), int8, config, rows=ROWS, prompt=PROMPT)
    text = loop.compile().as_text()
    rounded = [x.shape for x in param_shapes(int8).values() if x.dtype == jnp.int8]
    stacks = [",".join(map(str, shape)) for shape in rounded]
    assert all(f"s8[{stack}]" in text for stack in stacks), "the search can find"
    assert [stack for stack in stacks if f"bf16[{stack}]" in text] == [], "before the loop, once and for all"
    layer = tuple(f"bf16[{','.join(map(str, sizes))}]" for shape in rounded for sizes in (shape[1:], (1, *shape[1:])))
    of_layers = [result for result, operation, _ in operations(text) if operation in STARTED]
    # S(1) is the chip's own memory, which costs no bandwidth; here a layer's k and v fit there.
    assert of_layers and [result for result in of_layers if result.startswith(layer) and "S(1)" not in result] == []


VERIFIED = DecodeConfig("verified", mask_token_id=511, stop_ids=(0,))


def opened(weights, rows, context):
    """The state of an engine's rows."""
    slots = VERIFIED.slots(ON_ACCELERATOR)
    sizes = dict(rows=rows, context=context, slots=slots, cache_slots=cache_slots(context, slots))
    return jax.eval_shape(functools.partial(programs.open_rows, **sizes, holds_back=True), weights)


def settings_of(rows):
    return RowSettings.from_configs([VERIFIED] * rows, range(rows), ON_ACCELERATOR)


@pytest.mark.parametrize("together", [1, 4])
def test_no_cache_is_copied_where_an_engine_starts_requests(together, monkeypatch):
    monkeypatch.setattr(rooms, "LARGE", 2**40)  # as over a mesh
    mesh = make_mesh(MeshConfig(), absent_devices.devices("v5e:1x1"))
    context, slots = PROMPT + NEW, 256

    def filled(weights, state, settings, rows, prompt, length, own, hidden):
        with on_mesh(mesh):
            cache = programs.take_rows(state.cache, rows, length, slots=slots)
            arguments = (weights, state, settings, rows, cache, prompt, length, own, hidden)
            return programs.fill_rows(*arguments, holds_back=True, drafter="verified")

    weights = Weights.of(transformer_from(MODEL, zeros(MODEL)))
    rows, prompt = jnp.zeros(together, jnp.int32), jnp.zeros((together, context), jnp.int32)
    hidden = jnp.zeros(
        (together, riding_masks("verified", VERIFIED.slots(ON_ACCELERATOR)), MODEL.hidden_size), MODEL.dtype
    )
    state = opened(weights, ROWS, context)
    given = weights, state, settings_of(ROWS), rows, prompt, rows, settings_of(together), hidden
    text = jax.jit(filled, donate_argnums=(1, 2)).lower(*on_chip(given, mesh)).compile().as_text()
    assert_no_copy_of_cache(text, state.cache)


def test_over_chips_that_cut_rows_an_engine_sends_each_request_once(monkeypatch):
    """The keys and values of one request at a time; as a slice, those of all that start together were gathered for each."""
    monkeypatch.setattr(rooms, "LARGE", 2**40)
    mesh, together, slots = make_mesh(MeshConfig(data=4), absent_devices.devices("v5e:2x2")), 4, 256
    context = PROMPT + NEW

    def filled(*arguments):
        with on_mesh(mesh):
            return programs.fill_rows(*arguments, None, holds_back=True, drafter=None)

    def cut(cache):
        by_rows = NamedSharding(mesh, PartitionSpec(None, "data"))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_rows), cache)

    weights = Weights.of(transformer_from(MODEL, zeros(MODEL)))
    state, rows = opened(weights, 8, context), jnp.zeros(together, jnp.int32)
    cache = cut(jax.eval_shape(lambda: KVCache.zeros(MODEL, together, slots)))
    given = weights, programs.without_cache(state), settings_of(8), rows, jnp.zeros((together, context), jnp.int32)
    weights, others, settings, rows, prompt = on_chip(given, mesh)
    state = dataclasses.replace(others, cache=cut(state.cache))
    arguments = weights, state, settings, rows, cache, prompt, rows, on_chip(settings_of(together), mesh)
    sent = collectives(jax.jit(filled, donate_argnums=(1, 2)).lower(*arguments).compile().as_text())
    of_request = cache.k.size * cache.k.dtype.itemsize // together
    assert sum(one.times * one.nbytes for one in sent if one.nbytes >= of_request) == together * 2 * of_request


def test_two_rows_change_places_with_no_more_than_these_beside_the_cache(monkeypatch):
    monkeypatch.setattr(rooms, "LARGE", 2**40)
    mesh = make_mesh(MeshConfig(), absent_devices.devices("v5e:1x1"))
    state = opened(Weights.of(transformer_from(MODEL, zeros(MODEL))), 8, 16_384)
    given = on_chip((state, settings_of(8), jnp.zeros(2, jnp.int32)), mesh)
    memory = programs.exchange_rows.lower(*given).compile().memory_analysis()
    row = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache)) // 8
    assert memory.alias_size_in_bytes >= 8 * row and memory.temp_size_in_bytes <= 2 * row
