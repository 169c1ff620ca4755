"""Whether the flash kernels for GPUs are right on the GPU that is here, before "auto" takes them.

They are another library's, reached below its public functions, for kinds of GPU that nobody here has. So the first step that
could use them runs them once on a short row of its own heads and dtype, forward and backward, beside dense attention: where
they end with an error (a GPU too old for them, say) or with other numbers, XLA's tiles are used and the log says why. What is
tried is whether they are wrong; how exact and how fast they are is measured by benchmarks/gpu.sh.
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.ops.attention.blocks import OwnBlocks
from wedlm_jax.ops.attention.choice import PLATFORMS
from wedlm_jax.ops.attention.dense import attend
from wedlm_jax.ops.attention.flash_gpu import flash_attention

TOKENS, BLOCK_SIZE = 512, 32
DOCUMENT_STARTS = (0, 160, 416)  # of one row; the other is one document

# Of the 2-norm. bfloat16 errs by half a percent; a key too many or a gradient lost, by ten and more.
TOLERATED = 0.02

log = logging.getLogger(__name__)


@functools.cache
def failure(num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernels are not to be used on this machine's GPU for such heads, or None if they are right.

    May be called while something is traced, inside a mesh too.
    """
    if jax.default_backend() not in PLATFORMS["tokamax"]:
        return "no GPU is here to try its kernels on"
    log.info("attention: trying tokamax's kernels on this GPU first; model.attention=xla does without them")
    # A thread of its own: what is traced, and the mesh, are those of a thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_failure, num_heads, num_kv_heads, head_dim, dtype).result()


def _failure(num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    random = np.random.default_rng(0)
    heads = (num_heads,) * 2 + (num_kv_heads,) * 4 + (num_heads,) * 2
    arrays = (jnp.asarray(random.normal(size=(2, TOKENS, n, head_dim)), dtype) for n in heads)
    *inputs, d_memory, d_prediction = arrays
    try:
        ours, expected = (
            jax.jit(functools.partial(_with_gradients, streams))(inputs, (d_memory, d_prediction))
            for streams in (_by_kernels, _dense)
        )
        errors = [_relative_error(x, y) for x, y in zip(ours, expected, strict=True)]
    except Exception as error:  # whatever a compiler or a driver raises, XLA's tiles are still there
        return f"its kernels failed on this GPU: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if all(error <= TOLERATED for error in errors):  # nan is wrong too
        return None
    return f"its kernels are wrong on this GPU, by {max(errors):.0%} of what dense attention gives"


def _with_gradients(streams, inputs, cotangents):
    out, pullback = jax.vjp(streams, *inputs)
    return *out, *pullback(cotangents)


def _by_kernels(q_memory, q_prediction, k, v, k_own, v_own):
    start, end, block = _ranges()
    own = OwnBlocks(k_own, v_own, jnp.maximum(start, block), end, size=BLOCK_SIZE)
    return flash_attention(q_memory, k, v, start, end), flash_attention(q_prediction, k, v, start, block, own)


def _dense(*inputs):
    q_memory, q_prediction, k, v, k_own, v_own = (x.astype(jnp.float32) for x in inputs)
    start, end, block = (x[..., None] for x in _ranges())
    key = jnp.arange(TOKENS)
    prefix, inside = (start <= key) & (key < block), (jnp.maximum(start, block) <= key) & (key < end)
    keys, values = (jnp.concatenate(x, axis=1) for x in ((k, k_own), (v, v_own)))
    with jax.default_matmul_precision("highest"):
        memory = attend(q_memory, k, v, (start <= key) & (key < end))[0]
        prediction = attend(q_prediction, keys, values, jnp.concatenate([prefix, inside], axis=2))[0]
    return tuple(x.astype(inputs[0].dtype) for x in (memory, prediction))


def _ranges() -> tuple[jax.Array, ...]:
    """Three, int [2, TOKENS], of every token: where its document starts, the place after it, where its block starts."""
    place = np.arange(TOKENS)
    starts = np.array(DOCUMENT_STARTS)
    start = np.stack([starts[np.searchsorted(starts, place, side="right") - 1], np.zeros_like(place)])
    end, block = (np.broadcast_to(x, start.shape) for x in (place + 1, place - place % BLOCK_SIZE))
    return tuple(jnp.asarray(x, jnp.int32) for x in (start, end, block))


def _relative_error(x: jax.Array, expected: jax.Array) -> float:
    x, expected = (y.astype(jnp.float32) for y in (x, expected))
    return float(jnp.linalg.norm(x - expected) / jnp.linalg.norm(expected))
