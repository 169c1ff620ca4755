import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wedlm_jax.ops.cross_entropy as module
from tests.quick_jit import quick_jit
from tests.reference.attention import cross_entropy as reference
from tests.reference.attention import cross_entropy_gradients as reference_gradients
from wedlm_jax.ops.cross_entropy import cross_entropy

T, D, V = 23, 5, 40  # T is no multiple of any chunk below


def arrays():
    random = np.random.default_rng(0)
    hidden, head = random.normal(size=(T, D)).astype(np.float32), random.normal(size=(V, D)).astype(np.float32)
    return hidden, head, random.integers(0, V, T), random.normal(size=T)


def losses_and_gradients(hidden, head, targets, d_losses):
    losses, pullback = jax.vjp(lambda hidden, head: cross_entropy(hidden, head, targets), hidden, head)
    return losses, pullback(jnp.float32(d_losses))


def lowered_text():
    @jax.jit
    def run(*arguments):
        return losses_and_gradients(*arguments)

    return run.lower(*arrays()).as_text()


def largest_array(text: str) -> int:
    """Elements of the largest tensor that a lowered program names."""
    return max(math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+\w+)", text))


@pytest.mark.parametrize("max_logits", [2**24, 4 * V, 8 * V + 7, 1])
def test_chunked_and_unchunked_equal_float64_with_gradients(monkeypatch, max_logits):
    monkeypatch.setattr(module, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(module, "MIN_TOKENS", 1)
    hidden, head, targets, d_losses = arrays()
    with jax.default_matmul_precision("highest"):
        losses, gradients = quick_jit(losses_and_gradients)(hidden, head, targets, d_losses)
    np.testing.assert_allclose(losses, reference(hidden, head, targets), atol=2e-6)
    for ours, expected in zip(gradients, reference_gradients(hidden, head, targets, d_losses), strict=True):
        np.testing.assert_allclose(ours, expected, atol=5e-6)


def test_chunks_never_hold_the_logits_of_all_tokens(monkeypatch):
    assert largest_array(lowered_text()) >= T * V, "unchunked, the logits are there: the search below can find them"
    monkeypatch.setattr(module, "MAX_LOGITS", 4 * V)
    monkeypatch.setattr(module, "MIN_TOKENS", 1)
    assert largest_array(lowered_text()) < T * V


def test_losses_are_float32_for_bfloat16_inputs():
    hidden, head, targets, _ = arrays()
    losses = quick_jit(cross_entropy)(
        jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), jnp.asarray(targets)
    )
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, reference(hidden, head, targets), atol=0.05)


def test_logits_of_hundreds_do_not_overflow():
    hidden, head, targets, _ = arrays()
    losses = quick_jit(cross_entropy)(300 * hidden, head, targets)
    np.testing.assert_allclose(losses, reference(300 * hidden, head, targets), rtol=1e-5, atol=1e-3)
