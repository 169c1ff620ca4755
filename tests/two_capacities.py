"""Programs of an adapter's step for two numbers of places, not for four.

For tests of the ordinary run that have nothing to do with how many there are; tests/test_mask_training.py tries all four.
"""

import functools

import pytest

from tests.conftest import FULL
from wedlm_jax import mask_training, train_step
from wedlm_jax import train as train_module
from wedlm_jax.model import kept_blocks


def with_two_capacities(patch: pytest.MonkeyPatch) -> None:
    """All places and a half of them, also in steps that `train` compiles: those are kept apart from steps for all four."""
    if FULL:
        return
    for module in (kept_blocks, mask_training):
        patch.setattr(module, "capacities", lambda length: (length, -(-length // 2)))
    patch.setattr(train_module, "compile_step", functools.cache(train_step.compile_step.__wrapped__))
