"""What the splash kernels compute: counted from their schedule, and by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from wedlm_jax.ops.attention import splash


def visited_pairs(mask: splash.Mask, segment_ids_L: np.ndarray | None = None) -> dict[str, int]:
    """Query-key pairs of one row and head: `useful` ones, and those in the tiles that each kernel visits.

    A visited pair costs 2 products of H multiply-adds in `forward`, 3 in `dq` and 4 in `dkv`, or 5 in `joint` for both.
    """
    kernel = splash._kernel(mask, 1, interpret=True)
    index = np.arange(mask.tokens)
    segments = None if segment_ids_L is None else np.tile(segment_ids_L, mask.tokens // mask.length)
    useful = 0
    for query in index:
        visible = mask(query, index)
        if segments is not None:
            visible = visible & (segments == segments[query]) & (segments[query] > 0)
        useful += int(visible.sum())
    joint = splash._steps(kernel, None if segments is None else jnp.asarray(segments)).visited
    if segments is not None:
        kernel = splash._without_other_segments(kernel, jnp.asarray(segments))
    tiles = splash._tiles_visited(kernel) | {"joint": int(joint)}
    return {"useful": useful} | {name: number * splash._tile(mask) ** 2 for name, number in tiles.items()}
