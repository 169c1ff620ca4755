"""Blocks of a prediction stream that run, while the others are left out.

Of a block without a mask, of a prompt or of padding, no row carries a loss of its own and no other block sees one: what it would
compute is read by nobody. The rows that are left are as many in every row of the batch, one of a few static numbers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


def capacities(length: int) -> tuple[int, ...]:
    """Numbers of rows, or blocks, that programs are compiled for: all, three quarters, a half, a quarter."""
    return tuple(sorted({-(-quarters * length // 4) for quarters in (1, 2, 3, 4)}, reverse=True))


def least_holding(*chosen_BL: jax.Array) -> list[jax.Array]:
    """Of each, the number of the least of `capacities` that holds the chosen rows of every row of the batch."""
    # One maximum for all: over a mesh it is one reduction.
    most = jnp.max(jnp.stack([jnp.sum(chosen, axis=1) for chosen in chosen_BL]), axis=1)
    holds = most[:, None] <= jnp.array(capacities(chosen_BL[0].shape[1])[1:])
    return list(jnp.sum(holds, axis=1))


def with_a_mask(masked_BL: jax.Array, block_size: int) -> jax.Array:
    """bool [B, blocks]: the blocks that hold a mask."""
    return jnp.any(masked_BL.reshape(len(masked_BL), -1, block_size), axis=2)


def beside_a_mask(masked_BL: jax.Array, block_size: int) -> jax.Array:
    """bool [B, L]: the rows of these blocks."""
    return jnp.repeat(with_a_mask(masked_BL, block_size), block_size, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeptBlocks:
    """C blocks of a stream, in their order: all that must run, and some that need not."""

    blocks: jax.Array  # int [B, C]
    block_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, chosen_BM: jax.Array, block_size: int, capacity: int) -> KeptBlocks:
        """All blocks where bool [B, M] is True, which must be `capacity` at most, and others where there is room."""
        first = jnp.argsort(~chosen_BM, axis=1, stable=True)[:, :capacity]
        return cls(jnp.sort(first, axis=1), block_size)

    def take(self, x_BL: jax.Array) -> jax.Array:
        """[B, C * J, ...] of [B, L, ...]: the kept blocks, one behind the other."""
        return _take(x_BL, self.blocks, self.block_size)

    def put(self, x_BC: jax.Array, length: int) -> jax.Array:
        """[B, L, ...] of [B, C * J, ...]: back in their places, and zeros in the others."""
        return _put(x_BC, self.blocks, self.block_size, length)

    def there(self, length: int) -> jax.Array:
        """bool [B, L]: the rows of the kept blocks."""
        _, kept = _ranks(self.blocks, length // self.block_size)
        return jnp.repeat(kept, self.block_size, axis=1)


# Each is the other's transpose. Written as gathers both: the transpose of a gather would be a scatter, which is slower.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take(x_BL: jax.Array, blocks: jax.Array, block_size: int) -> jax.Array:
    return _rows_of(x_BL, blocks, block_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _put(x_BC: jax.Array, blocks: jax.Array, block_size: int, length: int) -> jax.Array:
    rank, kept = _ranks(blocks, length // block_size)
    there = jnp.repeat(kept, block_size, axis=1).reshape(*kept.shape[:1], length, *[1] * (x_BC.ndim - 2))
    return jnp.where(there, _rows_of(x_BC, rank, block_size), jnp.zeros((), x_BC.dtype))


_take.defvjp(
    lambda x, blocks, block_size: (_take(x, blocks, block_size), (blocks, x.shape[1])),
    lambda block_size, kept, d: (_put(d, kept[0], block_size, kept[1]), None),
)
_put.defvjp(
    lambda x, blocks, block_size, length: (_put(x, blocks, block_size, length), blocks),
    lambda block_size, _, blocks, d: (_take(d, blocks, block_size), None),
)


def _rows_of(x_BT: jax.Array, blocks_BC: jax.Array, block_size: int) -> jax.Array:
    """The rows of these blocks, [B, C * J, ...]."""
    x = x_BT.reshape(x_BT.shape[0], -1, block_size, *x_BT.shape[2:])
    taken = jnp.take_along_axis(x, blocks_BC.reshape(*blocks_BC.shape, *[1] * (x.ndim - 2)), axis=1)
    return taken.reshape(x_BT.shape[0], -1, *x_BT.shape[2:])


def _ranks(blocks_BC: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Of each of `count` blocks its place among the kept ones, any place if it is not, and whether it is: [B, count] each."""
    same = blocks_BC[:, None, :] == jnp.arange(count)[:, None]
    return jnp.argmax(same, axis=2), jnp.any(same, axis=2)
