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
from wedlm_jax.ops.attention import cache, split_gpu, trial
from wedlm_jax.ops.attention.split_gpu import attend_split

interpreted = quick_jit(functools.partial(attend_split, interpret=True))


def case(seed, *, queries, heads, kv_heads, slots, head_dim=64, layers=2):
    """Windows behind cursors from none to the last that fits: q, a cache of `layers` layers, and the ends of the ranges."""
    random = np.random.default_rng(seed)
    cache = layers, 4, kv_heads, slots, head_dim
    length = np.array([0, random.integers(slots - queries), random.integers(slots - queries), slots - queries])
    arrays = [random.normal(size=shape) for shape in ((4, queries, heads, head_dim), cache, cache)]
    return [jnp.asarray(x, jnp.float32) for x in arrays], length[:, None] + np.arange(1, queries + 1)


def assert_dense(q, k, v, layer, end):
    with jax.default_matmul_precision("highest"):
        out = interpreted(q, k, v, layer, end)
    keys, values = (np.swapaxes(x[layer], 1, 2) for x in (k, v))
    np.testing.assert_allclose(out, attention(q, keys, values, np.arange(k.shape[3]) < end[..., None])[0], atol=5e-6)


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "slots"),
    [(1, 2, 2, 64), (16, 8, 2, 300), (5, 7, 1, 700), (33, 4, 2, 1024)],
    ids=["one query", "a window", "seven queries a key", "two programs of rows, of sixteen splits"],
)
def test_splits_are_dense_attention(queries, heads, kv_heads, slots):
    for seed in range(examples(1, 20)):
        arrays, end = case(seed, queries=queries, heads=heads, kv_heads=kv_heads, slots=slots)
        assert_dense(*arrays, seed % 2, end)


def test_the_queries_of_a_row_may_see_ranges_of_any_lengths():
    """As the tokens of a window that are read have, and rows that are idle."""
    (q, k, v), _ = case(0, queries=6, heads=4, kv_heads=2, slots=500)
    assert_dense(q, k, v, 1, np.random.default_rng(0).integers(1, 501, (4, 6)))


def test_what_no_row_uses_is_not_read():
    """Not a number there, and nowhere in the output."""
    (q, k, v), _ = case(0, queries=4, heads=2, kv_heads=1, slots=700)
    end = np.broadcast_to(np.array([1, 64, 65, 300])[:, None], (4, 4))
    unused = np.arange(700)[:, None] >= np.array([1, 64, 65, 300])[:, None, None, None]
    k, v = (jnp.where(unused, jnp.nan, x) for x in (k, v))
    out = interpreted(q, k, v, 0, end)
    assert np.isfinite(out).all()
    assert_dense(q, *(jnp.where(unused, 0, x) for x in (k, v)), 0, end)


def test_rows_that_have_finished_past_the_used_part_stay_finite():
    (q, k, v), end = case(0, queries=8, heads=2, kv_heads=1, slots=64)
    assert np.isfinite(interpreted(q, k, v, 0, end + 60)).all()


def test_windows_are_attended_by_it_on_a_gpu_alone_and_prompts_never(monkeypatch):
    """And by "auto" where its trial there says nothing against it; asking for it where no GPU is gets told so."""
    taken = []
    monkeypatch.setattr(cache, "attend_split", lambda *a: taken.append("split") or attend_split(*a, interpret=True))
    (q, k, v), _ = case(0, queries=4, heads=2, kv_heads=1, slots=64)
    empty = KVCache(*(jnp.zeros((1, 4, 1, 64, 64)) for _ in "kv"))
    window = CachedWindow(jnp.zeros(4, jnp.int32))
    new = k[0, :, 0, :4, None], v[0, :, 0, :4, None]

    def decode(implementation, failure=None):
        monkeypatch.setattr(trial, "failure", lambda *_: failure)
        taken.clear()
        return window(q, *new, implementation, cache=empty, layer=0)[0], bool(taken)

    assert [decode(implementation)[1] for implementation in ("auto", "xla", "splash")] == [False] * 3
    with pytest.raises(UserError, match="model.attention=tokamax is for GPUs, and this is cpu"):
        decode("tokamax")
    monkeypatch.setattr("wedlm_jax.ops.attention.choice.target_platform", lambda: "gpu")
    expected, by_split = decode("xla")
    assert not by_split
    assert not decode("auto", failure="wrong")[1]
    for implementation in ("auto", "tokamax"):
        out, by_split = decode(implementation)
        assert by_split
        np.testing.assert_allclose(out, expected, atol=5e-6)
    prompt = jnp.zeros((4, 65, 2, 64)), *(jnp.zeros((4, 65, 1, 64)) for _ in "kv")
    longer = KVCache(*(jnp.zeros((1, 4, 1, 128, 64)) for _ in "kv"))
    taken.clear()
    jax.eval_shape(functools.partial(window, implementation="tokamax", cache=longer, layer=0), *prompt)
    assert taken == []


@pytest.mark.parametrize("head_dim", [8, 80, 96])
def test_a_head_dimension_that_the_kernel_cannot_do_is_refused_with_the_reason(monkeypatch, head_dim):
    monkeypatch.setattr("wedlm_jax.ops.attention.choice.target_platform", lambda: "gpu")
    (q, k, v), _ = case(0, queries=4, heads=2, kv_heads=1, slots=64, head_dim=head_dim)
    empty = KVCache(*(jnp.zeros((1, 4, 1, 64, head_dim)) for _ in "kv"))
    window = CachedWindow(jnp.zeros(4, jnp.int32))
    with pytest.raises(
        UserError, match=f"a head dimension of {head_dim} is not a power of two from 16 on; choose auto"
    ):
        window(q, k[0, :, 0, :4, None], v[0, :, 0, :4, None], "tokamax", cache=empty, layer=0)


def test_a_cache_whose_places_need_more_than_32_bits_is_refused():
    q = jax.ShapeDtypeStruct((64, 16, 32, 128), jnp.bfloat16)
    of_one_layer, of_all = (jax.ShapeDtypeStruct((layers, 64, 8, 4096, 128), jnp.bfloat16) for layers in (1, 36))
    assert split_gpu.unsupported(q, of_one_layer) is None
    assert (
        split_gpu.unsupported(q, of_all) == "a cache of 9,663,676,416 keys' elements in one array has 2 ** 31 or more"
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_the_kernel_lowers_for_cuda(head_dim):
    """At the 32 and 8 heads of Qwen3-8B in bfloat16."""
    q = jax.ShapeDtypeStruct((2, 16, 32, head_dim), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 2, 8, 1024, head_dim), jnp.bfloat16)
    end = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    text = lowered_for_cuda(functools.partial(attend_split, layer=0), q, keys, keys, end_BT=end)
    assert text.count("triton") == 2


@pytest.mark.parametrize("split", [True, False], ids=["split", "not split"])
def test_in_bfloat16_every_row_errs_little_more_than_by_dense_attention(monkeypatch, split):
    """Behind eight splits, which are merged, and behind none; the output is bfloat16 too."""

    def interpreted_split(q, *arrays):
        out = attend_split(q, *arrays, interpret=True)
        assert out.dtype == q.dtype
        return out

    monkeypatch.setattr(cache, "attend_split", interpreted_split)
    assert max(correctness.of_cache(4096, 64, 4, 2, splits=(split,))) <= correctness.ALLOWED


def test_a_cache_is_judged_by_its_worst_row(monkeypatch):
    """Behind an empty cache the error is large; what is wrong here, behind a half full one, is small beside it."""
    attend = correctness.attend_cache
    monkeypatch.setattr(correctness, "attend_cache", lambda *a, **b: attend(*a, **b).at[1].multiply(1 + 2**-7))
    assert max(correctness.of_cache(1024, 64, 4, 2)) > correctness.ALLOWED
