"""What a further slot is taken to cost: by platform and, on a CPU, by whether its caches hold the weights."""

import pytest

from tests.model.tiny import tiny_model
from wedlm_jax.model import slot_cost
from wedlm_jax.model.slot_cost import ON_ACCELERATOR, ON_CPU, ON_CPU_FROM_CACHE


@pytest.mark.parametrize(
    ("platform", "cache", "cost"),
    [
        ("cpu", 2**25, ON_CPU_FROM_CACHE),
        ("cpu", 2**10, ON_CPU),
        ("tpu", 2**25, ON_ACCELERATOR),
        ("gpu", 2**10, ON_ACCELERATOR),
    ],
)
def test_it_follows_from_platform_and_size(platform, cache, cost, monkeypatch):
    monkeypatch.setattr(slot_cost, "target_platform", lambda: platform)
    monkeypatch.setattr(slot_cost, "PROCESSOR_CACHE", cache)
    assert slot_cost.slot_cost(tiny_model().transformer) == cost
