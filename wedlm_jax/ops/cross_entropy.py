"""Cross-entropy of an output layer, per token: of the rows that carry a loss alone, a tile of the logits at a time.

Those rows are brought to the front and go through in chunks; a chunk that holds none is skipped. So the time follows their
number, while all shapes are static and no row is ever dropped. The forward pass keeps one number a row, the log-sum-exp;
the backward pass makes the logits again. Four products of [rows, D] with [D, V] in all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from wedlm_jax.program_costs import kernel_runs

State = TypeVar("State")


class Tile(NamedTuple):
    """Logits that are held at a time, on each device."""

    rows: int
    vocab: int


TILE = Tile(2048, 8192)  # 64 MiB in float32: products that fill an accelerator
CPU_TILE = Tile(128, 1024)  # 512 KiB: in the cache of a core
LANES = 128  # what the width of a tile is a multiple of

_NO_COLUMN = np.iinfo(np.int32).min


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the operands lie on a mesh: the axes of it that T, V, and D of the head are cut over, () for whole.

    Each device takes the rows and the part of the vocabulary that it holds. Along D the head is gathered, and its gradient
    summed and cut up again, a tile at a time: neither is ever whole on a device. Else only sums over rows cross the devices.
    """

    mesh: AbstractMesh | None = None
    rows: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()  # some of those of the rows

    def run(self, function: Callable[..., Any], operands: tuple[jax.Array, ...], outputs: tuple[str, ...]) -> Any:
        """`function` of what each device holds of (hidden, head, arrays [T] ...); `outputs` says which of them each is like."""
        if self.mesh is None:
            return function(*operands)
        rows, vocab, width = (axes or None for axes in (self.rows, self.vocab, self.width))
        specs = {"hidden": P(rows, None), "head": P(vocab, width), "rows": P(rows)}
        places = ("hidden", "head", *["rows"] * (len(operands) - 2))
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(specs[place] for place in places),
            out_specs=tuple(specs[place] for place in outputs),
            check_vma=False,  # the sums below are written out
        )(*operands)


def cross_entropy(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    targets_T: jax.Array,
    carries_loss_T: jax.Array | None = None,
    *,
    cut: Cut = Cut(),
    precision: str | None = None,
) -> jax.Array:
    """-log softmax(hidden @ head.T)[target] of each row that carries a loss; weights are for the caller to apply.

    Args:
      hidden_TD: [T, D]; its dtype is that of the products, which all accumulate in float32.
      head_VD: the output matrix [V, D]; its gradient is summed in float32 and rounded to its dtype once.
      targets_T: int [T], in [0, V).
      carries_loss_T: bool [T]; the other rows cost nothing and get loss and gradient 0. None: all rows.
      cut: how these lie on a mesh.
      precision: of the products, as `jax.lax.dot_general` takes it.

    Returns:
      losses float32 [T] in nats.
    """
    T, D = hidden_TD.shape
    if carries_loss_T is None:
        carries_loss_T = jnp.ones(T, bool)
    chex.assert_shape(head_VD, (None, D))
    chex.assert_shape([targets_T, carries_loss_T], (T,))
    chex.assert_type([targets_T, carries_loss_T], [int, bool])
    return _losses(cut, precision, hidden_TD, head_VD, targets_T, carries_loss_T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(cut: Cut, precision: str | None, *operands: jax.Array) -> jax.Array:
    return _forward(cut, precision, *operands)[0]


def _forward(cut: Cut, precision: str | None, *operands: jax.Array) -> tuple[jax.Array, Any]:
    def on_device(hidden_TD, head_VD, targets_T, carries_loss_T):
        targets_T = _own_columns(targets_T, head_VD, cut)
        lse_T, picked_T = _on_platform(_log_sum_exp, cut, precision, hidden_TD, head_VD, targets_T, carries_loss_T)
        if cut.vocab:
            top_T = jax.lax.pmax(lse_T, cut.vocab)
            lse_T = top_T + jnp.log(jax.lax.psum(jnp.exp(lse_T - top_T), cut.vocab))
            picked_T = jax.lax.psum(picked_T, cut.vocab)
        return jnp.where(carries_loss_T, lse_T - picked_T, 0.0), lse_T

    losses_T, lse_T = cut.run(on_device, operands, ("rows", "rows"))
    return losses_T, (*operands, lse_T)


def _backward(cut: Cut, precision: str | None, kept: Any, d_losses_T: jax.Array) -> tuple[Any, ...]:
    def on_device(hidden_TD, head_VD, targets_T, carries_loss_T, lse_T, d_losses_T):
        rows = _own_columns(targets_T, head_VD, cut), carries_loss_T, lse_T, d_losses_T
        d_hidden_TD, d_head_VD = _on_platform(_gradients, cut, precision, hidden_TD, head_VD, *rows)
        if cut.vocab:
            d_hidden_TD = jax.lax.psum(d_hidden_TD, cut.vocab)
        if others := tuple(axis for axis in cut.rows if axis not in cut.width):
            d_head_VD = jax.lax.psum(d_head_VD, others)
        return d_hidden_TD.astype(hidden_TD.dtype), d_head_VD.astype(head_VD.dtype)

    d_hidden_TD, d_head_VD = cut.run(on_device, (*kept, d_losses_T), ("hidden", "head"))
    return d_hidden_TD, d_head_VD, None, None


_losses.defvjp(_forward, _backward)


def _own_columns(targets_T: jax.Array, head_VD: jax.Array, cut: Cut) -> jax.Array:
    """Targets counted from the first column that this device holds; outside its columns for targets of the others."""
    return targets_T - jax.lax.axis_index(cut.vocab) * head_VD.shape[0] if cut.vocab else targets_T


def _on_platform(function: Callable[..., Any], cut: Cut, precision: str | None, *arrays: jax.Array) -> Any:
    """`function` in the tiles of the platform that is compiled for, which may be another than this one."""
    return jax.lax.platform_dependent(
        *arrays,
        cpu=functools.partial(function, CPU_TILE, cut, precision),
        default=functools.partial(function, TILE, cut, precision),
    )


# Columns outside, rows inside: what is as large as the head, it and its gradient, is read, gathered and written once.


def _log_sum_exp(
    tile: Tile,
    cut: Cut,
    precision: str | None,
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    targets_T: jax.Array,
    carries_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp of the logits, and the logit of the target (0 where it is none of these columns), of each row."""
    chunks = _Chunks.of(carries_T, tile)
    hidden_NCD, targets_NC = chunks.take(hidden_TD), chunks.take(targets_T)

    def add_columns(state, place):
        w_WD, columns_W = _columns(head_VD, place, tile, hidden_TD.dtype, cut)

        def add_chunk(n, state):
            top_C, total_C, picked_C = (x_NC[n] for x_NC in state)
            logits_CW = _logits(hidden_NCD[n], w_WD, columns_W, precision)
            new_top_C = jnp.maximum(top_C, jnp.max(logits_CW, axis=1))
            total_C = total_C * jnp.exp(top_C - new_top_C) + jnp.sum(jnp.exp(logits_CW - new_top_C[:, None]), axis=1)
            picked_C += jnp.sum(jnp.where(columns_W == targets_NC[n][:, None], logits_CW, 0.0), axis=1)
            return tuple(x_NC.at[n].set(x_C) for x_NC, x_C in zip(state, (new_top_C, total_C, picked_C), strict=True))

        return chunks.each(add_chunk, state), None

    zeros_NC = jnp.zeros(targets_NC.shape, jnp.float32)
    start = zeros_NC - jnp.inf, zeros_NC, zeros_NC
    (top_NC, total_NC, picked_NC), _ = jax.lax.scan(add_columns, start, _places(head_VD, tile))
    return chunks.in_order(top_NC + jnp.log(total_NC)), chunks.in_order(picked_NC)


def _gradients(
    tile: Tile,
    cut: Cut,
    precision: str | None,
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    targets_T: jax.Array,
    carries_T: jax.Array,
    lse_T: jax.Array,
    d_losses_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of these columns with respect to hidden [T, D] and to what is held of the head, in float32."""
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    chunks = _Chunks.of(carries_T, tile)
    hidden_NCD, *rows = map(chunks.take, (hidden_TD, targets_T, lse_T, d_losses_T))

    def add_columns(gradients, place):
        d_hidden_NCD, d_head_VD = gradients
        w_WD, columns_W = _columns(head_VD, place, tile, hidden_TD.dtype, cut)

        def add_chunk(n, gradients):
            d_hidden_NCD, d_w_WD = gradients
            h_CD, (target_C, lse_C, d_loss_C) = hidden_NCD[n], (x_NC[n] for x_NC in rows)
            softmax_CW = jnp.exp(_logits(h_CD, w_WD, columns_W, precision) - lse_C[:, None])
            d_logits_CW = d_loss_C[:, None] * (softmax_CW - (columns_W == target_C[:, None]))
            d_logits_CW = d_logits_CW.astype(h_CD.dtype)
            d_hidden_NCD = d_hidden_NCD.at[n].add(product("CW,WD->CD", d_logits_CW, w_WD))
            return d_hidden_NCD, d_w_WD + product("CW,CD->WD", d_logits_CW, h_CD)

        d_hidden_NCD, d_w_WD = chunks.each(add_chunk, (d_hidden_NCD, jnp.zeros(w_WD.shape, jnp.float32)))
        if cut.width:
            d_w_WD = jax.lax.psum_scatter(d_w_WD, cut.width, scatter_dimension=1, tiled=True)
        d_w_WD += jax.lax.dynamic_slice_in_dim(d_head_VD, place[0], d_w_WD.shape[0])
        return (d_hidden_NCD, jax.lax.dynamic_update_slice_in_dim(d_head_VD, d_w_WD, place[0], axis=0)), None

    zeros = jnp.zeros(hidden_NCD.shape, jnp.float32), jnp.zeros(head_VD.shape, jnp.float32)
    (d_hidden_NCD, d_head_VD), _ = jax.lax.scan(add_columns, zeros, _places(head_VD, tile))
    return chunks.in_order(d_hidden_NCD), d_head_VD


class _Chunks(NamedTuple):
    """The rows that carry a loss, in N chunks of C; the last ones may be empty."""

    carries_T: jax.Array
    rows_NC: jax.Array  # which row each place holds; T where none is left
    used: jax.Array  # the number of chunks that hold any

    @classmethod
    def of(cls, carries_T: jax.Array, tile: Tile) -> _Chunks:
        T = carries_T.shape[0]
        C = min(tile.rows, T)
        N = -(-T // C)
        rows_NC = jnp.flatnonzero(carries_T, size=N * C, fill_value=T).reshape(N, C)
        return cls(carries_T, rows_NC, jnp.sum(rows_NC[:, 0] < T))

    def each(self, add: Callable[[jax.Array, State], State], state: State) -> State:
        """`add(n, state)` for every chunk n that holds any. A loop whose length is data: with a condition round each chunk XLA
        would copy the state, a tile of the head's gradient with it."""
        with kernel_runs(len(self.rows_NC)):  # at most
            return jax.lax.fori_loop(0, self.used, add, state)

    def take(self, x: jax.Array) -> jax.Array:
        """[N, C, ...] of an array [T, ...]; zeros, which add nothing, past the last row with a loss."""
        return jnp.take(x, self.rows_NC, axis=0, mode="fill", fill_value=0, indices_are_sorted=True)

    def in_order(self, x: jax.Array) -> jax.Array:
        """Back to [T, ...]; 0 for rows without a loss."""
        x = x.reshape(-1, *x.shape[2:])[jnp.cumsum(self.carries_T) - 1]
        return jnp.where(jnp.expand_dims(self.carries_T, range(1, x.ndim)), x, 0)


def _places(head_VD: jax.Array, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Of each tile of the vocabulary its first column, and its first column that is not in the tile before it.

    The tiles are equally wide and all lie inside the vocabulary, so the last may repeat columns.
    """
    V, width = head_VD.shape[0], _width(head_VD, tile)
    fresh = np.arange(-(-V // width), dtype=np.int32) * width
    return jnp.asarray(np.minimum(fresh, V - width)), jnp.asarray(fresh)


def _width(head_VD: jax.Array, tile: Tile) -> int:
    V = head_VD.shape[0]
    tiles = -(-V // tile.vocab)
    return min(V, -(-V // (tiles * LANES)) * LANES)


def _columns(
    head_VD: jax.Array, place: tuple[jax.Array, jax.Array], tile: Tile, dtype: Any, cut: Cut
) -> tuple[jax.Array, jax.Array]:
    """A tile of the head [W, D], whole along D and in the dtype of the products, and the numbers of its columns [W]; no number
    for those that the tile before it has too."""
    start, fresh = place
    V, W = head_VD.shape[0], _width(head_VD, tile)
    columns_W = start + jnp.arange(W, dtype=jnp.int32)
    if V % W:
        columns_W = jnp.where(columns_W >= fresh, columns_W, _NO_COLUMN)
    w_WD = jax.lax.dynamic_slice_in_dim(head_VD, start, W).astype(dtype)
    return (jax.lax.all_gather(w_WD, cut.width, axis=1, tiled=True) if cut.width else w_WD), columns_W


def _logits(h_CD: jax.Array, w_WD: jax.Array, columns_W: jax.Array, precision: str | None) -> jax.Array:
    """-inf in columns without a number."""
    logits_CW = jnp.einsum("CD,WD->CW", h_CD, w_WD, precision=precision, preferred_element_type=jnp.float32)
    return jnp.where(columns_W >= 0, logits_CW, -jnp.inf)
