"""Cross-entropy of an output layer, per token: of the rows that carry a loss alone, a tile of the logits at a time.

Those rows are brought to the front and go through in chunks; a chunk that holds none is skipped. So the time follows their
number, while all shapes are static and no row is ever dropped. The forward pass keeps one number a row, the log-sum-exp;
the backward pass makes the logits again. Four products of [rows, D] with [D, V] in all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P


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

    Each device takes the rows and the part of the vocabulary that it holds. The head is gathered along D for it; nothing
    else crosses the devices but sums over rows, before and after the loops.
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
        head_VD = _whole(head_VD, cut).astype(hidden_TD.dtype)
        lse_T, picked_T = _on_platform(
            _log_sum_exp, precision, hidden_TD, head_VD, _own_columns(targets_T, head_VD, cut), carries_loss_T
        )
        if cut.vocab:
            top_T = jax.lax.pmax(lse_T, cut.vocab)
            lse_T = top_T + jnp.log(jax.lax.psum(jnp.exp(lse_T - top_T), cut.vocab))
            picked_T = jax.lax.psum(picked_T, cut.vocab)
        return jnp.where(carries_loss_T, lse_T - picked_T, 0.0), lse_T

    losses_T, lse_T = cut.run(on_device, operands, ("rows", "rows"))
    return losses_T, (*operands, lse_T)


def _backward(cut: Cut, precision: str | None, kept: Any, d_losses_T: jax.Array) -> tuple[Any, ...]:
    def on_device(hidden_TD, head_VD, targets_T, carries_loss_T, lse_T, d_losses_T):
        whole_VD = _whole(head_VD, cut).astype(hidden_TD.dtype)
        targets_T = _own_columns(targets_T, whole_VD, cut)
        rows = hidden_TD, whole_VD, targets_T, carries_loss_T, lse_T, d_losses_T
        d_hidden_TD, d_head_VD = _on_platform(_gradients, precision, *rows)
        if cut.vocab:
            d_hidden_TD = jax.lax.psum(d_hidden_TD, cut.vocab)
        if others := tuple(axis for axis in cut.rows if axis not in cut.width):
            d_head_VD = jax.lax.psum(d_head_VD, others)
        if cut.width:
            d_head_VD = jax.lax.psum_scatter(d_head_VD, cut.width, scatter_dimension=1, tiled=True)
        return d_hidden_TD.astype(hidden_TD.dtype), d_head_VD.astype(head_VD.dtype)

    d_hidden_TD, d_head_VD = cut.run(on_device, (*kept, d_losses_T), ("hidden", "head"))
    return d_hidden_TD, d_head_VD, None, None


_losses.defvjp(_forward, _backward)


def _whole(head_VD: jax.Array, cut: Cut) -> jax.Array:
    return jax.lax.all_gather(head_VD, cut.width, axis=1, tiled=True) if cut.width else head_VD


def _own_columns(targets_T: jax.Array, head_VD: jax.Array, cut: Cut) -> jax.Array:
    """Targets counted from the first column that this device holds; outside its columns for targets of the others."""
    return targets_T - jax.lax.axis_index(cut.vocab) * head_VD.shape[0] if cut.vocab else targets_T


def _on_platform(function: Callable[..., Any], precision: str | None, *arrays: jax.Array) -> Any:
    """`function` in the tiles of the platform that is compiled for, which may be another than this one."""
    return jax.lax.platform_dependent(
        *arrays,
        cpu=functools.partial(function, CPU_TILE, precision),
        default=functools.partial(function, TILE, precision),
    )


def _log_sum_exp(
    tile: Tile,
    precision: str | None,
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    targets_T: jax.Array,
    carries_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp of the logits, and the logit of the target (0 where it is none of these columns), of each row."""

    def chunk(_: None, h_CD: jax.Array, target_C: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        def add(state, place):
            top_C, total_C, picked_C = state
            _, columns_V, logits_CV = _logits(h_CD, head_VD, place, precision, tile=tile)
            new_top_C = jnp.maximum(top_C, jnp.max(logits_CV, axis=1))
            total_C = total_C * jnp.exp(top_C - new_top_C) + jnp.sum(jnp.exp(logits_CV - new_top_C[:, None]), axis=1)
            picked_C += jnp.sum(jnp.where(columns_V == target_C[:, None], logits_CV, 0.0), axis=1)
            return (new_top_C, total_C, picked_C), None

        zeros_C = jnp.zeros(target_C.shape, jnp.float32)
        (top_C, total_C, picked_C), _ = jax.lax.scan(add, (zeros_C - jnp.inf, zeros_C, zeros_C), _places(head_VD, tile))
        return None, (top_C + jnp.log(total_C), picked_C)

    return _over_chunks(chunk, None, carries_T, tile, hidden_TD, targets_T)[1]


def _gradients(
    tile: Tile,
    precision: str | None,
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    targets_T: jax.Array,
    carries_T: jax.Array,
    lse_T: jax.Array,
    d_losses_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of these columns with respect to hidden [T, D] and head [V, D], in float32."""
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def chunk(d_head_VD, h_CD, target_C, lse_C, d_loss_C):
        def add(gradients, place):
            d_h_CD, d_head_VD = gradients
            w_VD, columns_V, logits_CV = _logits(h_CD, head_VD, place, precision, tile=tile)
            softmax_CV = jnp.exp(logits_CV - lse_C[:, None])
            d_logits_CV = d_loss_C[:, None] * (softmax_CV - (columns_V == target_C[:, None]))
            d_logits_CV = d_logits_CV.astype(h_CD.dtype)
            d_h_CD += product("CV,VD->CD", d_logits_CV, w_VD)
            start = place[0]
            before_VD = jax.lax.dynamic_slice_in_dim(d_head_VD, start, w_VD.shape[0])
            d_w_VD = before_VD + product("CV,CD->VD", d_logits_CV, h_CD)
            return (d_h_CD, jax.lax.dynamic_update_slice_in_dim(d_head_VD, d_w_VD, start, axis=0)), None

        zeros_CD = jnp.zeros(h_CD.shape, jnp.float32)
        (d_h_CD, d_head_VD), _ = jax.lax.scan(add, (zeros_CD, d_head_VD), _places(head_VD, tile))
        return d_head_VD, d_h_CD

    zeros_VD = jnp.zeros(head_VD.shape, jnp.float32)
    d_head_VD, d_hidden_TD = _over_chunks(chunk, zeros_VD, carries_T, tile, hidden_TD, targets_T, lse_T, d_losses_T)
    return d_hidden_TD, d_head_VD


def _over_chunks(
    chunk: Callable[..., tuple[Any, Any]], carry: Any, carries_T: jax.Array, tile: Tile, *arrays: jax.Array
) -> tuple[Any, Any]:
    """Chunk after chunk of the rows that carry a loss: (carry, rows of `arrays`) -> (carry, results of these rows).

    Returns:
      the last carry, and the results in the order of the rows, 0 for rows without a loss.
    """
    T = carries_T.shape[0]
    C = min(tile.rows, T)
    chunks = -(-T // C)
    count = jnp.sum(carries_T)
    rows_NC = jnp.flatnonzero(carries_T, size=chunks * C, fill_value=T).reshape(chunks, C)

    def run(carry, rows_C):  # past the last row with a loss: zeros, which add nothing
        take = functools.partial(jnp.take, indices=rows_C, axis=0, mode="fill", fill_value=0, indices_are_sorted=True)
        return chunk(carry, *map(take, arrays))

    _, shapes = jax.eval_shape(run, carry, rows_NC[0])

    def skip(carry, rows_C):
        return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(carry, xs):
        number, rows_C = xs
        return jax.lax.cond(number * C < count, run, skip, carry, rows_C)

    carry, results = jax.lax.scan(step, carry, (jnp.arange(chunks), rows_NC))
    place_T = jnp.cumsum(carries_T) - 1  # of each row among those with a loss

    def in_order(x):
        x = x.reshape(chunks * C, *x.shape[2:])[place_T]
        return jnp.where(jnp.expand_dims(carries_T, range(1, x.ndim)), x, 0)

    return carry, jax.tree.map(in_order, results)


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


def _logits(
    h_CD: jax.Array, head_VD: jax.Array, place: tuple[jax.Array, jax.Array], precision: str | None, *, tile: Tile
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A tile of the head, its columns, and the logits; -inf, and no column, where the tile repeats what another has."""
    start, fresh = place
    V, width = head_VD.shape[0], _width(head_VD, tile)
    w_VD = jax.lax.dynamic_slice_in_dim(head_VD, start, width)
    logits_CV = jnp.einsum("CD,VD->CV", h_CD, w_VD, precision=precision, preferred_element_type=jnp.float32)
    columns_V = start + jnp.arange(width, dtype=jnp.int32)
    if V % width:
        columns_V = jnp.where(columns_V >= fresh, columns_V, _NO_COLUMN)
        logits_CV = jnp.where(columns_V >= 0, logits_CV, -jnp.inf)
    return w_VD, columns_V, logits_CV
