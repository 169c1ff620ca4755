"""Decoding compiled for a GPU that is not there: a forward reads the weights and the used part of the cache, where they lie."""

import dataclasses
import re

import jax
import pytest

from benchmarks import forward_for_gpu
from tests.conftest import FULL
from tests.decode.absent import compiled_for
from tests.optimized import optimized  # noqa: F401  for every test of this file
from wedlm_jax.absent_devices import devices, has_gpu_compiler
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.model import weights as weights_module
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params, param_axes
from wedlm_jax.ops.attention import trial
from wedlm_jax.sharding import MeshConfig, make_mesh, param_shardings

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="jax's CUDA plugin is not installed: requirements-gpu-compiler.txt"
)

MODEL = ModelConfig(
    vocab_size=512, hidden_size=384, intermediate_size=640, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=128,
    dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
ROWS, PROMPT, NEW = 2, 512, 3000
FREE = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "while",
    "conditional",
    "copy-start",
    "copy-done",
)


@pytest.fixture
def compiled(monkeypatch):
    """The text of the loop, or of prefill, for so many GPUs that share the heads, and the shape of a layer's cache on each;
    `apart` as where there is room for it, `int8` with rounded kernels, `fields` of the settings."""
    monkeypatch.setattr(trial, "failure", lambda *_: None)  # as on a GPU where the kernel is right
    monkeypatch.setattr(weights_module, "CPU", ())  # this machine's devices taken for GPUs
    monkeypatch.setattr(weights_module, "GPUS", ("cpu",))

    def compile(decoder, *, gpus=1, apart=True, prefill=False, int8=False, **fields):
        monkeypatch.setattr(weights_module, "_has_room_for", lambda arrays: apart)
        config = DecodeConfig(decoder, max_new_tokens=NEW, mask_token_id=511, stop_ids=(0,), **fields)
        model = dataclasses.replace(MODEL, kernel_dtype="int8" if int8 else None)
        started, loop, state = compiled_for(
            devices(f"h100:{gpus}"), MeshConfig(data=1, tensor=gpus), model, config, rows=ROWS, prompt=PROMPT
        )
        program = started if prefill else loop.compile()
        cache = jax.tree.leaves(state.cache)[0]
        return program.as_text(), shape(cache.sharding.shard_shape(cache.shape))

    return compile


def shape(sizes) -> str:
    return f"bf16[{','.join(map(str, sizes))}]"


def body_of_loop(text: str) -> str:
    """The computation that the outermost loop runs."""
    [body] = re.findall(r" while\(.*body=%?([\w.\-]+)", re.search(r"^ENTRY .*?^\}", text, re.M | re.S)[0])
    return re.search(rf"^%?{re.escape(body)} \(.*?^\}}", text, re.M | re.S)[0]


def weight_shapes(gpus: int = 1) -> tuple[str, ...]:
    """Of one layer's matrices on one GPU, by itself and as a slice of the stack."""
    mesh = make_mesh(MeshConfig(data=1, tensor=gpus), jax.devices()[:gpus])
    shapes = jax.eval_shape(lambda: init_params(MODEL, 0))
    cuts = param_shardings(mesh, param_axes(MODEL), shapes)
    matrices = [name for name, x in shapes.items() if name.startswith("layers.") and x.ndim > 2]
    of_a_gpu = [cuts[name].shard_shape(shapes[name].shape)[1:] for name in matrices]
    if gpus == 1:  # kernels that read the same are joined
        D, F, H = MODEL.hidden_size, MODEL.intermediate_size, MODEL.head_dim
        of_a_gpu += [(D, (MODEL.num_heads + 2 * MODEL.num_kv_heads) * H), (D, 2 * F)]
    return *(shape(sizes) for sizes in of_a_gpu), *(shape((1, *sizes)) for sizes in of_a_gpu)


def written_in(body: str) -> list[tuple[str, str]]:
    """What its kernels and copies write, and which operation does."""
    found = forward_for_gpu.operations_of(body.splitlines())
    return [(result, operation) for result, operation in found if operation not in FREE]


@pytest.mark.parametrize(("decoder", "gpus"), [("ar", 1), ("verified", 1), ("verified", 2)])
def test_a_forward_copies_no_weights_and_no_cache_and_asks_the_host_nothing(compiled, decoder, gpus):
    loop, cache = compiled(decoder, gpus=gpus)
    body, weights = body_of_loop(loop), weight_shapes(gpus)
    assert cache in body and any(weight in body for weight in weights), "the search can find"
    written = written_in(body)
    assert [result for result, _ in written if result.startswith(weights)] == []
    # The cache is the result of the scatters that write the window into it, two in a layer, and of nothing else.
    assert sum(result.startswith(cache) for result, _ in written) == 2 * MODEL.num_layers
    assert " conditional(" not in loop and len(re.findall(r" while\(", loop)) == 1
    assert [line for line in loop.splitlines() if cache in line and (" copy(" in line or "transpose" in line)] == []
    kernels = [operation for _, operation in written if operation in ("fusion", "custom-call", "copy")]
    assert len(kernels) <= 20 * MODEL.num_layers + 60, "each of them takes microseconds to start"
    sums = [operation for _, operation in written if operation.endswith("-start") or operation == "all-reduce"]
    assert len(sums) <= (0 if gpus == 1 else 2 * MODEL.num_layers + 10)


@pytest.mark.parametrize("gpus", [1, 2] if FULL else [1])
def test_kernels_of_int8_become_bfloat16_inside_the_products(compiled, gpus):
    loop, _ = compiled("verified", gpus=gpus, int8=True)
    rounded = tuple(weight.replace("bf16", "s8") for weight in weight_shapes(gpus))
    body = body_of_loop(loop)
    assert any(weight in body for weight in rounded), "the search can find"
    before = re.search(r"^ENTRY .*?^\}", loop, re.M | re.S)[0]
    for computation in (body, before):
        written = [result for result, _ in written_in(computation)]
        assert [result for result in written if result.startswith((*weight_shapes(gpus), *rounded))] == []
    assert " conditional(" not in loop and len(re.findall(r" while\(", loop)) == 1


def test_a_forward_that_draws_sorts_nothing_and_copies_no_cache(compiled):
    loop, cache = compiled("verified", temperature=1.0, top_k=20, top_p=0.9)
    assert " conditional(" in loop, "where no row has a filter nothing is looked for"
    of_a_vocabulary = [line for line in loop.splitlines() if f",{MODEL.vocab_size}]" in line]
    assert of_a_vocabulary and [line for line in of_a_vocabulary if " sort(" in line or "RadixSort" in line] == []
    assert [line for line in loop.splitlines() if cache in line and (" copy(" in line or "transpose" in line)] == []


def test_in_a_scan_every_layers_weights_would_be_copied(compiled):
    """What `with_layers_apart` is for, and proof that the search above finds it."""
    loop, _ = compiled("ar", apart=False)
    assert any(result.startswith(weight_shapes()) for result, _ in written_in(loop))


def test_prefill_copies_no_weights_and_writes_the_cache_where_it_lies(compiled):
    text, cache = compiled("verified", prefill=True)
    written = written_in(body_of_loop(text))
    assert [result for result, _ in written if result.startswith(weight_shapes())] == []
    assert sum(result.startswith(cache) for result, _ in written) == 2 * MODEL.num_layers


def test_the_benchmark_of_a_forward_finds_the_copies_of_a_stack_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["forward_for_gpu", "--shape", "34m", "--slots", "1024"])
    forward_for_gpu.main()
    stack, apart, split, joined = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[-4:])
    assert [float(cells[1]) > 0 for cells in (stack, apart, split, joined)] == [True, False, False, False]  # GB
    # Waits for the host, one in a layer.
    assert [int(cells[3]) for cells in (stack, apart, split, joined)] == [8, 8, 0, 0]
    assert int(joined[2]) <= int(split[2])  # kernels
