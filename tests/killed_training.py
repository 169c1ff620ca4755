"""A training run that is cut off."""

import pytest

from wedlm_jax.data.pipeline import PackedBatches
from wedlm_jax.train import train


class Killed(BaseException):
    """Ends a run as abruptly as a signal would."""


def train_until_killed(experiment, workdir, draws: int) -> None:
    """`train`, killed where it asks for a batch after so many."""
    draw, left = PackedBatches.__next__, iter(range(draws))

    def next_batch(stream):
        if next(left, None) is None:
            raise Killed
        return draw(stream)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PackedBatches, "__next__", next_batch)
        train(experiment, workdir)
