"""Many requests at once, their completions in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from wedlm_jax.decode.generation import Request, bucket
from wedlm_jax.decode.stats import Completion
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.ticket import Ticket
from wedlm_jax.model.handle import Model


def in_order(model: Model, requests: Sequence[Request], *, rows: int) -> Iterator[Completion]:
    """Completes requests in an engine of their own, `rows` at a time: a row that has finished goes to the next request.

    Args:
      requests: from `make_request`, at least one.
      rows: requests decoded at once.

    Returns:
      completions in the order of the requests, each as soon as it and all before it are done: where an exception ends this
      (Ctrl-C), those that were finished behind one that was not are lost.

    Raises:
      UserError: the cache does not fit in memory.
    """
    # Rounded up, so that files of about one length run the same programs.
    longest = bucket(max(len(request.prompt) + request.config.max_new_tokens for request in requests))
    context = min(longest, model.config.max_position_embeddings)
    engine = Engine(model, rows=rows, context=context, queue=rows)
    tickets: deque[Ticket] = deque()
    for request in requests:
        tickets.append(engine.submit(request.prompt, request.config, row=request.row, wait=True))
        while tickets and tickets[0].done:
            yield tickets.popleft().result()
    for ticket in tickets:
        yield ticket.result()
