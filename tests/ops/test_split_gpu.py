"""The split-KV kernel for GPUs, interpreted, against dense float64 attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import correctness
from tests.conftest import examples
from tests.ops.cuda import lowered_for_cuda
from tests.quick_jit import quick_jit
from tests.reference.attention import attention
from wedlm_jax.errors import UserError
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.ops.attention import cache
from wedlm_jax.ops.attention.split_gpu import attend_split

interpreted = quick_jit(functools.partial(attend_split, interpret=True))


def case(seed, *, queries, heads, kv_heads, slots, head_dim=64):
    """Windows behind cursors from none to the last that fits."""
    random = np.random.default_rng(seed)
    shapes = [(4, queries, heads, head_dim), (4, slots, kv_heads, head_dim), (4, slots, kv_heads, head_dim)]
    length = np.array([0, random.integers(slots - queries), random.integers(slots - queries), slots - queries])
    end = length[:, None] + np.arange(1, queries + 1)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes], end


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "slots"),
    [(1, 2, 2, 64), (16, 8, 2, 300), (5, 7, 1, 700), (33, 4, 2, 1024)],
    ids=["one query", "a window", "seven queries a key", "two programs of rows, four splits"],
)
def test_splits_are_dense_attention(queries, heads, kv_heads, slots):
    for seed in range(examples(1, 20)):
        (q, k, v), end = case(seed, queries=queries, heads=heads, kv_heads=kv_heads, slots=slots)
        with jax.default_matmul_precision("highest"):
            out = interpreted(q, k, v, end)
        visible = np.arange(slots) < end[..., None]
        np.testing.assert_allclose(out, attention(q, k, v, visible)[0], atol=5e-6)


def test_rows_that_have_finished_past_the_used_part_stay_finite():
    (q, k, v), end = case(0, queries=8, heads=2, kv_heads=1, slots=64)
    assert np.isfinite(interpreted(q, k, v, np.minimum(end + 60, 64))).all()


def test_only_who_asks_for_gpu_kernels_decodes_by_them(monkeypatch):
    """On TPU and CPU nothing else is chosen, "auto" never takes them, and asking for them where no GPU is gets told so."""
    asked = []
    monkeypatch.setattr(cache, "attend_split", lambda *a: asked.append("split") or attend_split(*a, interpret=True))
    (q, k, v), _ = case(0, queries=4, heads=2, kv_heads=1, slots=64)
    empty = KVCache(*(jnp.zeros((1, 4, 1, 64, 64)) for _ in "kv"))
    window = CachedWindow(jnp.zeros(4, jnp.int32))
    for implementation in ("auto", "xla", "splash"):
        window(q, k[:, :4], v[:, :4], implementation, cache=empty, layer=0)
    assert asked == []
    with pytest.raises(UserError, match="model.attention=tokamax is for GPUs, and this is cpu"):
        window(q, k[:, :4], v[:, :4], "tokamax", cache=empty, layer=0)
    monkeypatch.setattr("wedlm_jax.ops.attention.choice.target_platform", lambda: "gpu")
    expected, _ = window(q, k[:, :4], v[:, :4], "xla", cache=empty, layer=0)
    out, _ = window(q, k[:, :4], v[:, :4], "tokamax", cache=empty, layer=0)
    assert asked == ["split"]
    np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.parametrize("head_dim", [8, 80, 96])
def test_a_head_dimension_that_the_kernel_cannot_do_is_refused_with_the_reason(monkeypatch, head_dim):
    monkeypatch.setattr("wedlm_jax.ops.attention.choice.target_platform", lambda: "gpu")
    (q, k, v), _ = case(0, queries=4, heads=2, kv_heads=1, slots=64, head_dim=head_dim)
    empty = KVCache(*(jnp.zeros((1, 4, 1, 64, head_dim)) for _ in "kv"))
    window = CachedWindow(jnp.zeros(4, jnp.int32))
    with pytest.raises(
        UserError, match=f"a head dimension of {head_dim} is not a power of two from 16 on; choose auto"
    ):
        window(q, k[:, :4], v[:, :4], "tokamax", cache=empty, layer=0)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_kernel_lowers_for_cuda(head_dim):
    """At the 32 and 8 heads of Qwen3-8B in bfloat16."""
    q = jax.ShapeDtypeStruct((2, 16, 32, head_dim), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((2, 1024, 8, head_dim), jnp.bfloat16)
    end = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    text = lowered_for_cuda(attend_split, q, keys, keys, end)
    assert "triton" in text
    assert text.count("stablehlo.optimization_barrier") == 2  # of a kernel's own merge, and of ours


@pytest.mark.parametrize("split", [True, False], ids=["split", "not split"])
def test_in_bfloat16_every_row_errs_little_more_than_by_dense_attention(monkeypatch, split):
    """Behind eight splits, which are merged, and behind none; the output is bfloat16 too."""

    def interpreted_split(q, *arrays):
        out = attend_split(q, *arrays, interpret=True)
        assert out.dtype == q.dtype
        return out

    monkeypatch.setattr(cache, "attend_split", interpreted_split)
    assert max(correctness.of_cache(4096, 64, 4, 2, split=split)) <= correctness.ALLOWED


def test_a_cache_is_judged_by_its_worst_row(monkeypatch):
    """Behind an empty cache the error is large; what is wrong here, behind a half full one, is small beside it."""
    attend = correctness.attend_cache
    monkeypatch.setattr(correctness, "attend_cache", lambda *a, **b: attend(*a, **b).at[1].multiply(1 + 2**-7))
    assert max(correctness.of_cache(1024, 64, 4, 2)) > correctness.ALLOWED
