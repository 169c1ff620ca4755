"""What the training step of Qwen3-0.6B, of one layer, compiles to for a TPU that is not there."""

import importlib.util
import math

import pytest

from benchmarks import step_for_tpu
from benchmarks.cycles import operations
from tests.compiled_step import shapes_in
from tests.conftest import FULL
from tests.optimized import optimized  # noqa: F401  for every test of this file
from wedlm_jax.absent_devices import devices
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.experiment import load_experiment
from wedlm_jax.program_costs import collectives
from wedlm_jax.sharding import make_mesh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)


SMALL = [
    "model.num_layers=1",
    "model.vocab_size=1024",
    "data.row_length=1024",
    "train.batch_size=8",
    "train.micro_batches=1",
]


@pytest.fixture(scope="module")
def experiment():
    return load_experiment("qwen3_0p6b_sft", SMALL)


@pytest.fixture(scope="module")
def text(experiment):
    mesh = make_mesh(experiment.mesh, devices("v5e:2x4"))
    return trace_step(experiment, mesh).lower().compile().as_text()


def test_cycles_are_told_of_products_and_of_the_rest(text):
    found = list(operations(text))
    assert (
        sum(one.cycles for one in found if one.multiplies) > sum(one.cycles for one in found if not one.multiplies) > 0
    )


@pytest.mark.skipif(not FULL, reason="compiles four steps: launch/test.sh --full")
def test_the_benchmark_shows_what_each_mend_saves(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step_for_tpu", *SMALL])
    step_for_tpu.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    cycles, kernels = ([int(row[column].replace(",", "")) for row in rows[-4:]] for column in (1, 4))
    assert cycles[0] > 1.3 * cycles[1] > 1.3 * cycles[2] and kernels == [2, 2, 2, 1]


def test_no_product_is_cut_by_the_devices_that_its_kernel_comes_from(text):
    """In as many narrow ones as there are devices, each computed as its part is handed on."""
    assert {one.kind for one in collectives(text)} <= {"all-gather", "all-reduce", "reduce-scatter"}


def test_halves_of_queries_and_keys_are_no_arrays(text, experiment):
    """Of 64 lanes of the 128 that a TPU computes with."""
    tokens, half = 2 * experiment.data.row_length, experiment.model.head_dim // 2
    of_tokens = [shape for shape in shapes_in(text) if shape[-1] == half and tokens in shape]
    assert of_tokens and max(map(math.prod, of_tokens)) <= tokens * half, "angles alone are"
