"""A function of each token, computed for a tile of tokens at a time: in a backward pass only one tile's values are there.

As in the MLP by tiles of long-sequence training (ALST, arXiv 2506.13996).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]


def by_tiles(function: Callable[..., jax.Array], tile: int | None, x_BLD: jax.Array, *rows: jax.Array) -> jax.Array:
    """`function(x_BLD, *rows)`, where no token's result [B, L, ...] depends on another's.

    Args:
      function: what it computes on the way is computed again in the backward pass, tile by tile, whatever a remat policy
        around it would keep.
      tile: tokens of a row at once, at most. None, or a row that is no longer: all at once, and nothing twice.
      x_BLD: [B, L, D].
      rows: what else it reads of each token, [B, L, ...]; no gradient is taken of these.
    """
    B, L = x_BLD.shape[:2]
    if tile is None or tile >= L:
        return function(x_BLD, *rows)
    tiles = -(-L // tile)
    tile = -(-L // tiles)  # as even as they can be
    missing = tiles * tile - L

    def cut(x: jax.Array) -> jax.Array:
        # Not by `jnp.pad`, which pads every axis, if by nothing: for its gradient devices that cut rows send each other zeros.
        last = jnp.repeat(x[:, -1:], missing, axis=1)
        padded = jnp.concatenate([x, last], axis=1) if missing else x
        return jnp.swapaxes(padded.reshape(B, tiles, tile, *x.shape[2:]), 0, 1)

    cuts = cut(x_BLD), tuple(cut(x) for x in rows)
    function, read = jax.closure_convert(function, cuts[0][0], *(x[0] for x in cuts[1]))
    y = jnp.swapaxes(_mapped(function, tuple(read), *cuts), 0, 1)
    return y.reshape(B, tiles * tile, *y.shape[3:])[:, :L]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mapped(function: Callable[..., jax.Array], read: Arrays, x: jax.Array, rows: Arrays) -> jax.Array:
    return jax.lax.map(lambda cut: function(cut[0], *cut[1], *read), (x, rows))


def _forward(function: Callable[..., jax.Array], *given: Any) -> tuple[jax.Array, Any]:
    return _mapped(function, *given), given


def _backward(function: Callable[..., jax.Array], given: Any, d_y: jax.Array) -> tuple[Arrays, jax.Array, None]:
    read, x, rows = given

    def of_tile(d_read: Arrays, cut: Any) -> tuple[Arrays, jax.Array]:
        x, rows, d_y = cut
        d_read_of_tile, d_x = jax.vjp(lambda read, x: function(x, *rows, *read), read, x)[1](d_y)
        return jax.tree.map(jnp.add, d_read, d_read_of_tile), d_x

    return *jax.lax.scan(of_tile, jax.tree.map(jnp.zeros_like, read), (x, rows, d_y)), None


_mapped.defvjp(_forward, _backward)
