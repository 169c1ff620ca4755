"""Losses of an output layer that is not trained: no gradient of it is made, and the logits of few rows are held at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.sharding import constrain, mesh_in_force, rows_of_a_device

LOGITS = 2**22  # of each row of the batch, held at a time: 16 MiB in float32, or more where ROWS asks for it
# Of a product on a device, at least: of fewer, to read the head takes longer than to multiply by it. Of V = 152k these are 156 MB
# of logits in float32.
ROWS = 256

# (logits [B, c, V], what a loss compares them with [B, c, ...], the product with the head) -> losses [B, c], d_logits [B, c, V]
Loss = Callable[[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]], tuple[jax.Array, jax.Array]]


def cross_entropy_of_targets(
    hidden_BCD: jax.Array, head_VD: jax.Array, targets_BC: jax.Array, *, precision: str | None = None
) -> jax.Array:
    """-log softmax(hidden @ head.T)[target] in nats, float32 [B, C]; differentiable in hidden alone."""
    chex.assert_equal_shape_prefix([hidden_BCD, targets_BC], 2)

    def loss(logits: jax.Array, targets: jax.Array, product: object) -> tuple[jax.Array, jax.Array]:
        log_p = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return -picked, jnp.exp(log_p) - jax.nn.one_hot(targets, logits.shape[-1])

    return _by_chunks(loss, precision, hidden_BCD, _whole(head_VD, hidden_BCD), targets_BC)


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

    def loss(
        logits: jax.Array, teacher: jax.Array, product: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        log_p, log_q = (jax.nn.log_softmax(x / temperature, axis=-1) for x in (logits, product(teacher)))
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        return temperature**2 * jnp.sum(q * (log_q - log_p), axis=-1), temperature * (p - q)

    return _by_chunks(loss, precision, hidden_BCD, _whole(head_VD, hidden_BCD), teacher_BCD)


def _whole(head_VD: jax.Array, hidden: jax.Array) -> jax.Array:
    """The head in the dtype of its products, gathered along D once: inside the loop over chunks XLA would gather it for each."""
    return constrain(jax.lax.stop_gradient(head_VD).astype(hidden.dtype), "vocab", None)


def _logits(hidden: jax.Array, *, head_VD: jax.Array, precision: str | None) -> jax.Array:
    logits = jnp.einsum("BcD,VD->BcV", hidden, head_VD, precision=precision, preferred_element_type=jnp.float32)
    return constrain(logits, "batch", None, "vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_chunks(
    loss: Loss, precision: str | None, hidden_BCD: jax.Array, head_VD: jax.Array, other: jax.Array
) -> jax.Array:
    """The losses [B, C], some columns at a time. The gradient in hidden is made beside them, from the same logits."""
    product = functools.partial(_logits, head_VD=head_VD, precision=precision)
    return _map_chunks(lambda hidden, other: loss(product(hidden), other, product)[0], head_VD, hidden_BCD, other)


def _forward(
    loss: Loss, precision: str | None, hidden_BCD: jax.Array, head_VD: jax.Array, other: jax.Array
) -> tuple[jax.Array, jax.Array]:
    product = functools.partial(_logits, head_VD=head_VD, precision=precision)

    def with_gradient(hidden: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, d_logits = loss(product(hidden), other, product)
        d_hidden = jnp.einsum(
            "BcV,VD->BcD",
            d_logits.astype(hidden.dtype),
            head_VD,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return losses, constrain(d_hidden.astype(hidden.dtype), "batch", None, None)

    return _map_chunks(with_gradient, head_VD, hidden_BCD, other)


def _backward(
    loss: Loss, precision: str | None, d_hidden_BCD: jax.Array, d_losses_BC: jax.Array
) -> tuple[jax.Array, None, None]:
    return (d_losses_BC[..., None] * d_hidden_BCD).astype(d_hidden_BCD.dtype), None, None


_by_chunks.defvjp(_forward, _backward)


def _map_chunks(run: Callable[..., Any], head_VD: jax.Array, *rows: jax.Array) -> Any:
    """What `run` makes of arrays [B, C, ...], each [B, C, ...], some columns at a time."""
    B, C = rows[0].shape[:2]
    width = max(1, min(C, max(LOGITS // head_VD.shape[0], -(-ROWS // rows_of_a_device(B, mesh_in_force())))))
    count = -(-C // width)

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * width - C), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, count, width, *x.shape[2:]).swapaxes(0, 1)

    made = jax.lax.map(lambda part: run(*part), tuple(map(chunks, rows)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, -1, *x.shape[3:])[:, :C], made)
