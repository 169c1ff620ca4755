"""Dense attention in numpy float64, a loop over rows and heads, with its gradients written out; and cross-entropy.

Shares no code with the package. `visible` is bool [B, T, S]; every query must see at least one key.
"""

from __future__ import annotations

import numpy as np


def attention(q, k, v, visible) -> tuple[np.ndarray, np.ndarray]:
    """out [B, T, N, H] and lse [B, T, N] of queries [B, T, N, H] over keys and values [B, S, K, H]."""
    q, k, v = _float64(q, k, v)
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, n, kv in _heads(q, k):
        scores = _scores(q[b, :, n], k[b, :, kv], visible[b])
        peak = scores.max(axis=1, keepdims=True)
        lse[b, :, n] = (peak + np.log(np.exp(scores - peak).sum(axis=1, keepdims=True)))[:, 0]
        out[b, :, n] = np.exp(scores - lse[b, :, n, None]) @ v[b, :, kv]
    return out, lse


def attention_gradients(q, k, v, visible, d_out, d_lse=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients with respect to q, k and v of sum(d_out * out) + sum(d_lse * lse)."""
    q, k, v, d_out = _float64(q, k, v, d_out)
    d_lse = np.zeros(q.shape[:3]) if d_lse is None else np.asarray(d_lse, np.float64)
    _, lse = attention(q, k, v, visible)
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    scale = q.shape[-1] ** -0.5
    for b, n, kv in _heads(q, k):
        weights = np.exp(_scores(q[b, :, n], k[b, :, kv], visible[b]) - lse[b, :, n, None])
        d_weights = d_out[b, :, n] @ v[b, :, kv].T
        pull = np.sum(weights * d_weights, axis=1, keepdims=True)
        d_scores = weights * (d_weights - pull + d_lse[b, :, n, None])
        d_q[b, :, n] = d_scores @ k[b, :, kv] * scale
        d_k[b, :, kv] += d_scores.T @ q[b, :, n] * scale
        d_v[b, :, kv] += weights.T @ d_out[b, :, n]
    return d_q, d_k, d_v


def cross_entropy(hidden, head, targets) -> np.ndarray:
    """-log softmax(hidden @ head.T)[target]: [T] from hidden [T, D], head [V, D], targets [T]."""
    hidden, head = _float64(hidden, head)
    losses = []
    for row, target in zip(hidden, targets, strict=True):
        logits = head @ row
        losses.append(np.log(np.sum(np.exp(logits - logits.max()))) + logits.max() - logits[target])
    return np.array(losses)


def cross_entropy_gradients(hidden, head, targets, d_losses) -> tuple[np.ndarray, np.ndarray]:
    """Gradients with respect to hidden and head of sum(d_losses * losses)."""
    hidden, head, d_losses = _float64(hidden, head, d_losses)
    d_hidden, d_head = np.zeros(hidden.shape), np.zeros(head.shape)
    for t, target in enumerate(targets):
        logits = head @ hidden[t]
        d_logits = np.exp(logits - logits.max())
        d_logits /= d_logits.sum()
        d_logits[target] -= 1
        d_hidden[t] = d_losses[t] * d_logits @ head
        d_head += d_losses[t] * np.outer(d_logits, hidden[t])
    return d_hidden, d_head


def _scores(q_TH: np.ndarray, k_SH: np.ndarray, visible_TS: np.ndarray) -> np.ndarray:
    return np.where(visible_TS, q_TH @ k_SH.T * q_TH.shape[-1] ** -0.5, -np.inf)


def _heads(q: np.ndarray, k: np.ndarray):
    """(row, query head, the kv head that it shares) for all of them."""
    rows, heads, shared = q.shape[0], q.shape[2], q.shape[2] // k.shape[2]
    return [(b, n, n // shared) for b in range(rows) for n in range(heads)]


def _float64(*arrays) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in arrays]
