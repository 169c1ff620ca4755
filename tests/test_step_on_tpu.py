"""What the training step of Qwen3-0.6B, of one layer, compiles to for a TPU that is not there."""

import importlib.util
import math

import pytest

from tests.compiled_step import shapes_in
from tests.optimized import optimized  # noqa: F401  for every test of this file
from wedlm_jax.absent_devices import devices
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.experiment import load_experiment
from wedlm_jax.program_costs import collectives
from wedlm_jax.sharding import make_mesh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)


@pytest.fixture(scope="module")
def experiment():
    small = [
        "model.num_layers=1",
        "model.vocab_size=1024",
        "data.row_length=1024",
        "train.batch_size=8",
        "train.micro_batches=1",
    ]
    return load_experiment("qwen3_0p6b_sft", small)


@pytest.fixture(scope="module")
def text(experiment):
    mesh = make_mesh(experiment.mesh, devices("v5e:2x4"))
    return trace_step(experiment, mesh).lower().compile().as_text()


def test_no_product_is_cut_by_the_devices_that_its_kernel_comes_from(text):
    """In as many narrow ones as there are devices, each computed as its part is handed on."""
    assert {one.kind for one in collectives(text)} <= {"all-gather", "all-reduce", "reduce-scatter"}


def test_halves_of_queries_and_keys_are_no_arrays(text, experiment):
    """Of 64 lanes of the 128 that a TPU computes with."""
    tokens, half = 2 * experiment.data.row_length, experiment.model.head_dim // 2
    of_tokens = [shape for shape in shapes_in(text) if shape[-1] == half and tokens in shape]
    assert of_tokens and max(map(math.prod, of_tokens)) <= tokens * half, "angles alone are"
