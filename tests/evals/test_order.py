"""Commit rate and order of filling, counted by hand from a trace."""

from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.evals.order import filling_order


def entry(base, emitted, masks, filled, tokens=None):
    """Of a forward that fills `filled` with `tokens`: by default those of an output 10, 11, ... behind three prompt tokens."""
    tokens = tokens or [7 + position for position in filled]
    return {
        "base": base,
        "emitted": emitted,
        "mask_positions": masks,
        "filled_positions": filled,
        "filled_tokens": tokens,
    }


def test_what_the_next_forward_commits_and_what_is_filled_right_of_an_open_mask():
    trace = [
        entry(3, 0, [3, 4, 5], [4]),  # right of the open mask at 3, and not committed by the next forward
        entry(3, 0, [3, 5], [3, 5]),  # both committed by the next, with 4
        entry(3, 3, [], []),
    ]
    order = filling_order([Completion([10, 11, 12], "length", Stats(3, 3, 9), trace=trace)], [3])
    assert (order.filled, order.committed_next, order.right_of_a_mask) == (3, 2, 1)
    assert (order.commit_rate, order.out_of_order) == (2 / 3, 1 / 3)


def test_what_is_filled_behind_the_end_of_the_output_does_not_count():
    trace = [entry(3, 0, [3, 4], [3, 4]), entry(3, 1, [5], [])]  # the token at 3 ends it
    order = filling_order([Completion([10], "stop", Stats(1, 2, 4), trace=trace)], [3])
    assert (order.filled, order.committed_next, order.right_of_a_mask) == (1, 1, 0)


def test_a_block_is_committed_by_the_forward_behind_the_one_that_fills_it():
    trace = [
        entry(3, 0, [3, 4], [3]),  # emitted by the next forward, cached by the one after it
        entry(3, 2, [4], [4]),  # cached by the next
        entry(3, 0, [5, 6], [5]),  # in the last block, which nothing has to cache
        entry(5, 2, [6], [6]),
    ]
    order = filling_order([Completion([10, 11, 12, 13], "length", Stats(4, 4, 10), trace=trace)], [3])
    assert (order.filled, order.committed_next, order.right_of_a_mask) == (4, 3, 0)


def test_the_ar_token_of_a_verified_forward_leaves_no_open_mask_and_a_rejected_draft_is_not_committed():
    trace = [
        entry(2, 1, [3, 4, 5], [4, 5], [11, 99]),  # the AR token takes 3: nothing is open to the left of the drafts
        entry(3, 2, [], []),  # accepts the draft at 4, replaces the one at 5
        entry(5, 1, [], []),
    ]
    order = filling_order([Completion([10, 11, 12, 13], "length", Stats(4, 3, 8), trace=trace)], [3])
    assert (order.filled, order.committed_next, order.right_of_a_mask) == (2, 1, 0)


def test_a_draft_that_the_last_forward_replaces_is_not_committed():
    trace = [
        entry(2, 1, [3, 4, 5], [4, 5], [11, 99]),
        entry(3, 2, [], []),  # accepts the draft at 4, replaces the one at 5: the output ends there
    ]
    order = filling_order([Completion([10, 11, 12], "length", Stats(3, 2, 7), trace=trace)], [3])
    assert (order.filled, order.committed_next) == (2, 1)
