"""Whether the kernels for GPUs, and ours for TPUs, are right on the device that is here, before they are used.

Those for GPUs have run on one kind of them (an H200), and those of flash attention are another library's, reached below its
public functions; ours for TPUs have run on none. So the first program that could use them runs them once on short rows of its own
heads and dtype, forward and backward where there is a backward, beside dense attention: where they end with an error (a GPU too
old for them, say) or with other numbers, XLA's own attention, or jax's splash, is used and a warning says why. What is tried is
whether they are wrong; how exact and how fast they are is measured by benchmarks/gpu.sh, on GPUs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.ops.attention.blocks import OwnBlocks
from wedlm_jax.ops.attention.choice import PLATFORMS
from wedlm_jax.ops.attention.dense import attend
from wedlm_jax.ops.attention.flash_gpu import flash_attention
from wedlm_jax.ops.attention.splash import KeptMask, Mask, TwoStreamMask, splash_attention
from wedlm_jax.ops.attention.split_gpu import attend_split
from wedlm_jax.ops.attention.window_tpu import LANES, attend_window, widen_heads

Kernels = Literal["flash", "split", "window", "splash", "kept"]
NAMES = {
    "flash": "tokamax's flash kernels",
    "split": "the split kernel over a cache",
    "window": "the kernel of a window over a cache",
    "splash": "our kernels for splash",
    "kept": "our kernels for splash with some blocks",
}
ON_TPU = ("window", "splash", "kept")

TOKENS, BLOCK_SIZE, WINDOW = 512, 32, 16
CACHE_SLOTS = 2576  # several tiles of either kernel, the last of which is not whole
DOCUMENT_STARTS = (0, 160, 416)  # of one row; the other is one document

# Of the 2-norm. bfloat16 errs by half a percent; a key too many or a gradient lost, by ten and more.
TOLERATED = 0.02

log = logging.getLogger(__name__)


@functools.cache
def failure(
    kernels: Kernels, num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, exact: bool = False
) -> str | None:
    """Why the kernels are not to be used on this machine's GPU or TPU for such heads, or None if they are right; `exact` as
    `is_exact` says it where they are to be used.

    May be called while something is traced, inside a mesh too. Processes of one run, whose devices are of one kind, come to the
    same answer.
    """
    platform, device = ("splash", "TPU") if kernels in ON_TPU else ("tokamax", "GPU")
    if jax.default_backend() not in PLATFORMS[platform]:
        return f"no {device} is here to try it on"
    log.info("attention: trying %s on this %s first; model.attention=xla does without", NAMES[kernels], device)
    tried: dict[Kernels, Callable[..., tuple[Any, ...]]] = {
        "flash": functools.partial(_streams, _by_flash),
        "splash": functools.partial(_streams, _by_splash),
        "kept": functools.partial(_streams, functools.partial(_by_splash, kept=True)),
        "split": functools.partial(_cache, attend_split),
        "window": functools.partial(_cache, _by_window),
    }
    programs = functools.partial(tried[kernels], num_heads, num_kv_heads, head_dim, dtype)
    # A thread of its own, for the arrays too: what is traced, and the mesh, are those of a thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_failure, device, "highest" if exact else "default", programs).result()


def _failure(device: str, precision: str, programs: Callable[[], tuple[Any, ...]]) -> str | None:
    try:
        with jax.default_matmul_precision(precision):
            ours, dense, arrays = programs()
            pairs = zip(jax.jit(ours)(*arrays), jax.jit(dense)(*arrays), strict=True)
            errors = [_relative_error(x, expected) for x, expected in pairs]
    except Exception as error:  # whatever a compiler or a driver raises, XLA's own attention is still there
        return f"it failed on this {device}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if all(error <= TOLERATED for error in errors):  # nan is wrong too
        return None
    return f"it is wrong on this {device}, by {max(errors):.0%} of what dense attention gives"


def _cache(
    attend_few: Callable[..., jax.Array], num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[Any, ...]:
    """Two windows, behind an empty cache and behind one that is nearly full."""
    random = np.random.default_rng(0)
    q = random.normal(size=(2, WINDOW, num_heads, head_dim))
    k, v = random.normal(size=(2, 1, 2, num_kv_heads, CACHE_SLOTS, head_dim))
    end = jnp.asarray([[1], [CACHE_SLOTS - WINDOW - 3]]) + jnp.arange(WINDOW)

    def ours(q, k, v):
        return tuple(attend_few(q, k, v, 0, end))  # each window by itself: the first errs more

    def dense(q, k, v):
        with jax.default_matmul_precision("highest"):
            q, k, v = (x.astype(jnp.float32) for x in (q, k[0].swapaxes(1, 2), v[0].swapaxes(1, 2)))
            return tuple(attend(q, k, v, jnp.arange(CACHE_SLOTS) < end[..., None])[0])

    return ours, dense, tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def _by_window(q, k, v, *arguments):
    held = -(-q.shape[3] // LANES) * LANES  # as a TPU holds them
    return attend_window(q, widen_heads(k, held), widen_heads(v, held), *arguments)


def _streams(
    by_kernels: Callable[..., Any], num_heads: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[Any, ...]:
    """Both streams over packed documents, and their gradients."""
    random = np.random.default_rng(0)
    heads = (num_heads,) * 2 + (num_kv_heads,) * 4 + (num_heads,) * 2
    arrays = tuple(jnp.asarray(random.normal(size=(2, TOKENS, n, head_dim)), dtype) for n in heads)
    return functools.partial(_with_gradients, by_kernels), functools.partial(_with_gradients, _dense), arrays


def _with_gradients(streams, *arrays):
    *inputs, d_memory, d_prediction = arrays
    out, pullback = jax.vjp(streams, *inputs)
    return *out, *pullback((d_memory, d_prediction))


def _by_flash(q_memory, q_prediction, k, v, k_own, v_own):
    start, end, block = _ranges()
    own = OwnBlocks(k_own, v_own, jnp.maximum(start, block), end, size=BLOCK_SIZE)
    return flash_attention(q_memory, k, v, start, end), flash_attention(q_prediction, k, v, start, block, own)


def _by_splash(q_memory, q_prediction, k, v, k_own, v_own, kept=False):
    q, k, v = (jnp.concatenate(x, axis=1) for x in ((q_memory, q_prediction), (k, k_own), (v, v_own)))
    start, end, block = _ranges()
    mask: Mask = KeptMask(TOKENS, TOKENS, BLOCK_SIZE) if kept else TwoStreamMask(TOKENS, BLOCK_SIZE)
    reach = jnp.concatenate([end, block], axis=1) if kept else None
    out = splash_attention(q, k, v, jnp.tile(start + 1, 2), mask, reach, own_kernels=True)
    return tuple(jnp.split(out, 2, axis=1))


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
