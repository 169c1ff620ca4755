"""Losses of an output layer that is not trained: no gradient of it is made, and the logits of few rows are held at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.sharding import constrain

LOGITS = 2**22  # of each row of the batch, held at a time: 16 MiB in float32


def cross_entropy_of_targets(
    hidden_BCD: jax.Array, head_VD: jax.Array, targets_BC: jax.Array, *, precision: str | None = None
) -> jax.Array:
    """-log softmax(hidden @ head.T)[target] in nats, float32 [B, C]; differentiable in hidden alone."""
    chex.assert_equal_shape_prefix([hidden_BCD, targets_BC], 2)

    def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked

    head_VD = _whole(head_VD, hidden_BCD)
    product = functools.partial(_logits, head_VD=head_VD, precision=precision)
    return _by_chunks(lambda hidden, targets: loss(product(hidden), targets), head_VD.shape[0], hidden_BCD, targets_BC)


def divergence_from_teacher(
    hidden_BCD: jax.Array,
    head_VD: jax.Array,
    teacher_BCD: jax.Array,
    *,
    temperature: float = 1.0,
    precision: str | None = None,
) -> jax.Array:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) in nats, float32 [B, C], both through this head (arXiv 1503.02531).

    Its gradient, in hidden alone, is that of the cross-entropy, and it is 0 where the two agree.
    """
    chex.assert_equal_shape([hidden_BCD, teacher_BCD])
    head_VD = _whole(head_VD, hidden_BCD)

    def loss(hidden: jax.Array, teacher: jax.Array) -> jax.Array:
        log_p, log_q = (
            jax.nn.log_softmax(_logits(x, head_VD=head_VD, precision=precision) / temperature, axis=-1)
            for x in (hidden, jax.lax.stop_gradient(teacher))
        )
        return temperature**2 * jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)

    return _by_chunks(loss, head_VD.shape[0], hidden_BCD, teacher_BCD)


def _whole(head_VD: jax.Array, hidden: jax.Array) -> jax.Array:
    """The head in the dtype of its products, gathered along D once: inside the loop over chunks XLA would gather it for each."""
    return constrain(jax.lax.stop_gradient(head_VD).astype(hidden.dtype), "vocab", None)


def _logits(hidden: jax.Array, *, head_VD: jax.Array, precision: str | None) -> jax.Array:
    logits = jnp.einsum("BcD,VD->BcV", hidden, head_VD, precision=precision, preferred_element_type=jnp.float32)
    return constrain(logits, "batch", None, "vocab")


def _by_chunks(loss: Callable[..., jax.Array], vocabulary: int, *rows: jax.Array) -> jax.Array:
    """`loss` of arrays [B, C, ...], some columns at a time; the backward pass makes their logits again."""
    B, C = rows[0].shape[:2]
    width = max(1, min(C, LOGITS // vocabulary))
    count = -(-C // width)

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * width - C), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, count, width, *x.shape[2:]).swapaxes(0, 1)

    run = jax.checkpoint(loss, prevent_cse=False)
    losses = jax.lax.map(lambda part: run(*part), tuple(map(chunks, rows)))
    return losses.swapaxes(0, 1).reshape(B, -1)[:, :C]
