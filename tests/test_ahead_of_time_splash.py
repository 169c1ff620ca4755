"""The training step with the splash kernels, traced for a TPU slice that is not there: attention's FLOPs are those of the pairs
that see each other."""

import dataclasses
import importlib.util

import jax
import pytest

from tests.tiny_training import EXPERIMENT
from wedlm_jax import ahead_of_time
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.experiment import ModelConfig, override
from wedlm_jax.ops.attention import splash
from wedlm_jax.ops.attention.splash import TwoStreamMask, visited_pairs
from wedlm_jax.program_costs import kernel_runs, matmul_flops
from wedlm_jax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (680 MB, not required)"
)

LENGTH, ROWS = 1024, 8
MODEL = ModelConfig(
    vocab_size=1280, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    dtype="bfloat16",
)  # fmt: skip
SLICES = {"v5e:2x4": MeshConfig(data=1, fsdp=4, tensor=2)}


def traced(topology, remat="none"):
    experiment = dataclasses.replace(
        override(EXPERIMENT, f"data.row_length={LENGTH}", f"train.batch_size={ROWS}", "objective.block_size=32"),
        model=dataclasses.replace(MODEL, remat=remat),
        mesh=SLICES[topology],
    )
    return trace_step(experiment, make_mesh(experiment.mesh, ahead_of_time._devices(topology)))


@pytest.mark.parametrize(("remat", "forward_runs"), [("none", 1), ("full", 2)])
def test_flops_of_attention_are_within_a_third_of_the_count_by_hand(monkeypatch, remat, forward_runs):
    """By hand: every pair that sees each other takes part in 2 products of the forward pass and 7 of the backward pass, whose two
    kernels both compute scores and weights again; of one document a row, the most that a row can cost."""
    total = matmul_flops(traced("v5e:2x4", remat).jaxpr.jaxpr)
    monkeypatch.setattr(splash, "kernel_runs", lambda times: kernel_runs(0))
    jax.clear_caches()
    attention = total - matmul_flops(traced("v5e:2x4", remat).jaxpr.jaxpr)
    pairs = visited_pairs(TwoStreamMask(LENGTH, 32))["useful"]
    by_hand = (2 * forward_runs + 7) * 2 * MODEL.head_dim * MODEL.num_heads * MODEL.num_layers * ROWS * pairs
    assert by_hand <= attention <= 1.3 * by_hand
