"""What a decode step's attention costs follows the slots that are used, not those that are allocated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick_jit import quick_jit
from wedlm_jax.ops.attention import attend_cache, cache
from wedlm_jax.program_costs import matmul_flops

B, T, N, K, H = 2, 16, 4, 2, 8


@pytest.fixture
def cost(monkeypatch):
    """FLOPs of the program that the device chooses, and bytes of keys and values that it reads."""
    costs = []
    attend = cache.attend_ranges

    def counted(q, k, v, *ranges):
        flops = matmul_flops(jax.make_jaxpr(attend)(q, k, v, *ranges).jaxpr)
        costs.append((flops, k.nbytes + v.nbytes))
        return q, jnp.zeros(q.shape[:3])  # of its shapes: what it computes does not matter here

    monkeypatch.setattr(cache, "attend_ranges", counted)
    # Outside a jit, the branch that runs is the one that is called.
    monkeypatch.setattr(jax.lax, "switch", lambda index, programs, *operands: programs[int(index)](*operands))

    def of(allocated: int, used: int) -> tuple[int, int]:
        q, keys = jnp.ones((B, T, N, H)), jnp.ones((1, B, K, allocated, H))
        end = used - T + 1 + np.broadcast_to(np.arange(T), (B, T))
        attend_cache(q, keys, keys, jnp.int32(0), jnp.asarray(end))
        return costs.pop()

    return of


def test_the_same_used_context_costs_the_same_in_any_allocation(cost):
    assert {cost(allocated, 300) for allocated in (512, 1024, 2048, 4096, 8192)} == {cost(512, 512)}


def test_a_longer_used_context_costs_more_and_at_most_what_twice_the_slots_cost(cost):
    flops = {used: cost(8192, used) for used in (256, 512, 1024, 2048, 4096, 8192)}
    assert sorted(flops.values()) == list(flops.values()) and len(set(flops.values())) == len(flops)
    for allocated in (700, 5000, 8191):
        for used in (T, 257, 600):
            assert cost(allocated, used)[1] <= 2 * B * K * H * 4 * 2 * max(used, cache.smallest_context(B))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_window_over_a_long_context_copies_no_more_than_the_slots_of_its_bucket(rows):
    """Not the whole cache, and not with its heads and slots turned round: that took longer than the attention."""
    q, keys, end = jnp.ones((rows, T, N, 64)), jnp.ones((1, rows, K, 8192, 64)), jnp.full((rows, T), 8000)
    program = quick_jit(lambda q, k, v, end: attend_cache(q, k, v, 0, end)).lower(q, keys, keys, end).compile()
    # The keys and the values of 4,096 slots, half the cache, and some tiles; the whole cache is read where it lies.
    assert program.memory_analysis().temp_size_in_bytes <= 1.3 * keys.nbytes
