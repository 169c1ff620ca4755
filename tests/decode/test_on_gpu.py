"""Decoding compiled for a GPU that is not there: a forward reads the weights and the used part of the cache, where they lie."""

import re

import jax
import jax.numpy as jnp
import pytest

from wedlm_jax.absent_devices import devices, has_gpu_compiler
from wedlm_jax.decode.config import DecodeConfig, RowSettings
from wedlm_jax.decode.loop import Program, run, start
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.slot_cost import ON_ACCELERATOR
from wedlm_jax.model.weights import Weights, with_layers_apart
from wedlm_jax.ops.attention import trial
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated

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
OPERATION = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = (.*?) ([\w\-]+)\(", re.MULTILINE)


@pytest.fixture
def compiled(monkeypatch):
    """The text of the loop, or of prefill, and the shape of a layer's cache; `apart` as on a GPU with room for it."""
    monkeypatch.setattr(trial, "failure", lambda *_: None)  # as on a GPU where the kernel is right
    mesh = make_mesh(MeshConfig(), devices("h100:1"))

    def on_gpu(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), tree)

    def compile(decoder, apart=True, prefill=False):
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

        transformer = transformer_from(MODEL, init_params(MODEL, 0))
        monkeypatch.setattr("wedlm_jax.model.weights.LARGE", 2**40)  # apart here or not at all
        weights = on_gpu(Weights.of(with_layers_apart(transformer) if apart else transformer))
        settings = on_gpu(RowSettings.from_configs([config] * ROWS, range(ROWS), ON_ACCELERATOR))
        prompts = on_gpu((jnp.zeros((ROWS, PROMPT), jnp.int32), jnp.zeros(ROWS, jnp.int32)))
        state = on_gpu(jax.eval_shape(prefilled, weights, *prompts, settings))
        if prefill:
            lowered = jax.jit(prefilled).lower(weights, *prompts, settings)
        else:
            lowered = jax.jit(decoded, donate_argnums=1).lower(weights, state, settings)
        return lowered.compile().as_text(), shape(jax.tree.leaves(state.cache)[0])

    return compile


def shape(array) -> str:
    return f"bf16[{','.join(map(str, array.shape))}]"


def body_of_loop(text: str) -> str:
    """The computation that the outermost loop runs."""
    [body] = re.findall(r" while\(.*body=%?([\w.\-]+)", re.search(r"^ENTRY .*?^\}", text, re.M | re.S)[0])
    return re.search(rf"^%?{re.escape(body)} \(.*?^\}}", text, re.M | re.S)[0]


def weight_shapes() -> list[str]:
    """Of one layer's matrices."""
    layers = {name: x for name, x in init_params(MODEL, 0).items() if name.startswith("layers.")}
    return [shape(x[:1]) for x in layers.values() if x.ndim > 2] + [shape(x[0]) for x in layers.values() if x.ndim > 2]


@pytest.mark.parametrize("decoder", ["ar", "verified"])
def test_a_forward_copies_no_weights_and_no_cache_and_asks_the_host_nothing(compiled, decoder):
    loop, cache = compiled(decoder)
    body = body_of_loop(loop)
    assert cache in body and any(weight in body for weight in weight_shapes()), "the search can find"
    written = [(result, operation) for result, operation in OPERATION.findall(body) if operation not in FREE]
    assert [result for result, _ in written if any(result.startswith(weight) for weight in weight_shapes())] == []
    # The cache is the result of the scatters that write the window into it, two in a layer, and of nothing else.
    assert sum(result.startswith(cache) for result, _ in written) == 2 * MODEL.num_layers
    assert " conditional(" not in loop and len(re.findall(r" while\(", loop)) == 1
    assert [line for line in loop.splitlines() if cache in line and (" copy(" in line or "transpose" in line)] == []
    kernels = [operation for _, operation in written if operation in ("fusion", "custom-call", "copy")]
    assert len(kernels) <= 20 * MODEL.num_layers + 60, "each of them takes microseconds to start"


def test_in_a_scan_every_layers_weights_would_be_copied(compiled):
    """What `with_layers_apart` is for, and proof that the search above finds it."""
    loop, _ = compiled("ar", apart=False)
    copied = [result for result, operation in OPERATION.findall(loop) if operation == "fusion"]
    assert any(result.startswith(weight) for result in copied for weight in weight_shapes())


def test_prefill_copies_no_weights_and_writes_the_cache_where_it_lies(compiled):
    body = body_of_loop((found := compiled("verified", prefill=True))[0])
    written = [(result, operation) for result, operation in OPERATION.findall(body) if operation not in FREE]
    assert [result for result, _ in written if any(result.startswith(weight) for weight in weight_shapes())] == []
    assert sum(result.startswith(found[1]) for result, _ in written) == 2 * MODEL.num_layers
