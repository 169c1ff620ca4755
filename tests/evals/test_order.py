"""Commit rate and order of filling, counted by hand from a trace."""

from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.evals.order import filling_order


def entry(emitted, masks, filled):
    return {"emitted": emitted, "mask_positions": masks, "filled_positions": filled}


def test_what_the_next_forward_commits_and_what_is_filled_right_of_an_open_mask():
    trace = [
        entry(0, [3, 4, 5], [4]),  # right of the open mask at 3, and not committed by the next forward
        entry(0, [3, 5], [3, 5]),  # both committed by the next, with 4
        entry(3, [], []),
    ]
    order = filling_order([Completion([10, 11, 12], "length", Stats(3, 3, 9), trace=trace)], [3])
    assert (order.filled, order.committed_next, order.right_of_a_mask) == (3, 2, 1)
    assert (order.commit_rate, order.out_of_order) == (2 / 3, 1 / 3)


def test_what_is_filled_behind_the_end_of_the_output_does_not_count():
    trace = [entry(0, [3, 4], [3, 4]), entry(1, [5], [])]  # the token at 3 ends it
    order = filling_order([Completion([10], "stop", Stats(1, 2, 4), trace=trace)], [3])
    assert (order.filled, order.committed_next, order.right_of_a_mask) == (1, 1, 0)
