"""Many requests, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wedlm_jax.decode.generation import Request, decode_batch, row_bucket
from wedlm_jax.decode.stats import Completion
from wedlm_jax.model.handle import Model
from wedlm_jax.sharding import batch_parts


def in_batches(
    model: Model, requests: Sequence[Request], *, batch_size: int, trace: bool = False
) -> Iterator[Completion]:
    """Completes requests of one `DecodeConfig.program` in as few batches as `batch_size` allows, all of one
    number of rows: every other number would be a program to compile, which takes longer than many a batch.

    Args:
      requests: from `make_request`, at least one.
      batch_size: the most requests decoded at once.

    Returns:
      completions in the order of the requests, those of a batch as soon as it is done.

    Raises:
      UserError: a batch does not fit in memory.
    """
    parts = batch_parts(model.weights.mesh)
    most = batch_size - batch_size % parts or batch_size  # what the mesh does not divide every device computes whole
    batches = -(-len(requests) // most)
    rows = min(row_bucket(-(-len(requests) // batches), model.weights.mesh), most)
    for start in range(0, len(requests), rows):
        yield from decode_batch(model, requests[start : start + rows], trace, rows=rows)
