"""The kernels over a cache, for GPUs and for TPUs, interpreted, against dense float64 attention."""

import dataclasses
import functools
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import correctness
from tests.conftest import examples
from tests.decode.models import TINY
from tests.ops.cuda import lowered_for_cuda
from tests.quick_jit import quick_jit
from tests.reference.attention import attention
from wedlm_jax.errors import UserError
from wedlm_jax.model import patterns
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.ops.attention import cache, choice, split_gpu, trial, window_tpu
from wedlm_jax.ops.attention.split_gpu import attend_split
from wedlm_jax.ops.attention.window_tpu import attend_window

INTERPRETED = {
    "split": functools.partial(attend_split, interpret=True),
    "window": functools.partial(attend_window, interpret=True),
}
KERNELS = {name: quick_jit(kernel) for name, kernel in INTERPRETED.items()}
HEAD_DIMS = {"split": 64, "window": 128}

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def case(seed, kernel, *, queries, heads, kv_heads, slots, layers=2):
    """Windows behind cursors from none to the last that fits: q, a cache of `layers` layers, and the ends of the ranges."""
    random = np.random.default_rng(seed)
    head_dim = HEAD_DIMS[kernel]
    cache = layers, 4, kv_heads, slots, head_dim
    length = np.array([0, random.integers(slots - queries), random.integers(slots - queries), slots - queries])
    arrays = [random.normal(size=shape) for shape in ((4, queries, heads, head_dim), cache, cache)]
    return [jnp.asarray(x, jnp.float32) for x in arrays], length[:, None] + np.arange(1, queries + 1)


def assert_dense(kernel, q, k, v, layer, end):
    with jax.default_matmul_precision("highest"):
        out = KERNELS[kernel](q, k, v, layer, end)
    keys, values = (np.swapaxes(x[layer], 1, 2) for x in (k, v))
    np.testing.assert_allclose(out, attention(q, keys, values, np.arange(k.shape[3]) < end[..., None])[0], atol=5e-6)


@each_kernel
@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "slots"),
    [(1, 2, 2, 64), (16, 8, 2, 300), (5, 7, 1, 700), (33, 4, 2, 1024)],
    ids=["one query", "a window", "seven queries a key", "two programs of rows, of sixteen splits"],
)
def test_kernels_are_dense_attention(kernel, queries, heads, kv_heads, slots):
    for seed in range(examples(1, 20)):
        arrays, end = case(seed, kernel, queries=queries, heads=heads, kv_heads=kv_heads, slots=slots)
        assert_dense(kernel, *arrays, seed % 2, end)


@each_kernel
def test_the_queries_of_a_row_may_see_ranges_of_any_lengths(kernel):
    """As the tokens of a window that are read have, and rows that are idle."""
    (q, k, v), _ = case(0, kernel, queries=6, heads=4, kv_heads=2, slots=500)
    assert_dense(kernel, q, k, v, 1, np.random.default_rng(0).integers(1, 501, (4, 6)))


@pytest.fixture
def small_tiles(monkeypatch):
    """128 slots in a tile of the kernel for TPUs, for eight queries of a kv head."""
    monkeypatch.setattr(window_tpu, "MAX_SCORES", 128 * 8)
    monkeypatch.setitem(KERNELS, "window", jax.jit(lambda *arrays: INTERPRETED["window"](*arrays)))


def test_tiles_of_a_row_are_any_number_and_the_last_one_is_not_whole(small_tiles):
    (q, k, v), _ = case(0, "window", queries=4, heads=4, kv_heads=2, slots=560)
    end = np.array([4, 128, 300, 560])[:, None] - np.arange(4)[::-1]
    assert_dense("window", q, k, v, 1, end)


@each_kernel
def test_what_no_row_uses_is_not_read(small_tiles, kernel):
    """Not a number there, and nowhere in the output. A TPU reads whole tiles."""
    ends, tile = np.array([1, 64, 129, 300])[:, None], {"split": 1, "window": 128}[kernel]
    (q, k, v), _ = case(0, kernel, queries=4, heads=4, kv_heads=2, slots=700)
    end = np.broadcast_to(ends, (4, 4))
    unused = np.arange(700)[:, None] >= -(-ends[..., None, None] // tile) * tile
    k, v = (jnp.where(unused, jnp.nan, x) for x in (k, v))
    out = KERNELS[kernel](q, k, v, 0, end)
    assert np.isfinite(out).all()
    assert_dense(kernel, q, *(jnp.where(unused, 0, x) for x in (k, v)), 0, end)


@each_kernel
def test_rows_that_have_finished_past_the_used_part_stay_finite(kernel):
    (q, k, v), end = case(0, kernel, queries=8, heads=2, kv_heads=1, slots=64)
    assert np.isfinite(KERNELS[kernel](q, k, v, 0, end + 60)).all()


@pytest.mark.parametrize(
    ("platform", "kernel", "name", "other"), [("gpu", "split", "tokamax", "splash"), ("tpu", "window", "splash", None)]
)
def test_windows_are_attended_by_the_kernel_of_the_device_which_the_log_names_and_prompts_by_none(
    monkeypatch, caplog, platform, kernel, name, other
):
    """By "auto" where its trial there says nothing against it. Splash reads no cache: elsewhere it asks for nothing here."""
    taken = []
    monkeypatch.setattr(
        cache, f"attend_{kernel}", lambda *arrays: taken.append(kernel) or jax.jit(INTERPRETED[kernel])(*arrays)
    )
    (q, k, v), _ = case(0, kernel, queries=4, heads=2, kv_heads=1, slots=64)
    empty = KVCache(*(jnp.zeros((1, 4, 1, 64, q.shape[3])) for _ in "kv"))
    window = CachedWindow(jnp.zeros(4, jnp.int32))
    new = k[0, :, 0, :4, None], v[0, :, 0, :4, None]

    def decode(implementation, failure=None):
        monkeypatch.setattr(trial, "failure", lambda kernels, *_: failure if kernels == kernel else pytest.fail())
        taken.clear()
        return window(q, *new, implementation, cache=empty, layer=0)[0], bool(taken)

    assert [decode(implementation)[1] for implementation in ("auto", "xla", "splash")] == [False] * 3
    with pytest.raises(UserError, match="model.attention=tokamax is for GPUs, and this is cpu"):
        decode("tokamax")
    for module in (choice, patterns):
        monkeypatch.setattr(module, "target_platform", lambda: platform)
    expected, by_kernel = decode("xla")
    assert not by_kernel
    choice.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "wedlm_jax"):
        assert not decode("auto", failure="wrong")[1]
        assert other is None or not decode(other)[1]
        for implementation in ("auto", name):
            out, by_kernel = decode(implementation)
            assert by_kernel
            np.testing.assert_allclose(out, expected, atol=5e-6)
    assert f"attention: {kernel}_{platform}, on {platform}" in caplog.messages
    assert f"attention: xla, on {platform}, because of {kernel}_{platform}: wrong" in caplog.messages
    assert not any("tokamax" in line or "splash" in line for line in caplog.messages)
    prompt = jnp.zeros((4, 65, 2, q.shape[3])), *(jnp.zeros((4, 65, 1, q.shape[3])) for _ in "kv")
    longer = KVCache(*(jnp.zeros((1, 4, 1, 128, q.shape[3])) for _ in "kv"))
    taken.clear()
    jax.eval_shape(functools.partial(window, implementation=name, cache=longer, layer=0), *prompt)
    assert taken == []


@pytest.mark.parametrize("head_dim", [8, 80, 96])
def test_a_head_dimension_that_the_split_kernel_cannot_do_is_refused_with_the_reason(monkeypatch, head_dim):
    monkeypatch.setattr(choice, "target_platform", lambda: "gpu")
    q, new = jnp.zeros((4, 4, 2, head_dim)), [jnp.zeros((4, 4, 1, head_dim))] * 2
    empty = KVCache(*(jnp.zeros((1, 4, 1, 64, head_dim)) for _ in "kv"))
    window = CachedWindow(jnp.zeros(4, jnp.int32))
    with pytest.raises(
        UserError, match=f"a head dimension of {head_dim} is not a power of two from 16 on; choose auto"
    ):
        window(q, *new, "tokamax", cache=empty, layer=0)


def test_a_cache_whose_places_need_more_than_32_bits_is_refused():
    q = jax.ShapeDtypeStruct((64, 16, 32, 128), jnp.bfloat16)
    of_one_layer, of_all = (jax.ShapeDtypeStruct((layers, 64, 8, 4096, 128), jnp.bfloat16) for layers in (1, 36))
    assert split_gpu.unsupported(q, of_one_layer) is None
    assert (
        split_gpu.unsupported(q, of_all) == "a cache of 9,663,676,416 keys' elements in one array has 2 ** 31 or more"
    )


def test_without_triton_the_package_loads_and_the_kernel_is_unsupported():
    """jax 0.12 says that its Triton backend of Pallas will go. What is unsupported is done by XLA."""
    program = f"""
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import wedlm_jax
from wedlm_jax.ops.attention import cache, split_gpu
assert split_gpu.unsupported(None, None) == "jax {jax.__version__} has no Triton backend of Pallas"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("attend", [KERNELS["window"], quick_jit(cache.attend_cache)], ids=["by the kernel", "by XLA"])
def test_narrow_heads_are_read_from_a_cache_of_whole_lanes_as_a_tpu_holds_them(attend, monkeypatch):
    monkeypatch.setattr(cache, "target_platform", lambda: "tpu")
    config = dataclasses.replace(TINY, num_layers=2, head_dim=64, num_heads=4, num_kv_heads=2)
    held, random = KVCache.zeros(config, 3, 48), np.random.default_rng(0)
    assert held.k.shape == held.v.shape == (2, 3, 2, 48, 128)
    q, k, v = (jnp.asarray(random.normal(size=(3, 40, heads, 64)), jnp.float32) for heads in (4, 2, 2))
    held, end = held.write(1, jnp.zeros(3, jnp.int32), k, v), np.array([[1, 2], [17, 30], [39, 40]])
    with jax.default_matmul_precision("highest"):
        out = attend(q[:, :2], held.k, held.v, 1, end)
    expected = attention(q[:, :2], k, v, np.arange(40) < end[..., None])[0]
    np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "slots", "head_dim", "reason"),
    [
        (16, 32, 8, 4096, 128, None),
        (64, 64, 8, 4112, 128, None),
        (16, 14, 2, 4096, 64, "a cache of 64 numbers a head is not of whole lanes of 128"),
        (16, 32, 8, 4100, 128, "a cache of 4100 slots is not a multiple of 16"),
        (64, 128, 8, 4096, 128, "64 queries of 128 heads over 8 of 128 are too large for a chip's memory"),
        (64, 64, 1, 4096, 128, "64 queries of 64 heads over 1 of 128 are too large for a chip's memory"),
        (1, 128, 128, 4096, 128, "1 queries of 128 heads over 128 of 128 are too large for a chip's memory"),
    ],
)
def test_what_the_window_kernel_cannot_do_is_said(queries, heads, kv_heads, slots, head_dim, reason):
    q = jax.ShapeDtypeStruct((8, queries, heads, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((36, 8, kv_heads, slots, head_dim), jnp.bfloat16)
    assert window_tpu.unsupported(q, k) == reason


def test_the_window_kernel_is_not_taken_at_a_precision_that_it_does_not_know():
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16, 32, 128), (36, 8, 8, 4096, 128)))
    with jax.default_matmul_precision("high"):
        assert window_tpu.unsupported(q, k) == "it multiplies at matmul_precision default or highest, not high"


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_split_kernel_lowers_for_cuda(head_dim):
    """At the 32 and 8 heads of Qwen3-8B in bfloat16."""
    q = jax.ShapeDtypeStruct((2, 16, 32, head_dim), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 2, 8, 1024, head_dim), jnp.bfloat16)
    end = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    text = lowered_for_cuda(functools.partial(attend_split, layer=0), q, keys, keys, end_BT=end)
    assert text.count("triton") == 2


@pytest.mark.parametrize(("way", "kernel"), [("split_gpu", "split"), ("window_tpu", "window"), ("xla", None)])
def test_in_bfloat16_every_row_errs_little_more_than_by_dense_attention(monkeypatch, way, kernel):
    """Behind eight splits, which are merged, behind two tiles, and behind none; the output is bfloat16 too."""
    if kernel:

        def interpreted(q, *arrays):
            out = INTERPRETED[kernel](q, *arrays)
            assert out.dtype == q.dtype
            return out

        monkeypatch.setattr(cache, f"attend_{kernel}", interpreted)
    assert max(correctness.of_cache(4096, 128, 4, 2, ways=(way,))) <= correctness.ALLOWED


def test_a_cache_is_judged_by_its_worst_row(monkeypatch):
    """Behind an empty cache the error is large; what is wrong here, behind a half full one, is small beside it."""
    attend = correctness.attend_cache
    monkeypatch.setattr(correctness, "attend_cache", lambda *a, **b: attend(*a, **b).at[1].multiply(1 + 2**-7))
    assert max(correctness.of_cache(1024, 64, 4, 2)) > correctness.ALLOWED
