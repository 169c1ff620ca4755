"""Attention on TPU by one call of a splash kernel: a mask computed in the kernel, and no tile visited in vain.

Splash (jax.experimental.pallas.ops.tpu.splash_attention) runs over the tiles of the score matrix that its schedule names. The
schedule of the mask is made once, when the step is traced. Where a row holds several documents, the tiles in which no two
tokens share one are struck from it on the device, row by row, so packed rows cost what their documents cost.

Two kernels of ours run over the same tiles: splash_forward.py, which masks fewer of them, and splash_backward.py, one kernel for
all gradients, where jax's two compute two products more of nine. (Its fused one has as few as ours, but writes a partial gradient
of the queries for every column of tiles, [2L / tile, N, 2L, H], which costs more memory traffic than it saves arithmetic.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SplashAttentionKernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import _ComputableMask

from wedlm_jax.ops.attention import splash_backward, splash_forward
from wedlm_jax.ops.attention.choice import Shaped
from wedlm_jax.ops.attention.ranges import RESIDUALS
from wedlm_jax.ops.attention.splash_kept import KeptMask, steps_of
from wedlm_jax.ops.attention.splash_tiles import Steps, block_start, meeting
from wedlm_jax.program_costs import kernel_runs

TILES = (512, 256, 128)  # rows and columns of a tile; the kernel computes in columns of 128
# Tiles along a stream of `length` tokens: a tile on the edge of what is visible is half in vain, one row of tiles has one
# such edge in each stream, so n tiles visit 1 + 2 / n times what is visible.
TILES_ALONG_A_STREAM = 8


@dataclasses.dataclass(frozen=True)
class CausalMask:
    """Query i sees the keys 0 .. i of a row of `length`."""

    length: int

    @property
    def tokens(self) -> int:
        """Queries, and as many keys, of a row."""
        return self.length

    def __call__(self, query: Any, key: Any) -> Any:
        """Whether the query sees the key; indices that broadcast, of numpy or in the kernel."""
        return key <= query


@dataclasses.dataclass(frozen=True)
class TwoStreamMask:
    """A row of two streams of `length` tokens each, one after the other.

    The first is causal. A query of the second sees the tokens of the first that lie before its own block of `block_size`, and
    of the second its own block: up to itself, or all of it if `bidirectional`.
    """

    length: int
    block_size: int
    bidirectional: bool = False

    @property
    def tokens(self) -> int:
        return 2 * self.length

    def __call__(self, query: Any, key: Any) -> Any:
        # Few operations on integers, as they are done for every entry of every tile: one comparison with the end of what
        # is seen, one with each end of the gap [block, length + block) that a query of the second stream does not see.
        offset = query - self.length
        block = block_start(offset, self.block_size)
        outside_gap = (key < block) | (key >= block + self.length)
        if not self.bidirectional:
            return (key <= query) & ((offset < 0) | outside_gap)
        before_end = key < block + (self.length + self.block_size)
        return ((offset < 0) & (key <= query)) | ((offset >= 0) & before_end & outside_gap)


Mask = CausalMask | TwoStreamMask | KeptMask


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    mask: Mask,
    reach_BT: jax.Array | None = None,
    *,
    own_kernels: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention of T tokens over themselves, scaled by H ** -0.5; differentiable once.

    Args:
      q_BTNH: queries, N a multiple of K; keys are not repeated.
      k_BTKH, v_BTKH: keys and values.
      segment_ids_BT: tokens see those of their own segment only; 0 is padding, whose output is finite and arbitrary. None: a
        row is one segment.
      mask: who sees whom by place in the row; `mask.tokens` is T.
      reach_BT: of a `KeptMask`, which goes by segments too and by our kernels alone: the first key that each query does not see.
      own_kernels: by ours instead of jax's, where `splash_backward.unsupported` names no reason against them.
      interpret: run the kernels as plain operations, on any platform; slow.

    Returns:
      [B, T, N, H] in the dtype of q. It and the log-sum-exp are named RESIDUALS for remat policies.

    Raises:
      ValueError: `unsupported` names a reason.
    """
    if reason := unsupported(q_BTNH, k_BTKH, mask):
        raise ValueError(f"splash attention: {reason}")
    chex.assert_equal_shape([k_BTKH, v_BTKH])
    if segment_ids_BT is not None:
        chex.assert_shape(segment_ids_BT, q_BTNH.shape[:2])
    heads = q_BTNH.shape[2]
    if isinstance(mask, KeptMask):
        assert own_kernels and segment_ids_BT is not None and reach_BT is not None
        tiles = len(mask.pairs(_tile(mask))[0])
    else:
        tiles = _tiles_visited(_kernel(mask, heads, interpret))["forward"]  # the others visit the same tiles

    def attend_row(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]) -> jax.Array:
        q_NTH, k_KTH, v_KTH = (x.transpose(1, 0, 2) for x in row[:3])
        q_NTH = q_NTH * q_NTH.shape[-1] ** -0.5
        with kernel_runs(heads * tiles):
            if own_kernels:
                out_NTH = _attend(mask, interpret, q_NTH, k_KTH, v_KTH, *row[3:])
            else:
                out_NTH = _run(_kernel(mask, heads, interpret), q_NTH, k_KTH, v_KTH, row[3])
        return out_NTH.transpose(1, 0, 2)

    return jax.lax.map(attend_row, (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, reach_BT))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    mask: Mask,
    interpret: bool,
    q_NTH: jax.Array,
    k_KTH: jax.Array,
    v_KTH: jax.Array,
    segments_T: jax.Array | None,
    reach_T: jax.Array | None,
) -> jax.Array:
    """A row, and its gradients, by our kernels."""
    return _attend_forward(mask, interpret, q_NTH, k_KTH, v_KTH, segments_T, reach_T)[0]


def _attend_forward(mask, interpret, q_NTH, k_KTH, v_KTH, segments_T, reach_T):
    steps = _steps_by_ours(mask, q_NTH.shape[0], interpret, segments_T, reach_T)
    out_NTH, lse_NT = splash_forward.splash_output(
        q_NTH, k_KTH, v_KTH, segments_T, mask, steps, reach_T, tile=_tile(mask), interpret=interpret
    )
    out_NTH, lse_NT = (checkpoint_name(x, RESIDUALS) for x in (out_NTH, lse_NT))
    return out_NTH, (q_NTH, k_KTH, v_KTH, segments_T, reach_T, out_NTH, lse_NT)


def _attend_backward(mask, interpret, residuals, d_out_NTH):
    q_NTH, k_KTH, v_KTH, segments_T, reach_T, out_NTH, lse_NT = residuals
    delta_NT = jnp.sum(out_NTH.astype(jnp.float32) * d_out_NTH.astype(jnp.float32), axis=-1)
    steps = _steps_by_ours(mask, q_NTH.shape[0], interpret, segments_T, reach_T)
    d_q, d_k, d_v = splash_backward.splash_gradients(
        q_NTH, k_KTH, v_KTH, d_out_NTH, lse_NT, delta_NT, segments_T, mask, steps, reach_T,
        tile=_tile(mask), interpret=interpret,
    )  # fmt: skip
    return d_q, d_k, d_v, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def unsupported(q_BTNH: Shaped, k_BTKH: Shaped, mask: Mask) -> str | None:
    """Why the kernel cannot do this, or None if it can."""
    if mask.tokens % TILES[-1]:
        return f"rows of {mask.tokens} are not a multiple of {TILES[-1]}"
    if q_BTNH.shape[1] != mask.tokens or k_BTKH.shape[1] != mask.tokens:
        return f"{q_BTNH.shape[1]} queries and {k_BTKH.shape[1]} keys; it takes {mask.tokens} of both"
    if isinstance(mask, KeptMask) and mask.length % TILES[-1]:
        return f"streams of {mask.length} and {mask.kept} are not multiples of {TILES[-1]}"
    if isinstance(mask, TwoStreamMask | KeptMask) and mask.length % mask.block_size:
        return f"blocks of {mask.block_size} do not divide a stream of {mask.length}"
    if q_BTNH.shape[2] % k_BTKH.shape[2]:
        return f"{k_BTKH.shape[2]} key heads do not divide {q_BTNH.shape[2]} query heads"
    if q_BTNH.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{q_BTNH.dtype} is neither float32 nor bfloat16"
    if jax.config.jax_default_matmul_precision == "high":  # type: ignore[attr-defined]
        return "its kernels multiply at matmul_precision default or highest, not high"
    return None


class _ComputedMask(_ComputableMask):
    """Our mask in the form that splash wants."""

    def __init__(self, mask: Mask):
        super().__init__((mask.tokens, mask.tokens), mask)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ComputedMask) and self.mask_function == other.mask_function

    def __hash__(self) -> int:
        return hash(self.mask_function)


def _tile(mask: Mask) -> int:
    both = (mask.tokens, mask.length) if isinstance(mask, KeptMask) else (mask.tokens,)
    fitting = [tile for tile in TILES if not any(tokens % tile for tokens in both)]
    return next((tile for tile in fitting if tile * TILES_ALONG_A_STREAM <= mask.length), fitting[-1])


@functools.cache
def _kernel(mask: Mask, heads: int, interpret: bool) -> SplashAttentionKernel:
    """The kernel with its schedule, as numpy arrays: it may be made while tracing and used by later traces."""
    tile = _tile(mask)
    sizes = splash.BlockSizes(
        block_q=tile, block_kv=tile, block_kv_compute=tile,
        block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
        block_q_dq=tile, block_kv_dq=tile,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([_ComputedMask(mask)] * heads),
            block_sizes=sizes,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


def _run(kernel: SplashAttentionKernel, q: jax.Array, k: jax.Array, v: jax.Array, segments_T: jax.Array | None) -> Any:
    if segments_T is None:
        return kernel(q, k, v)
    return _without_other_segments(kernel, segments_T)(q, k, v, splash.SegmentIds(segments_T, segments_T))


def _steps_by_ours(
    mask: Mask, heads: int, interpret: bool, segments_T: jax.Array | None, reach_T: jax.Array | None
) -> Steps:
    if isinstance(mask, KeptMask):
        assert segments_T is not None and reach_T is not None
        return steps_of(mask, segments_T, reach_T, _tile(mask))
    return _steps(_kernel(mask, heads, interpret), segments_T)


def _steps(kernel: SplashAttentionKernel, segments_T: jax.Array | None) -> Steps:
    """The tiles that the forward kernel visits, one after the other."""
    schedule: Any = kernel.fwd_mask_info
    q_tile, place = np.nonzero(schedule.block_mask[0])
    k_tile, partial = schedule.data_next[0][q_tile, place], schedule.block_mask[0][q_tile, place] == 1
    if segments_T is None:
        return Steps(jnp.asarray([q_tile, k_tile, partial], jnp.int32), q_tile.size)
    meet, of_one = meeting(segments_T, kernel.kwargs["block_sizes"].block_q, q_tile, k_tile)
    return Steps.of(q_tile, k_tile, partial | ~of_one, meet | (q_tile == k_tile))


def _tiles_visited(kernel: SplashAttentionKernel) -> dict[str, int]:
    """Of each kernel and head."""
    schedules: dict[str, Any] = {
        "forward": kernel.fwd_mask_info,
        "dq": kernel.dq_mask_info,
        "dkv": kernel.dkv_mask_info,
    }
    return {name: int(np.count_nonzero(schedule.block_mask)) for name, schedule in schedules.items()}


def _without_other_segments(kernel: SplashAttentionKernel, segments_T: jax.Array) -> SplashAttentionKernel:
    """The kernel without the tiles that do not `meet`. Those on the diagonal stay: in them every query sees itself."""
    tile = kernel.kwargs["block_sizes"].block_q

    def pruned(schedule: Any, outer_axis: int) -> Any:
        """`schedule` of one kernel; its outer loop runs over the tiles of the queries (0) or of the keys (1)."""
        inner, runs = (
            jnp.moveaxis(x[0], outer_axis, 0).astype(jnp.int32) for x in (schedule.data_next, schedule.block_mask)
        )
        outer = jnp.arange(inner.shape[0])[:, None]
        meet, _ = meeting(segments_T, tile, outer, inner)
        runs = jnp.where(meet | (outer == inner), runs, 0)
        # A step that does not run names the tile of the next one that does: that is fetched meanwhile, and nothing else.
        step = jnp.where(runs.ravel() > 0, jnp.arange(runs.size), runs.size - 1)
        inner = inner.ravel()[jax.lax.cummin(step, reverse=True)].reshape(inner.shape)
        inner, runs = (jnp.moveaxis(x, 0, outer_axis)[None] for x in (inner, runs))
        return schedule._replace(data_next=inner, block_mask=runs)

    return SplashAttentionKernel(
        pruned(kernel.fwd_mask_info, 0),
        pruned(kernel.dq_mask_info, 0),
        pruned(kernel.dkv_mask_info, 1),
        **kernel.kwargs,
    )
