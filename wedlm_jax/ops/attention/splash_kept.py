"""Splash attention over two streams of which the second is there in part: what its queries see of the first is data.

`splash.TwoStreamMask` says by places alone who sees whom, and its schedule is made while the step is traced. Of a prediction
stream without the blocks that nobody reads, the places say nothing about the memory: so each query brings along how far it sees
(its reach), and the schedule is made on the device, from the reaches and the documents of each row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.ops.attention.splash_tiles import Steps, block_start, meeting


@dataclasses.dataclass(frozen=True)
class KeptMask:
    """A row of a stream of `length` tokens and of `kept` tokens of a second one: some of its blocks, one behind the other.

    A query sees the tokens of the first stream before its reach, and of the second its own block: up to itself, or all of it if
    `bidirectional`. The reach of a query of the first stream is the place after its own.
    """

    length: int
    kept: int
    block_size: int
    bidirectional: bool = False

    @property
    def tokens(self) -> int:
        return self.length + self.kept

    def __call__(self, query: Any, key: Any, reach: Any) -> Any:
        offset = query - self.length
        block = block_start(offset, self.block_size)
        own = key >= block + self.length
        if self.bidirectional:
            own &= (offset >= 0) & (key < block + (self.length + self.block_size))
        else:
            own &= key <= query
        return (key < reach) | own

    def pairs(self, tile: int) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of queries and of keys, [S] each, of which one may see the other; those of a tile of queries in a row."""
        first, left_out, found = self.length // tile, (self.length - self.kept) // tile, []
        for q in range(self.tokens // tile):
            # A block is as many places further in the whole stream as blocks before it are left out.
            found += [(q, k) for k in range(q + 1 if q < first else left_out + q - first + 1)]
            if q >= first:
                begin, end = (
                    place - (place - self.length) % self.block_size for place in (q * tile, (q + 1) * tile - 1)
                )
                last = min(end + self.block_size, self.tokens) - 1 if self.bidirectional else (q + 1) * tile - 1
                found += [(q, k) for k in range(max(begin // tile, first), last // tile + 1)]
        q_tile, k_tile = np.array(found).T
        return q_tile, k_tile


def steps_of(mask: KeptMask, segments_T: jax.Array, reach_T: jax.Array, tile: int) -> Steps:
    """The pairs of tiles in which anything is seen."""
    q_tile, k_tile = mask.pairs(tile)
    meet, of_one = meeting(segments_T, tile, q_tile, k_tile)
    reach = reach_T.reshape(-1, tile)
    nearest, farthest = jnp.min(reach, axis=1)[q_tile], jnp.max(reach, axis=1)[q_tile]
    of_first = k_tile < mask.length // tile
    # Every query sees itself. Tiles of its own block beside those of other documents are few.
    visited = (k_tile == q_tile) | ~of_first | (meet & (k_tile * tile < farthest))
    whole = of_first & of_one & ((k_tile + 1) * tile <= nearest)
    return Steps.of(q_tile, k_tile, ~whole, visited)
