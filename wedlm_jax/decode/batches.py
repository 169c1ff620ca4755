"""Many requests, batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from wedlm_jax.decode.generation import Request, decode_batch
from wedlm_jax.decode.stats import Completion
from wedlm_jax.model.handle import Model


def in_batches(
    model: Model, requests: Sequence[Request], *, batch_size: int, trace: bool = False
) -> Iterator[Completion]:
    """Completes requests of one decoder, refill rule and window bucket in as few batches as `batch_size` allows, all of one
    number of rows: every other number would be a program to compile, which takes longer than many a batch.

    Args:
      requests: from `make_request`, at least one.
      batch_size: the most requests decoded at once.

    Returns:
      completions in the order of the requests, those of a batch as soon as it is done.

    Raises:
      UserError: a batch does not fit in memory.
    """
    batches = -(-len(requests) // batch_size)
    rows = -(-len(requests) // batches)
    shortest = min(requests, key=lambda request: len(request.prompt))
    # What fills the last batch up, always fewer rows than there are batches, ends with its first token.
    filler = shortest._replace(config=dataclasses.replace(shortest.config, max_new_tokens=1))
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        filled_up = [*batch, *[filler] * (rows - len(batch))]
        yield from decode_batch(model, filled_up, trace)[: len(batch)]
