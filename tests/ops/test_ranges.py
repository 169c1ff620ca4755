"""`attend_ranges` and `attend_cache` against dense float64 attention, with tiles so small that every loop runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies

from benchmarks import correctness
from tests.conftest import examples
from tests.quick_jit import quick_jit
from tests.reference.attention import attention, attention_gradients
from wedlm_jax.ops.attention import attend, attend_cache, attend_ranges, cache, ranges

B, T, S, N = 2, 11, 14, 4


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(ranges, "QUERY_TILE", 4)
    monkeypatch.setattr(ranges, "KEY_TILE", 4)
    monkeypatch.setattr(ranges, "DENSE_SCORES", 0)


def random_case(seed, kv_heads=2, head_dim=6, dtype=np.float32):
    """q, k, v, d_out and key ranges, a fifth of them empty."""
    random = np.random.default_rng(seed)
    shapes = [(B, T, N, head_dim), (B, S, kv_heads, head_dim), (B, S, kv_heads, head_dim), (B, T, N, head_dim)]
    bounds = np.sort(random.integers(0, S + 1, (2, B, T)), axis=0)
    start, end = np.where(random.random((B, T)) < 0.2, bounds[:1], bounds)
    return *(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes), start, end


def mask_of(start, end):
    keys = np.arange(S)
    return (np.asarray(start)[..., None] <= keys) & (keys < np.asarray(end)[..., None])


def vjp_of(q, k, v, start, end, d_out, d_lse):
    with jax.default_matmul_precision("highest"):
        value, pullback = jax.vjp(lambda q, k, v: attend_ranges(q, k, v, start, end), q, k, v)
        return value, pullback((d_out, d_lse))


@pytest.fixture
def value_and_gradients(small_tiles):
    return quick_jit(vjp_of)  # a new one, because what is compiled depends on the size of the tiles


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 6), (2, 64), (4, 128)])
def test_key_ranges_are_dense_masked_attention_with_gradients_of_output_and_lse(
    value_and_gradients, kv_heads, head_dim
):
    for seed in range(examples(3, 300)):
        q, k, v, d_out, start, end = random_case(seed, kv_heads, head_dim)
        d_lse = jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, N)), jnp.float32)
        seen = start < end
        d_out, d_lse = (jnp.where(seen.reshape(B, T, *[1] * (x.ndim - 2)), x, 0) for x in (d_out, d_lse))
        (out, lse), gradients = value_and_gradients(q, k, v, start, end, d_out, d_lse)
        assert np.isfinite(out).all() and (np.asarray(lse)[~seen] <= -1e29).all()
        visible = mask_of(start, end) | ~seen[..., None]  # the reference wants a key for everyone
        for ours, expected in zip((out, lse), attention(q, k, v, visible), strict=True):
            np.testing.assert_allclose(np.asarray(ours)[seen], expected[seen], rtol=1e-5, atol=5e-6)
        for ours, expected in zip(gradients, attention_gradients(q, k, v, visible, d_out, d_lse), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
def test_few_queries_are_dense_masked_attention_in_wider_tiles(monkeypatch, queries):
    """As a decoding window has: in tiles of 8, 8, 4 and 2 keys here."""
    monkeypatch.setattr(ranges, "QUERY_TILE", 8)
    monkeypatch.setattr(ranges, "KEY_TILE", 2)
    monkeypatch.setattr(ranges, "DENSE_SCORES", 0)
    q, k, v, d_out, start, end = random_case(0)
    q, d_out, start, end = (x[:, :queries] for x in (q, d_out, start, np.maximum(end, start + 1)))
    (out, lse), gradients = quick_jit(vjp_of)(q, k, v, start, end, d_out, jnp.ones(q.shape[:3]))
    for ours, expected in zip((out, lse), attention(q, k, v, mask_of(start, end)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=5e-6)
    expected = attention_gradients(q, k, v, mask_of(start, end), d_out, jnp.ones(q.shape[:3]))
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=3e-5)


def test_a_gpu_takes_fewer_and_larger_tiles_with_the_same_results(monkeypatch):
    monkeypatch.setattr(ranges, "QUERY_TILE", 2)
    monkeypatch.setattr(ranges, "KEY_TILE", 1)
    monkeypatch.setattr(ranges, "DENSE_SCORES", 4)
    q, k, v, d_out, start, end = random_case(0)
    end = np.maximum(end, start + 1)
    arguments = q, k, v, start, end, d_out, jnp.ones(q.shape[:3])
    on_cpu = quick_jit(vjp_of)(*arguments)
    monkeypatch.setattr(ranges, "target_platform", lambda: "gpu")
    on_gpu = quick_jit(vjp_of)(*arguments)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=3e-5), on_gpu, on_cpu)
    text = jax.jit(lambda *x: attend_ranges(*x)).lower(*arguments[:5]).as_text()
    K, G = k.shape[2], N // k.shape[2]
    assert f"tensor<{K}x{6 * G}x4xf32>" in text, "eleven queries in two tiles, over four keys at a time"
    q, start, end = (x[:, :1] for x in (q, start, end))
    assert "while" not in jax.jit(lambda *x: attend_ranges(*x)).lower(q, k, v, start, end).as_text()


def test_a_window_over_a_long_context_computes_no_score_of_padding():
    H, K, G, window, context = 8, 2, 3, 16, 8192
    q, keys = jnp.ones((1, window, K * G, H)), jnp.ones((1, context, K, H))
    start, end = jnp.zeros((1, window), int), jnp.full((1, window), context)
    text = jax.jit(attend_ranges).lower(q, keys, keys, start, end).as_text()
    assert f"tensor<{K}x{window * G}x{ranges.KEY_TILE * ranges.WIDER_KEY_TILES}xf32>" in text
    assert f"x{ranges.QUERY_TILE * G}x" not in text


def test_a_query_that_sees_nothing_gives_no_gradient(value_and_gradients):
    q, k, v, d_out, start, _ = random_case(0)
    (out, lse), gradients = value_and_gradients(q, k, v, start, start, d_out, jnp.ones((B, T, N)))
    assert np.isfinite(out).all() and (lse <= -1e29).all()
    assert not any(np.asarray(gradient).any() for gradient in gradients)


def test_keys_of_tiles_that_nobody_sees_are_never_read(value_and_gradients):
    q, k, v, d_out, _, _ = random_case(0)
    start, end = np.full((B, T), 4), np.full((B, T), 8)  # the second tile of four
    unread = np.ones((S, 1, 1), bool)
    unread[4:8] = False
    k, v = (jnp.where(unread, jnp.nan, x) for x in (k, v))
    (out, lse), (d_q, d_k, d_v) = value_and_gradients(q, k, v, start, end, d_out, jnp.zeros((B, T, N)))
    for array in (out, lse, d_q, d_k, d_v):
        assert np.isfinite(array).all()


def test_each_row_visits_its_own_tiles_alone(value_and_gradients):
    q, k, v, d_out, _, _ = random_case(0)
    start, end = np.repeat([[0], [8]], T, axis=1), np.repeat([[4], [12]], T, axis=1)
    k = k.at[0, 4:].set(jnp.nan).at[1, :8].set(jnp.nan)
    v = v.at[0, 4:].set(jnp.nan).at[1, :8].set(jnp.nan)
    (out, _), gradients = value_and_gradients(q, k, v, start, end, d_out, jnp.zeros((B, T, N)))
    assert np.isfinite(out).all() and all(np.isfinite(g[1, 8:12]).all() for g in gradients)


def test_bfloat16_is_as_exact_as_dense_attention_in_bfloat16(small_tiles):
    q, k, v, d_out, start, end = random_case(1, head_dim=64)
    start, end = np.zeros_like(start), np.maximum(end, 1)
    visible = mask_of(start, end)

    dense = quick_jit(lambda: in_bfloat16(lambda q, k, v: attend(q, k, v, visible)[0], q, k, v, d_out))()
    tiled = quick_jit(lambda: in_bfloat16(lambda q, k, v: attend_ranges(q, k, v, start, end)[0], q, k, v, d_out))()
    expected = (attention(q, k, v, visible)[0], *attention_gradients(q, k, v, visible, d_out))
    for ours, plain, exact in zip(tiled, dense, expected, strict=True):
        assert ours.dtype == jnp.bfloat16
        error, plain_error = (np.linalg.norm(np.asarray(x, np.float64) - exact) for x in (ours, plain))
        assert error <= 1.5 * plain_error


@pytest.mark.parametrize(("head_dim", "kv_heads", "block_size"), [(64, 2, 4), (128, 1, 32)])
def test_bfloat16_of_both_streams_is_as_exact_as_dense_attention_in_bfloat16(
    monkeypatch, head_dim, kv_heads, block_size
):
    monkeypatch.setattr(ranges, "QUERY_TILE", 64)
    monkeypatch.setattr(ranges, "KEY_TILE", 64)
    monkeypatch.setattr(ranges, "DENSE_SCORES", 0)
    errors = correctness.of_dual_stream({"xla": correctness.by("xla")}, 128, head_dim, 2, kv_heads, block_size)["xla"]
    assert max(errors) <= correctness.ALLOWED
    assert max(correctness.of_cache(256, head_dim, 2, kv_heads)) <= correctness.ALLOWED


def in_bfloat16(function, q, k, v, d_out):
    """Output and gradients of `function` in bfloat16."""
    value, pullback = jax.vjp(function, *(x.astype(jnp.bfloat16) for x in (q, k, v)))
    return value, *pullback(d_out.astype(jnp.bfloat16))


def loss_of(q, k, v, start, end):
    out, lse = attend_ranges(q, k, v, start, end)
    return jnp.sum(out) + jnp.sum(lse)


def test_no_array_holds_the_scores_of_all_queries_and_keys():
    length = 2048
    q, k = jnp.zeros((1, length, 4, 8)), jnp.zeros((1, length, 2, 8))
    end = jnp.arange(1, length + 1)[None]
    gradients = jax.jit(jax.grad(loss_of, argnums=(0, 1, 2)))
    compiled = gradients.lower(q, k, k, jnp.zeros_like(end), end).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length * 4


def test_a_policy_that_keeps_attention_by_name_runs_its_forward_once(small_tiles):
    q, k, v, _, start, end = random_case(0)

    def exponentials(policy):
        loss = jax.checkpoint(loss_of, policy=policy)
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, start, end))
        return text.count("= exp")

    kept = exponentials(checkpoint_policies.save_only_these_names(ranges.RESIDUALS))
    assert kept < exponentials(checkpoint_policies.nothing_saveable)
    assert kept == exponentials(checkpoint_policies.everything_saveable)


@pytest.fixture
def through_cache(monkeypatch):
    monkeypatch.setattr(cache, "smallest_context", lambda rows: 3)
    return quick_jit(lambda *arguments: attend_cache(*arguments))


def test_a_cache_is_read_up_to_every_query_s_own_slot(through_cache):
    for seed in range(examples(5, 300)):
        random = np.random.default_rng(seed)
        q, k, v, _, _, _ = random_case(seed)
        end = random.integers(1, random.integers(2, S + 2), (B, T))
        k_layers, v_layers = (jnp.stack([jnp.full_like(x, jnp.nan), x]).swapaxes(2, 3) for x in (k, v))
        with jax.default_matmul_precision("highest"):
            out = through_cache(q, k_layers, v_layers, 1, end)
        np.testing.assert_allclose(out, attention(q, k, v, mask_of(np.zeros_like(end), end))[0], atol=5e-6)


def test_the_unused_end_of_a_cache_is_never_read(through_cache):
    q, k, v, _, _, _ = random_case(0)
    end = np.full((B, T), 3)  # the smallest context is 4, of 14 slots
    k, v = (x.at[:, 4:].set(jnp.nan)[None].swapaxes(2, 3) for x in (k, v))
    assert np.isfinite(through_cache(q, k, v, 0, end)).all()
    assert np.isnan(through_cache(q, k, v, 0, end + 2)).any(), "the next one is 7: the poison can be found"
