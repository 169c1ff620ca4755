"""`attend` and `merge` against dense float64 attention: values, log-sum-exps and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick_jit import quick_jit
from tests.reference.attention import attention, attention_gradients
from wedlm_jax.ops.attention import attend, merge
from wedlm_jax.ops.attention.dense import scores

B, T, S, N, H = 2, 3, 5, 4, 6
KV_HEADS = [1, 2, 4]  # grouped-query ratios 4, 2 and 1


def arrays(kv_heads, seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (B, S, kv_heads, H), (B, S, kv_heads, H)]
    q, k, v = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    visible = random.random((B, T, S)) < 0.5
    visible[..., 0] = True
    return scale * q, k, v, visible


@functools.partial(quick_jit, static_argnames="function")
def value_and_gradients(function, q, k, v, cotangents):
    value, pullback = jax.vjp(function, q, k, v)
    return value, pullback(cotangents)


@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_attend_equals_dense_float64_attention_with_gradients(kv_heads):
    q, k, v, visible = arrays(kv_heads)
    random = np.random.default_rng(1)
    d_out, d_lse = random.normal(size=q.shape), random.normal(size=q.shape[:3])
    cotangents = (jnp.float32(d_out), jnp.float32(d_lse))
    with jax.default_matmul_precision("highest"):
        value, gradients = value_and_gradients(lambda q, k, v: attend(q, k, v, visible), q, k, v, cotangents)
    for ours, expected in zip(value, attention(q, k, v, visible), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6)
    expected = attention_gradients(q, k, v, visible, d_out, d_lse)
    for ours, gradient in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, gradient, atol=5e-6)


@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_merge_of_two_disjoint_key_sets_is_attention_over_their_union(kv_heads):
    q, k, v, visible = arrays(kv_heads)
    visible[0, 1] = [True, True, False, False, False]  # nothing in the second part
    visible[1, 2] = [False, False, False, True, True]  # nothing in the first part

    def in_two_parts(q, k, v):
        first = attend(q, k[:, :2], v[:, :2], visible[:, :, :2])
        second = attend(q, k[:, 2:], v[:, 2:], visible[:, :, 2:])
        return merge(*first, *second)

    d_out = np.random.default_rng(1).normal(size=q.shape)
    with jax.default_matmul_precision("highest"):
        value, gradients = value_and_gradients(in_two_parts, q, k, v, jnp.float32(d_out))
    np.testing.assert_allclose(value, attention(q, k, v, visible)[0], atol=2e-6)
    for ours, gradient in zip(gradients, attention_gradients(q, k, v, visible, d_out), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, gradient, atol=5e-6)


def test_a_query_that_sees_nothing_is_finite_and_weighs_nothing():
    q, k, v, _ = arrays(2)
    attend_by = quick_jit(lambda visible: attend(q, k, v, visible))
    out, lse = attend_by(jnp.zeros((T, S), bool))
    assert np.isfinite(out).all() and (lse <= -1e29).all()
    seen_out, seen_lse = attend_by(jnp.ones((T, S), bool))
    np.testing.assert_array_equal(merge(out, lse, seen_out, seen_lse), seen_out)
    np.testing.assert_array_equal(merge(seen_out, seen_lse, out, lse), seen_out)


def test_scores_of_thousands_neither_overflow_nor_make_nan_gradients():
    q, k, v, visible = arrays(2, scale=2000.0)
    loss = lambda q, k, v: jnp.sum(merge(*attend(q, k, v, visible), *attend(q, k, v, ~visible)))  # noqa: E731
    value, gradients = quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)


def test_an_invisible_key_has_no_influence_and_no_gradient():
    q, k, v, visible = arrays(2)
    visible[:, :, 3] = False
    squares = lambda k, v: jnp.sum(attend(q, k, v, visible)[0] ** 2)  # noqa: E731
    gradients = quick_jit(jax.grad(squares, argnums=(0, 1)))(k, v)
    assert not any(np.asarray(g)[:, 3].any() for g in gradients)
    values = quick_jit(lambda k: attend(q, k, v, visible)[0])
    np.testing.assert_array_equal(values(np.where(np.arange(S)[:, None, None] == 3, np.float32(50), k)), values(k))


def test_bfloat16_inputs_keep_a_float32_softmax():
    q, k, v, visible = arrays(2)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out, lse = quick_jit(attend)(*low, visible)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    expected_out, expected_lse = attention(*low, visible)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected_out, atol=0.03)
    np.testing.assert_allclose(lse, expected_lse, atol=0.03)
    # A CPU sums bfloat16 in float32, whatever is asked for; others do not.
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general\[", str(jax.make_jaxpr(attend)(*low, visible)))
    assert products == ["f32", "f32"]


def test_visible_broadcasts_over_rows():
    q, k, v, _ = arrays(2)
    causal = np.tril(np.ones((T, S), bool), 1)
    every_row = np.broadcast_to(causal, (B, T, S))
    values = quick_jit(lambda visible: attend(q, k, v, visible)[0])
    np.testing.assert_array_equal(values(causal), values(every_row))


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim"),
    [(1, 256, 64), (2, 256, 64), (32, 300, 128), (33, 256, 64), (8, 255, 64), (8, 256, 32)],
)
def test_scores_are_the_same_products_whichever_factor_comes_first(queries, keys, head_dim):
    """Keys first for a window's few queries on a CPU, and queries first for one, for many, over few keys and for narrow heads."""
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(2, 3, rows, head_dim)).astype(np.float32) for rows in (queries, keys))
    program = jax.jit(scores).lower(q, k)
    assert ("optimization_barrier" in program.as_text()) == (1 < queries <= 32 and keys >= 256 and head_dim >= 64)
    np.testing.assert_allclose(program.compile()(q, k), q.astype(float) @ k.swapaxes(2, 3), rtol=1e-5, atol=1e-4)
