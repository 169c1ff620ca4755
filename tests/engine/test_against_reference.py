"""Requests that arrive while others run equal the list-based reference, each as if it ran alone: random arrivals, prompts,
settings and stop rules, rows of several decoders side by side."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from wedlm_jax import Engine

from ..conftest import FULL, examples
from ..decode.models import LOOPS, tiny_model
from ..decode.test_against_reference import TIE, expected, requests

DECODERS = tuple(LOOPS) if FULL else ("streaming_eager", "verified")


def test_staggered_requests_equal_the_list_based_reference():
    # One for all cases: rows are used again and again.
    served = Engine(tiny_model(), rows=2, context=32, steps=2, queue=20)
    compared, discarded, waited = 0, 0, 0
    # Runs of two steps before each, and the request.
    arrivals = st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(DECODERS).flatmap(requests)), min_size=3, max_size=6
    )

    @settings(max_examples=examples(25, 1200))
    @given(arrivals)
    def check(case):
        nonlocal compared, discarded, waited
        tickets = []
        for pause, (prompt, config) in case:
            for _ in range(pause):
                served.step()
            waited += served.running > 0
            tickets.append(served.submit(prompt, config))
        served.run()
        for (_, (prompt, config)), ticket in zip(case, tickets, strict=True):
            (row,) = expected(0, [prompt], [config])
            if row.margin < TIE:
                discarded += 1
                continue
            ours = ticket.result()
            assert (ours.ids, ours.finish_reason) == (row.emitted, row.finish)
            assert (ours.stats.forwards, ours.stats.tokens_processed) == (row.forwards, row.processed)
            compared += 1

    check()
    print(f"{compared} requests compared, {discarded} discarded, {waited} came while others ran")
    assert discarded <= 0.05 * (compared + discarded)
    assert waited > 0.3 * compared
