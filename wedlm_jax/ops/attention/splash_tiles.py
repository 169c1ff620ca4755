"""What our two kernels of splash attention share: which pairs of tiles they visit, how arrays are cut into tiles, the mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES_BY_LANES = (((1,), (1,)), ((), ()))  # a @ b.T
LANES = 128  # numbers that a core's vector unit computes with at once, side by side in memory


def block_start(place: Any, block_size: int) -> Any:
    """The first place of the block that `place` is in, without a division where the size is a power of two."""
    return place & -block_size if block_size & (block_size - 1) == 0 else place - place % block_size


class Steps(NamedTuple):
    """Which pairs of tiles the kernels visit: the first `visited` of `pairs`, all those of a tile of queries in a row."""

    pairs: jax.Array  # int32 [3, S]: tile of queries, tile of keys, 1 where not all of it is seen
    visited: jax.Array | int

    @classmethod
    def of(cls, q_tile: Any, k_tile: Any, partial: Any, visited: jax.Array) -> Steps:
        """Those of the pairs, in their order, of which bool [S] says that they are visited."""
        pairs = jnp.stack([jnp.asarray(x, jnp.int32) for x in (q_tile, k_tile, partial)])
        return cls(pairs[:, jnp.argsort(~visited, stable=True)], jnp.sum(visited))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Blocks of arrays in a grid of (key heads, query heads of each, steps)."""

    tile: int  # tokens
    head_dim: int
    group: int  # query heads of a key head

    @property
    def queries(self) -> pl.BlockSpec:
        """Of [N, T, H]."""
        return pl.BlockSpec(
            (None, self.tile, self.head_dim), lambda k, g, s, q_tile, *_: (k * self.group + g, q_tile[s], 0)
        )

    @property
    def keys(self) -> pl.BlockSpec:
        """Of [K, T, H]."""
        return pl.BlockSpec((None, self.tile, self.head_dim), lambda k, g, s, q_tile, k_tile, *_: (k, k_tile[s], 0))

    @property
    def row(self) -> pl.BlockSpec:
        """Of a number for each query, [N, 1, T]."""
        return pl.BlockSpec((None, 1, self.tile), lambda k, g, s, q_tile, *_: (k * self.group + g, 0, q_tile[s]))

    def segments(
        self, segments_T: jax.Array | None, reach_T: jax.Array | None
    ) -> tuple[list[pl.BlockSpec], list[jax.Array]]:
        """Blocks of three arrays [1, T], and the arrays: the ids of the queries, those of the keys, the reach of the queries.
        What is not given is left out."""
        if segments_T is None:
            return [], []
        of_queries = pl.BlockSpec((1, self.tile), lambda k, g, s, q_tile, *_: (0, q_tile[s]))
        of_keys = pl.BlockSpec((1, self.tile), lambda k, g, s, q_tile, k_tile, *_: (0, k_tile[s]))
        reach = [] if reach_T is None else [reach_T[None]]
        return [of_queries, of_keys, of_queries][: 2 + len(reach)], [segments_T[None]] * 2 + reach


def product(a: jax.Array, b: jax.Array, dimensions: Any = (((1,), (0,)), ((), ()))) -> jax.Array:
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def visible(
    shape: tuple[int, ...],
    q_tile: Any,
    k_tile: Any,
    sees: Callable[[Any, Any], Any],
    segment_refs: Sequence[Any],
    *,
    keys: int,
) -> jax.Array:
    """bool, of this shape: what is seen of a pair of tiles, by places, reach and segments. `keys`: the axis of the keys."""
    places = ((1 - keys, q_tile), (keys, k_tile))
    reach = [jnp.expand_dims(ref[0], keys) for ref in segment_refs[2:]]
    index = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + tile * shape[axis] for axis, tile in places)
    seen = sees(*index, *reach)
    if segment_refs:
        of_queries, of_keys = (
            jnp.expand_dims(ref[0], 1 - axis) for ref, (axis, _) in zip(segment_refs[:2], places, strict=True)
        )
        seen &= of_queries == of_keys
    return seen


def meeting(segments_T: jax.Array, tile: int, q_tile: Any, k_tile: Any) -> tuple[jax.Array, jax.Array]:
    """Of pairs of tiles, whether any two tokens of them may share a segment, and whether all do.

    For the first a tile is known by its least and greatest segment id, so ids that grow along the row, as packing gives them,
    let the fewest tiles meet. Padding counts for nothing.
    """
    ids = segments_T.reshape(-1, tile)
    least = jnp.min(jnp.where(ids == 0, jnp.iinfo(ids.dtype).max, ids), axis=1)
    greatest = jnp.max(ids, axis=1)
    first, alike = ids[:, 0], jnp.all(ids == ids[:, :1], axis=1)
    of_one = alike[q_tile] & alike[k_tile] & (first[q_tile] == first[k_tile])
    return (least[q_tile] <= greatest[k_tile]) & (least[k_tile] <= greatest[q_tile]), of_one
