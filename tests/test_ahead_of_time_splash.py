"""The training step with the splash kernels, compiled for TPU slices that are not there: nothing of the size of a mask or of all
logits, and attention's FLOPs and bytes are those of the pairs that see each other."""

import dataclasses
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import step_for_tpu
from benchmarks.cycles import operations
from tests.compiled_step import RESTS_ON, D, H, K, L, N, V, compiled_text, masks_and_logits, shapes_in
from tests.conftest import FULL
from tests.ops.visited_pairs import visited_pairs
from tests.optimized import optimized  # noqa: F401  for every test of this file
from tests.tiny_training import EXPERIMENT
from wedlm_jax import absent_devices, train_step
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.experiment import ModelConfig, override
from wedlm_jax.ops.attention import splash
from wedlm_jax.ops.attention.splash import TwoStreamMask
from wedlm_jax.program_costs import GATHERING, collectives, kernel_runs, matmul_flops
from wedlm_jax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
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
    return trace_step(experiment, make_mesh(experiment.mesh, absent_devices.devices(topology)))


@pytest.mark.parametrize(("remat", "forward_runs"), [("attention", 1), *([("full", 2), ("none", 1)] if FULL else [])])
def test_flops_of_attention_are_within_a_third_of_the_count_by_hand(monkeypatch, remat, forward_runs):
    """By hand: every pair that sees each other takes part in 2 products of the forward pass and 5 of the backward pass; of one
    document a row, the most that a row can cost."""
    total = matmul_flops(traced("v5e:2x4", remat).jaxpr.jaxpr)
    monkeypatch.setattr(splash, "kernel_runs", lambda times: kernel_runs(0))
    jax.clear_caches()
    attention = total - matmul_flops(traced("v5e:2x4", remat).jaxpr.jaxpr)
    pairs = visited_pairs(TwoStreamMask(LENGTH, 32))["useful"]
    by_hand = (2 * forward_runs + 5) * 2 * MODEL.head_dim * MODEL.num_heads * MODEL.num_layers * ROWS * pairs
    assert by_hand <= attention <= 1.3 * by_hand


EXPERIMENTS = [("qwen3_8b_sft", "v5e:2x4")]
if FULL:
    EXPERIMENTS += [("qwen3_8b_cpt", "v5e:2x4"), ("qwen3_8b_cpt", "v5p:2x2x2"), ("qwen3_8b_sft", "v5p:2x2x2")]


def test_masks_and_logits_would_be_found_in_a_text():
    found = f"pred[{2 * L},{2 * L}] f32[1,2,{L},{L}]{{3,2,1,0}} bf16[{2 * L},{V}] f32[2,{V // 2},{L}] f32[{2 * L * V}]"
    assert len(masks_and_logits(shapes_in(f"{found} f32[{L},{D}] f32[{V},{D}]"))) == 5


@pytest.mark.parametrize(("name", "topology"), EXPERIMENTS)
def test_a_step_compiles_with_the_kernels_and_without_a_mask_or_all_logits(monkeypatch, name, topology):
    """SFT and CPT: how many documents a row holds is data, so each compiles for both. Of SFT's four programs the one for all
    blocks, with --full all."""
    quarters = (4, 3, 2, 1) if FULL else (4,)
    monkeypatch.setattr(train_step, "capacities", lambda blocks: tuple(n * blocks // 4 for n in quarters))
    text = compiled_text(name, topology)
    shapes = shapes_in(text)
    assert any(2 * L in shape for shape in shapes) and any(V // 2 in shape for shape in shapes), "the search can find"
    assert masks_and_logits(shapes) == []
    assert_bytes_of_kernels(text, rows={L + n * L // 4 for n in (quarters if name.endswith("sft") else (4,))})
    assert_no_product_is_cut_by_the_devices_that_its_kernel_comes_from(text)
    assert_halves_of_queries_and_keys_are_no_arrays(shapes)
    products, rest = (sum(one.cycles for one in operations(text) if one.multiplies == which) for which in (True, False))
    assert products > 0 and rest > 0


def assert_no_product_is_cut_by_the_devices_that_its_kernel_comes_from(text: str) -> None:
    """Into as many narrow ones as there are devices, each computed as its part is handed on. Of the embedding's gradient alone
    parts are handed to all: of a device's rows the columns."""
    rows = V // RESTS_ON["tensor"] // RESTS_ON["fsdp"]
    kinds = {one.kind for one in collectives(text) if one.kind != "all-to-all" or rows not in one.shape}
    assert kinds <= {"all-gather", GATHERING, "all-reduce", "reduce-scatter"}


def assert_halves_of_queries_and_keys_are_no_arrays(shapes: set[tuple[int, ...]]) -> None:
    """Of 64 of the 128 lanes that a TPU computes with: angles of a row alone."""
    of_tokens = [shape for shape in shapes if shape[-1] == H // 2 and 2 * L in shape]
    assert of_tokens and max(map(math.prod, of_tokens)) <= 2 * L * H // 2


@pytest.mark.skipif(not FULL, reason="compiles six steps: launch/test.sh --full")
def test_the_benchmark_of_a_step_shows_what_each_mend_saves(monkeypatch, capsys):
    one_layer = ["model.num_layers=1", "model.vocab_size=1024", "data.row_length=1024"]
    monkeypatch.setattr("sys.argv", ["step_for_tpu", *one_layer, "train.batch_size=8", "train.micro_batches=1"])
    step_for_tpu.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][
        -len(step_for_tpu.FORMS) :
    ]
    cycles, kernels = ([float(row[column].replace(",", "")) for row in rows] for column in (1, 4))
    assert cycles[0] > 1.3 * cycles[1] and cycles[1] > 1.1 * cycles[2] and kernels == [2, 2, 2, 1, 1, 1]


def assert_bytes_of_kernels(text: str, rows: set[int]) -> None:
    """Operands and results of a kernel on one device, each once, are within 1.3x of the count by hand: in bfloat16 q, out and
    their gradients, k, v and theirs; in float32 the log-sum-exp and delta; ids of queries and keys, and of kept blocks how far
    each query sees."""
    heads, kv_heads = N // RESTS_ON["tensor"], K // RESTS_ON["tensor"]

    def by_hand(kernel: str, T: int) -> int:
        q, kv, row, ids = 2 * heads * T * H, 2 * kv_heads * T * H, 4 * heads * T, 4 * T * (2 if T == 2 * L else 3)
        if kernel == "splash_output":
            return 2 * q + 2 * kv + row + ids  # q, out; k, v
        return 3 * q + 4 * kv + 2 * row + ids  # q, d_out, d_q; k, v, d_k, d_v

    for kernel in ("splash_output", "splash_gradients"):
        found = set()
        calls = re.findall(rf"%{kernel}\S* = (.*?) custom-call\(.*?operand_layout_constraints=(.*?}})}}", text)
        assert calls, kernel
        for call in calls:
            arrays = re.findall(r"\b(bf16|[fs]32)\[([\d,]+)\]", " ".join(call))
            sizes = [(dtype, math.prod(map(int, dims.split(",")))) for dtype, dims in arrays]
            T = max(size for dtype, size in sizes if dtype == "bf16") // (heads * H)
            nbytes, expected = sum((2 if dtype == "bf16" else 4) * size for dtype, size in sizes), by_hand(kernel, T)
            assert expected <= nbytes <= 1.3 * expected, (kernel, nbytes, expected)
            found.add(T)
        assert found == rows, kernel


def test_tiles_read_again_are_within_a_third_of_the_count_by_hand():
    """By hand: a kernel reads a key and its value once for each tile of queries that sees it; pairs / tile in all. Counted: how
    often the schedule names another tile than the step before."""
    for length in (1024, 4096):
        mask = TwoStreamMask(length, 32)
        tile = splash._tile(mask)
        one_segment = jnp.ones(mask.tokens, jnp.int32)
        kernel = splash._kernel(mask, 1, True)
        forward = splash._without_other_segments(kernel, one_segment).fwd_mask_info
        by_hand = visited_pairs(mask)["useful"] / tile**2
        steps = splash._steps(kernel, one_segment)
        for named in (np.ravel(forward.data_next), np.asarray(steps.pairs)[1, : int(steps.visited)]):
            fetched = 1 + np.count_nonzero(np.diff(named))
            assert by_hand <= fetched <= 1.3 * by_hand, (length, fetched, by_hand)


def test_a_quarter_of_the_blocks_goes_through_the_kernels_as_it_lies(monkeypatch):
    """A small model on one chip, compiled for that number of blocks alone."""
    monkeypatch.setattr(train_step, "capacities", lambda blocks: (blocks // 4,))
    one_row = override(EXPERIMENT, f"data.row_length={LENGTH}", "train.batch_size=1", "objective.block_size=32")
    experiment = dataclasses.replace(one_row, model=dataclasses.replace(MODEL, num_layers=1))
    step = trace_step(experiment, make_mesh(MeshConfig(), absent_devices.devices("v5e:1x1")))
    text = step.lower().compile().as_text()
    for kernel in ("splash_output", "splash_gradients"):
        calls = re.findall(rf"%{kernel}\S* = .*? custom-call\(.*", text)
        assert calls and all(f"[4,{LENGTH + LENGTH // 4},64]" in call for call in calls), kernel


def test_one_chip_takes_the_kernels_too():
    experiment = dataclasses.replace(
        override(EXPERIMENT, f"data.row_length={LENGTH}", "train.batch_size=1"),
        model=dataclasses.replace(MODEL, num_layers=1),
    )
    step = trace_step(experiment, make_mesh(MeshConfig(), absent_devices.devices("v5e:1x1")))
    assert "splash_gradients" in (step.lower().compile().as_text() if FULL else str(step.jaxpr))
