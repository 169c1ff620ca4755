"""The GPU path against dense float64 attention: tokamax's Triton kernels, interpreted, and both kinds lowered for CUDA."""

import functools
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks import correctness
from tests.ops.cuda import lowered_for_cuda
from tests.quick_jit import quick_jit
from tests.reference.attention import attention, attention_gradients
from wedlm_jax.absent_devices import devices, has_gpu_compiler
from wedlm_jax.errors import UserError
from wedlm_jax.model.kept_blocks import KeptBlocks
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.model.transformer import REMAT_POLICIES
from wedlm_jax.ops.attention import OwnBlocks, flash_gpu, trial
from wedlm_jax.ops.attention.choice import PLATFORMS
from wedlm_jax.ops.attention.flash_gpu import TILE, flash_attention, sm90, triton, unsupported
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated

# Looked for and not imported: the module under test says how that is done.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")


@pytest.fixture
def interpreted(monkeypatch):
    """Pallas kernels as plain operations. Inside a loop or a branch the interpreter knows no place in the grid: it is read at the
    kernel's start."""
    block = flash_gpu._module("pallas.block")
    call, program_id = pl.pallas_call, pl.program_id

    def interpreted_call(kernel, out_shape, *, grid_spec, compiler_params=None, **settings):
        @functools.wraps(kernel)
        def with_places(*refs):
            places = [program_id(axis) for axis in range(len(grid_spec.grid))]

            def place(axis):
                if axis >= len(places):
                    raise ValueError(axis)
                return places[axis]

            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(pl, "program_id", place)
                return kernel(*refs)

        return call(with_places, out_shape, grid_spec=grid_spec, interpret=True, **settings)

    monkeypatch.setattr(block.pl, "pallas_call", interpreted_call)


B, L, H = 2, 256, 64


def case(heads, kv_heads, block_size, bidirectional=False, head_dim=H):
    """Prediction queries over the clean prefix of their document, and their own block: arrays, ranges, the dense mask."""
    random = np.random.default_rng(block_size)
    shapes = [(B, L, n, head_dim) for n in (heads, kv_heads, kv_heads, kv_heads, kv_heads, heads)]
    arrays = [np.float32(random.normal(size=shape)) for shape in shapes]
    index = np.arange(L)
    document = np.stack([np.searchsorted(starts, index, side="right") for starts in ([0, 96, 160], [0, 32])])
    start = np.stack([[np.flatnonzero(row == row[t])[0] for t in index] for row in document]).astype(np.int32)
    block = np.broadcast_to(index // block_size * block_size, (B, L)).astype(np.int32)
    own_end = block + block_size if bidirectional else np.broadcast_to(index + 1, (B, L)).astype(np.int32)
    key = index[None, None, :]
    prefix_seen = (start[..., None] <= key) & (key < block[..., None])
    own_seen = (block[..., None] <= key) & (key < own_end[..., None])
    return arrays, start, block, own_end, np.concatenate([prefix_seen, own_seen], axis=2)


@pytest.mark.parametrize(("kv_heads", "block_size", "both"), [(2, 32, False), (1, 4, False), (1, 8, True)])
def test_prefix_and_own_block_are_one_softmax_with_its_gradients(interpreted, kv_heads, block_size, both):
    (q, k, v, k_own, v_own, d_out), start, block, own_end, visible = case(2, kv_heads, block_size, both)

    def attend(q, k, v, k_own, v_own):
        own = OwnBlocks(k_own, v_own, jnp.asarray(block), jnp.asarray(own_end), block_size)
        return flash_attention(q, k, v, start, block, own, kernels=triton())

    def output_and_gradients(*arrays):
        out, pullback = jax.vjp(attend, *arrays)
        return out, *pullback(jnp.asarray(d_out))

    out, d_q, *d_keys = quick_jit(output_and_gradients)(q, k, v, k_own, v_own)
    keys, values = np.concatenate([k, k_own], axis=1), np.concatenate([v, v_own], axis=1)
    assert_close(out, attention(q, keys, values, visible)[0])
    expected_d_q, expected_d_k, expected_d_v = attention_gradients(q, keys, values, visible, d_out)
    assert_close(d_q, expected_d_q)
    for ours, expected in zip(
        d_keys, (expected_d_k[:, :L], expected_d_v[:, :L], expected_d_k[:, L:], expected_d_v[:, L:]), strict=True
    ):
        assert_close(ours, expected)


def test_a_key_range_for_every_query_without_own_blocks(interpreted):
    (q, k, v, _, _, d_out), start, _, end, visible = case(4, 2, 32)
    key = np.arange(L)
    visible = (start[..., None] <= key) & (key < end[..., None])

    def output_and_gradients(q, k, v):
        out, pullback = jax.vjp(lambda *qkv: flash_attention(*qkv, start, end, kernels=triton()), q, k, v)
        return out, *pullback(jnp.asarray(d_out))

    out, *gradients = quick_jit(output_and_gradients)(q, k, v)
    assert_close(out, attention(q, k, v, visible)[0])
    for ours, expected in zip(gradients, attention_gradients(q, k, v, visible, d_out), strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_trial_on_a_gpu_passes_these_kernels(interpreted, monkeypatch, dtype):
    monkeypatch.setattr(flash_gpu, "_kernels_of_this_gpu", lambda dtype: triton())
    monkeypatch.setitem(PLATFORMS, "tokamax", ("cpu",))
    trial.failure.cache_clear()
    assert trial.failure("flash", 2, 1, H, jnp.dtype(dtype)) is None
    trial.failure.cache_clear()


def remat(attend):
    return jax.checkpoint(attend, policy=REMAT_POLICIES["dots"])


@pytest.mark.parametrize(
    ("in_block", "wrapped", "kept"),
    [
        ("causal", lambda attend: attend, None),
        ("bidirectional", remat, None),
        ("causal", remat, KeptBlocks(jnp.array([[1, 2, 5]]), 32)),
    ],
    ids=["causal", "bidirectional, remat", "some blocks, remat"],
)
def test_the_dual_stream_by_flash_is_the_one_by_key_ranges_with_its_gradients(
    interpreted, monkeypatch, in_block, wrapped, kept
):
    monkeypatch.setattr(flash_gpu, "_kernels_of_this_gpu", lambda dtype: triton())
    segment_ids = jnp.asarray(np.repeat([[1, 1, 2, 0]], L // 4, axis=1))
    pattern, random = DualStream(segment_ids, 32, in_block, kept), np.random.default_rng(0)
    real = jnp.concatenate([segment_ids, pattern.of_prediction(segment_ids)], axis=1)[..., None, None] > 0
    tokens = real.shape[1]
    *qkv, d_out = (jnp.asarray(random.normal(size=(1, tokens, heads, H)), jnp.float32) for heads in (2, 1, 1, 2))

    def output_and_gradients(attend, qkv):
        out, pullback = jax.vjp(lambda *qkv: jnp.where(real, wrapped(attend)(*qkv), 0), *qkv)
        return out, *pullback(d_out)

    by_flash, by_ranges = (
        quick_jit(functools.partial(output_and_gradients, attend))(qkv)
        for attend in (pattern.by_flash, pattern.by_ranges)
    )
    for ours, expected in zip(by_flash, by_ranges, strict=True):
        assert_close(ours, expected)


def test_remat_by_dots_runs_no_forward_kernel_again(monkeypatch):
    """A sine is in the place of the forward kernel, as jax itself keeps a Pallas call whose result nobody reads."""
    sines = flash_gpu.Kernels(lambda q, k, v, *ranges: (jnp.sin(q), q[..., 0].T), lambda q, k, v, *others: (q, k, v))
    monkeypatch.setattr(flash_gpu, "_kernels_of_this_gpu", lambda dtype: sines)
    pattern = DualStream(jnp.ones((1, L), int), 32)
    q = k = v = jax.ShapeDtypeStruct((1, 2 * L, 1, H), jnp.float32)

    def forwards(attend):
        gradients = jax.grad(lambda *qkv: jnp.sum(attend(*qkv)), argnums=(0, 1, 2))
        return str(jax.make_jaxpr(gradients)(q, k, v)).count("= sin")

    assert forwards(jax.checkpoint(pattern.by_flash)) == 4
    assert forwards(remat(pattern.by_flash)) == forwards(pattern.by_flash) == 2  # one for each stream


@pytest.mark.parametrize("case", correctness.CASES)
def test_bfloat16_is_as_exact_as_dense_attention_in_bfloat16(interpreted, case):
    paths = {"triton": correctness.by_flash(triton())}
    assert max(correctness.of_dual_stream(paths, 128, *case)["triton"]) <= correctness.ALLOWED


def assert_close(ours, expected):
    assert np.max(np.abs(ours - expected)) <= 1e-5 * np.max(np.abs(expected))


@pytest.mark.skipif(not has_gpu_compiler(), reason="jax's CUDA plugin is not installed: requirements-gpu-compiler.txt")
def test_a_scan_that_keeps_what_the_kernels_give_runs_each_once():
    """XLA would run one again to have it write into the stack of what is kept."""
    mesh = make_mesh(MeshConfig(data=1), devices("h100:1"))
    pattern = DualStream(jnp.ones((1, 512), int), 32)

    def loss(x):
        layer = jax.checkpoint(lambda x, _: (x + pattern.by_flash(x, x, x), None), policy=REMAT_POLICIES["dots"])
        with on_mesh(mesh):
            return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0].astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16, sharding=replicated(mesh))
    text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
    # For each stream one forward, and two backward.
    assert len(re.findall(r'custom-call\(.*custom_call_target="mosaic_gpu', text)) == 6


def test_importing_the_kernels_leaves_the_type_checker_of_others_in_its_place():
    import typeguard

    triton.cache_clear()
    triton()
    assert sys.modules["typeguard"] is typeguard and hasattr(typeguard, "TypeCheckError")  # which tyro catches


def test_what_stands_in_for_the_type_checker_is_found_by_who_looks_for_it():
    """As jaxtyping does when it is imported, here by a plugin of pytest and elsewhere with the kernels."""
    with flash_gpu._unchecked():
        assert importlib.util.find_spec("typeguard")


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 4, 2), (128, 16, 8)])
@pytest.mark.parametrize("kernels", [sm90, triton])
def test_both_kinds_of_kernels_lower_for_cuda(kernels, head_dim, heads, kv_heads):
    arrays, start, block, own_end, _ = case(heads, kv_heads, 32, head_dim=head_dim)

    def gradients(q, k, v, k_own, v_own, d_out):
        attend = lambda q, k, v, k_own, v_own: flash_attention(  # noqa: E731
            q,
            k,
            v,
            start,
            block,
            OwnBlocks(k_own, v_own, jnp.asarray(block), jnp.asarray(own_end), 32),
            kernels=kernels(),
        )
        return jax.vjp(attend, q, k, v, k_own, v_own)[1](d_out)

    low = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays]
    assert "custom_call" in lowered_for_cuda(gradients, *low)


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        (jnp.float32, "highest", "F32_F32_F32"),
        (jnp.float32, "float32", "F32_F32_F32"),
        (jnp.float32, "default", "DEFAULT"),
        (jnp.bfloat16, "highest", "DEFAULT"),
    ],
)
def test_float32_is_multiplied_as_it_is_where_the_highest_precision_is_asked_for(monkeypatch, dtype, asked, expected):
    given = []
    for name, function in (("pallas_triton", "_fwd"), ("pallas_triton_vjp", "_bwd")):
        module = flash_gpu._module(f"ops.attention.{name}")

        def kernel(*args, kernel=getattr(module, function), **settings):
            given.extend(settings[f"{product}_dot_precision"].name for product in ("q_k", "weights_v"))
            return kernel(*args, **settings)

        monkeypatch.setattr(module, function, kernel)
    q = k = v = d_out = jax.ShapeDtypeStruct((1, TILE, 2, H), dtype)
    start, end = jnp.zeros((1, TILE), int), jnp.ones((1, TILE), int)
    attend = lambda q, k, v: flash_attention(q, k, v, start, end, kernels=triton())  # noqa: E731
    with jax.default_matmul_precision(asked):
        jax.eval_shape(lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out), q, k, v, d_out)
    assert given == [expected] * 4


def test_hopper_kernels_are_taken_on_hopper_and_for_half_precision_alone(monkeypatch):
    """Their tiles of float32 would not fit into its shared memory."""
    gpu_utils = flash_gpu._module("gpu_utils")
    for hopper in (True, False):
        monkeypatch.setattr(gpu_utils, "is_sm90", lambda hopper=hopper: hopper)
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            expected = sm90() if hopper and dtype != jnp.float32 else triton()
            assert flash_gpu._kernels_of_this_gpu(jnp.dtype(dtype)) is expected


@pytest.mark.parametrize(("kind", "kernels"), [("NVIDIA H100 80GB HBM3", sm90), ("NVIDIA A100-SXM4-80GB", triton)])
def test_where_no_gpu_is_the_one_that_is_compiled_for_decides(kind, kernels):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert flash_gpu._kernels_of_this_gpu(jnp.dtype(jnp.bfloat16)) is kernels()


def test_shapes_that_the_kernels_cannot_do_are_told_with_the_reason(monkeypatch):
    def reason(length, head_dim, own_size=0):
        q, k = (jax.ShapeDtypeStruct((1, length, n, head_dim), jnp.bfloat16) for n in (2, 1))
        return unsupported(q, k, own_size)

    assert reason(256, 64) is None
    assert reason(200, 64) == "200 queries are not a multiple of 128"
    assert reason(256, 80) == "a head dimension of 80 is neither 64 nor 128"
    assert reason(256, 64, 128) is None
    assert reason(256, 64, 256) == "the scores inside blocks of 256 tokens are held as they are, of 128 at most"
    monkeypatch.setattr(flash_gpu.importlib.util, "find_spec", lambda name: None)
    assert reason(256, 64) == "tokamax is not installed (README, Install)"


def test_a_single_stream_of_whole_documents_asks_in_vain_for_the_kernels_and_goes_by_key_ranges_else():
    pattern = DualStream(jnp.ones((1, L), int), L)
    q = k = v = jax.ShapeDtypeStruct((1, 2 * L, 1, H), jnp.bfloat16)
    with pytest.raises(UserError, match=f"model.attention=tokamax cannot do this: .* blocks of {L} tokens"):
        jax.eval_shape(functools.partial(pattern, implementation="tokamax"), q, k, v)
    assert jax.eval_shape(functools.partial(pattern, implementation="auto"), q, k, v).shape == q.shape
