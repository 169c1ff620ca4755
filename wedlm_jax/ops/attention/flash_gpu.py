"""Attention on GPU by tokamax's flash kernels (the `gpu` extra): a key range for every query, and an own block beside it.

A query sees a range of the keys that all share (the clean prefix) by a flash kernel, and keys of its own block densely; the two
are merged by log-sum-exp. One gradient rule spans both: with the log-sum-exp and the output of the merged softmax, the
backward kernel of each part gives that part of the gradient (p = exp(score - lse), d_score = p * (d_out . v - d_out . out)).
Differentiating through the residuals that a kernel returns would be silently wrong: no kernel has a gradient for them.

Kernels: `sm90` (Pallas Mosaic, Hopper: bfloat16 and float16) and `triton` (Pallas Triton, Ampere and later: float32 too).
The forward kernels skip tiles by both ends of the ranges. Backward, both skip the future, which no range may reach into
(`sm90` masks the rest element by element, `triton` by a bool [T, S] a row), and neither skips other documents.

Both ran on an H200, of tokamax 0.0.17 (benchmarks/RESULTS.md, "On a GPU"), and on no other GPU. In the tests `triton` runs,
interpreted on CPU, forward and backward, in float32 and bfloat16, and both are lowered for CUDA. trial.py runs them before "auto"
takes them, benchmarks/gpu.sh measures them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.ops.attention.blocks import DENSE_BLOCK, OwnBlocks
from wedlm_jax.ops.attention.choice import PLATFORMS, Shaped
from wedlm_jax.ops.attention.dense import attend, is_exact, merge
from wedlm_jax.ops.attention.ranges import RESIDUALS

# Queries of a program of the largest kernel, and keys of its tiles: lengths are multiples of it.
TILE = 128

# q_TNH, k_SKH, v_SKH, start_T, end_T -> out_TNH, lse_NT
Forward = Callable[..., tuple[jax.Array, jax.Array]]
# The same, then lse_NT, out_TNH, d_out_TNH of the whole softmax -> d_q_TNH, d_k_SKH, d_v_SKH
Backward = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The two directions of one row."""

    forward: Forward
    backward: Backward


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    start_BT: jax.Array,
    end_BT: jax.Array,
    own: OwnBlocks | None = None,
    *,
    kernels: Kernels | None = None,
) -> jax.Array:
    """Softmax attention, scaled by H ** -0.5, over a key range for every query and, if given, its own block.

    T = S, and no range ends after t + 1: the backward pass leaves out the future.

    Args:
      q_BTNH: queries, N a multiple of K.
      k_BSKH, v_BSKH: keys and values, rounded to the dtype of q. Their gradients are float32 if they are: of several calls on
        the same keys they are then added before they are rounded.
      start_BT, end_BT: query t of row b sees the keys start_BT[b, t] <= s < end_BT[b, t]; an empty range needs `own`.
      own: further keys, each seen by its own block alone.
      kernels: `sm90` or `triton`; None chooses by the GPU that is there.

    Returns:
      [B, T, N, H] in the dtype of q; it and the log-sum-exp are named RESIDUALS for remat policies.

    Raises:
      ValueError: `unsupported` names a reason.
    """
    if reason := unsupported(q_BTNH, k_BSKH, 0 if own is None else own.size):
        raise ValueError(f"flash attention: {reason}")
    k_BSKH, v_BSKH = (x.astype(jnp.float32) for x in (k_BSKH, v_BSKH))
    return _attend(kernels or _kernels_of_this_gpu(q_BTNH.dtype), q_BTNH, k_BSKH, v_BSKH, start_BT, end_BT, own)


def unsupported(q_BTNH: Shaped, k_BSKH: Shaped, own_size: int = 0) -> str | None:
    """Why the kernels, and what is dense beside them for own blocks of `own_size`, cannot do this, or None if they can."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed (README, Install)"
    for length, what in ((q_BTNH.shape[1], "queries"), (k_BSKH.shape[1], "keys")):
        if length % TILE:
            return f"{length} {what} are not a multiple of {TILE}"
    if q_BTNH.shape[3] not in (64, 128):  # tiles of a larger one do not fit into a Hopper's shared memory
        return f"a head dimension of {q_BTNH.shape[3]} is neither 64 nor 128"
    if own_size > DENSE_BLOCK:
        return f"the scores inside blocks of {own_size} tokens are held as they are, of {DENSE_BLOCK} at most"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernels: Kernels, q, k, v, start, end, own: OwnBlocks | None) -> jax.Array:
    return _forward(kernels, q, k, v, start, end, own)[0]


def _forward(kernels, q, k, v, start, end, own):
    k, v = (x.astype(q.dtype) for x in (k, v))
    # The barrier: XLA would run a kernel a second time to have it write straight into the stack of what a scan keeps.
    out, lse_BNT = jax.lax.optimization_barrier(jax.vmap(kernels.forward)(q, k, v, start, end))
    lse = lse_BNT.swapaxes(1, 2)
    if own is not None:
        own_out, own_lse = (x.reshape(*q.shape[:2], *x.shape[2:]) for x in attend(*own.by_block(q)))
        out, lse = merge(own_out, own_lse, out, lse), jnp.logaddexp(own_lse, lse)
    out, lse = (checkpoint_name(x, RESIDUALS) for x in (out, lse))
    return out, (q, k, v, start, end, own, out, lse)


def _backward(kernels, residuals, d_out):
    q, k, v, start, end, own, out, lse = residuals
    chex.assert_equal_shape([q, out, d_out])
    # Keys of its own for every query head: over the heads that share them we add in float32, a kernel would round the sum.
    of_heads = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    d_q, *d_of_heads = jax.vmap(kernels.backward)(q, *of_heads, start, end, lse.swapaxes(1, 2), out, d_out)
    d_k, d_v = (jnp.sum(x.reshape(*k.shape[:3], -1, k.shape[3]), axis=3, dtype=jnp.float32) for x in d_of_heads)
    d_own = None
    if own is not None:
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
        own_d_q, own_d_k, own_d_v = _dense_backward(*own.by_block(q), *map(own.blocks, (lse, delta, d_out)))
        d_q = (d_q.astype(jnp.float32) + own_d_q.reshape(q.shape)).astype(q.dtype)
        # The ranges are integers and have no gradient.
        d_own = dataclasses.replace(
            own, k_BTKH=own_d_k.reshape(own.k_BTKH.shape).astype(own.k_BTKH.dtype),
            v_BTKH=own_d_v.reshape(own.v_BTKH.shape).astype(own.v_BTKH.dtype), start_BT=None, end_BT=None,
        )  # fmt: skip
    return d_q, d_k, d_v, None, None, d_own


_attend.defvjp(_forward, _backward)


def _dense_backward(q_BTNH, k_BSKH, v_BSKH, visible_BTS, lse_BTN, delta_BTN, d_out_BTNH) -> tuple[jax.Array, ...]:
    """The part of the gradients, in float32, that comes by these keys of a softmax over more keys."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(B, T, K, N // K, *x.shape[3:])

    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    q, d_out, lse, delta = map(grouped, (q_BTNH * H**-0.5, d_out_BTNH, lse_BTN, delta_BTN))
    scores = jnp.where(visible_BTS[:, :, None, None], dot("BTKGH,BSKH->BTKGS", q, k_BSKH), -jnp.inf)
    weights = jnp.exp(scores - lse[..., None])
    d_scores = weights * (dot("BTKGH,BSKH->BTKGS", d_out, v_BSKH) - delta[..., None])
    weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
    d_q = dot("BTKGS,BSKH->BTKGH", d_scores, k_BSKH).reshape(q_BTNH.shape) * H**-0.5
    return d_q, dot("BTKGS,BTKGH->BSKH", d_scores, q), dot("BTKGS,BTKGH->BSKH", weights, d_out)


def _kernels_of_this_gpu(dtype: jnp.dtype) -> Kernels:
    return sm90() if _is_hopper() and dtype in (jnp.bfloat16, jnp.float16) else triton()


def _is_hopper() -> bool:
    """The GPU that is here; where none is, the one that is compiled for."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if absent is None or jax.default_backend() in PLATFORMS["tokamax"]:
        return _module("gpu_utils").is_sm90()
    return any(name in absent.device_kind for name in ("H100", "H200", "GH200"))


def _module(name: str) -> ModuleType:
    with _unchecked():
        return importlib.import_module(f"tokamax._src.{name}")


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Around the first import of a tokamax for Python 3.11, which has the types of its arguments checked by typeguard 2: its
    annotations are a SyntaxError to typeguard 4, which tyro needs. Nobody checks them then."""
    stand_in = ModuleType("typeguard")
    stand_in.typechecked = lambda function, **_: function  # type: ignore[attr-defined]
    stand_in.__spec__ = importlib.machinery.ModuleSpec("typeguard", None)  # jaxtyping looks for it
    found, sys.modules["typeguard"] = sys.modules.get("typeguard"), stand_in
    try:
        yield
    finally:
        del sys.modules["typeguard"]
        if found is not None:
            sys.modules["typeguard"] = found


@functools.cache
def sm90(
    forward_tiles: tuple[int, int, int] = (64, TILE, 2),
    backward_tiles: tuple[int, int, int, int] = (64, 64, 2, 2),
) -> Kernels:
    """Hopper: tiles by the bulk copy engine, warp groups that compute while others load.

    Args:
      forward_tiles: queries and keys of a tile, stages of loading.
      backward_tiles: queries and keys of a tile, stages, warp groups that compute. Both defaults were the fastest on an H200 of
        those that fit (benchmarks/RESULTS.md, "Tiles of the flash kernels").
    """
    forward_kernel: Any = _module("ops.attention.pallas_mosaic_gpu_kernel_sm90")
    backward_kernel: Any = _module("ops.attention.pallas_mosaic_gpu_vjp_kernel_sm90")

    def forward(q, k, v, start, end):
        # Without `is_causal`, here and below: the ranges say it, and skip by it.
        queries, keys, stages = forward_tiles
        config = forward_kernel.Config(block_q=queries, block_kv=keys, num_stages=stages)
        out, (peak, total) = forward_kernel.flash_attention_kernel(
            q, k, v, None, None, start[None], end[None],
            is_causal=False, logits_soft_cap=None, logits_scale=q.shape[-1] ** -0.5, out_dtype=q.dtype,
            normalize_output=True, return_residuals=True, use_stable_softmax=True, rescale_threshold=1.0, config=config,
        )  # fmt: skip
        return out, peak + jnp.log(total)

    def backward(q, k, v, start, end, lse, out, d_out):
        queries, keys, stages, groups = backward_tiles
        config = backward_kernel.Config(
            block_q_dkv=queries, block_kv_dkv=keys, block_q_dq=queries, block_kv_dq=keys, num_stages=stages,
            compute_wgs=groups,
        )  # fmt: skip
        return backward_kernel.flash_attention_vjp_kernel(
            q, k, v, (lse, jnp.ones_like(lse)), out, d_out, None, None, start[None], end[None],
            logits_scale=q.shape[-1] ** -0.5, logits_soft_cap=None, is_causal=True, ds_dtype=None, config=config,
        )[:3]  # fmt: skip

    return Kernels(forward, backward)


@functools.cache
def triton() -> Kernels:
    """Ampere and later."""
    forward_kernel: Any = _module("ops.attention.pallas_triton")
    backward_kernel: Any = _module("ops.attention.pallas_triton_vjp")

    def common(q: jax.Array) -> dict[str, Any]:
        # The kernels do not read what jax is told; DEFAULT is TF32 for float32.
        presets = jax.lax.DotAlgorithmPreset
        precision = presets.F32_F32_F32 if is_exact(q.dtype) else presets.DEFAULT
        return dict(
            logits_scale=q.shape[-1] ** -0.5, logits_dtype=jnp.dtype(jnp.float32), logits_soft_cap=None, dropout_rate=0.0,
            q_k_dot_precision=precision, weights_v_dot_precision=precision,
        )  # fmt: skip

    def forward(q, k, v, start, end):
        # split_k stays 1: with key ranges, tokamax shifts no range to its part of the keys, and the result is wrong.
        config = forward_kernel.Config(block_q=64, block_k=64, num_stages=2, num_warps=4)
        out, (peak, total) = forward_kernel._fwd(
            q, k, v, None, None, None, None, None, start[None], end[None], is_causal=False, config=config,
            use_base2=False, use_stable_softmax=True, normalize_output=True, return_residuals=True, **common(q),
        )  # fmt: skip
        return out, peak + jnp.log(total)

    def backward(q, k, v, start, end, lse, out, d_out):
        key = jnp.arange(k.shape[0])
        mask = (start[:, None] <= key) & (key < end[:, None])
        config = backward_kernel.Config(block_m1=32, block_n1=64, block_m2=64, block_n2=32, num_warps=4, num_stages=2)
        return backward_kernel._bwd(
            q, k, v, None, mask[None], None, (lse, jnp.ones_like(lse)), out, d_out,
            is_causal=True, ds_dtype=None, config=config, **common(q),
        )[:3]  # fmt: skip

    return Kernels(forward, backward)
