"""`--compile-only`: what it reports, what it needs, and one line for each way in which it cannot be done."""

import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import step_for_gpu
from tests.compiled_step import D, L, V, compiled_text, masks_and_logits, shapes_in
from tests.conftest import FULL
from tests.hf.conftest import ORACLE
from tests.one_line import message_of
from tests.optimized import optimized  # noqa: F401  for every test of this file
from tests.tiny_training import EXPERIMENT
from wedlm_jax import absent_devices, ahead_of_time, train_step
from wedlm_jax.absent_devices import CHIPS, canonical, chip_of, devices
from wedlm_jax.ahead_of_time import StepReport, compile_only, trace_step
from wedlm_jax.experiment import MeshConfig, ModelOverrides, load_experiment, override
from wedlm_jax.hf.config import from_hf, read_json
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.layers import MLP
from wedlm_jax.model.parameters import init_params, param_shapes
from wedlm_jax.ops import cross_entropy
from wedlm_jax.program_costs import GATHERING, collectives, matmul_flops
from wedlm_jax.sharding import constrain, make_mesh, on_mesh, replicated
from wedlm_jax.train import main

NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -r requirements-tpu.txt"
)
NEEDS_GPU_COMPILER = pytest.mark.skipif(
    not absent_devices.has_gpu_compiler(), reason="jax's CUDA plugin is not installed: requirements-gpu-compiler.txt"
)
REPORT = StepReport(
    topology="v5e:2x4", chips=8, mesh="data=1 x fsdp=8 x tensor=1", tokens=8 * 4096, arguments=10 * 10**9,
    outputs=10 * 10**9, aliased=9 * 10**9, temporaries=2 * 10**9, code=10**6, flops=197e12 / 2,
    traffic={"all-gather": 50e9, "reduce-scatter": 50e9}, compile_seconds=3.0,
)  # fmt: skip


@pytest.fixture
def eight_cpus_as_a_slice(monkeypatch):
    """Stands in for libtpu, and a trivial step for the real one: what is compiled here is not what is tested."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices (tests/conftest.py asks for them)")
    monkeypatch.setattr(ahead_of_time, "devices", lambda topology: jax.devices())

    def double(state, batch):
        return jax.tree.map(lambda x: x + x, state.params), jnp.float32(batch.tokens) @ jnp.ones((192, 2))

    monkeypatch.setattr(ahead_of_time, "compile_step", lambda step, settings, mesh: jax.jit(double))


def test_the_report_adds_up():
    assert REPORT.peak == 13 * 10**9 + 10**6
    assert REPORT.seconds == {"FLOPs": 0.5, "HBM": pytest.approx(120e9 / 819e9), "ICI": 100e9 / 200e9}
    text = "\n".join(REPORT.lines())
    assert "peak                     13.001 GB a chip, of 17 GB" in text
    assert "all-gather               50.000 GB sent a chip" in text
    assert text.endswith("a step takes at least 0.500 s (FLOPs): a lower bound, not a measurement")


def test_what_a_sum_gathers_is_moved_once_though_it_is_sent_twice():
    by_sum = dataclasses.replace(REPORT, traffic={GATHERING: 100e9, "reduce-scatter": 50e9})
    assert by_sum.seconds["HBM"] == REPORT.seconds["HBM"] and by_sum.seconds["ICI"] == 150e9 / 200e9
    assert "gathering all-reduce    100.000 GB sent a chip" in "\n".join(by_sum.lines())


def test_an_experiment_compiles_without_weights_or_data(eight_cpus_as_a_slice):
    experiment = dataclasses.replace(
        override(EXPERIMENT, "data.source=text", "data.path=nowhere", "train.batch_size=8"),
        init_from="nobody/nothing",
        mesh=MeshConfig(data=1, fsdp=4, tensor=2),
    )
    report = compile_only(experiment, "v5litepod:2x4")
    assert (report.topology, report.chips, report.mesh) == ("v5e:2x4", 8, "data=1 x fsdp=4 x tensor=2")
    assert report.tokens == 8 * 192
    assert report.flops == 2 * 8 * 192 * 2 / 8
    assert report.arguments > 0 and report.outputs > 0


def test_a_training_without_masks_is_told_of_the_step_that_it_runs():
    """Less than half of the products of one with masks, whose rows are two streams."""
    masked = override(EXPERIMENT, "train.batch_size=8")
    plain = override(masked, f"objective.ar_steps={masked.train.steps}")
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    flops = [matmul_flops(trace_step(experiment, mesh).jaxpr.jaxpr) for experiment in (masked, plain)]
    assert 0.25 < flops[1] / flops[0] < 0.5


def test_rows_past_the_context_are_refused_as_training_does(eight_cpus_as_a_slice):
    assert "data.row_length=65536 is past the model's context" in message_of(
        compile_only, override(EXPERIMENT, "data.row_length=65536", "train.batch_size=8"), "v5e:2x4"
    )


@pytest.mark.parametrize("topology", ["v5e:16x16", "v5litepod:16x16", "v5 lite:16x16"])
def test_aliases_of_a_chip_name_one_topology(topology):
    assert canonical(topology) == "v5e:16x16"


@pytest.mark.parametrize("topology", ["h100:8", "h200:2x8", "a100:1", "v5e:4x4:2"])
def test_gpus_are_counted_by_machine(topology):
    assert canonical(topology) == topology


@pytest.mark.parametrize(
    "topology",
    [
        "h100:0",
        "h100:8:2",
        "v5e:4x4:0",
        "v5e:4x4:2:2",
        "h100:2x2x2",
        "h100",
        "v9:2x2",
        "v5p",
        "v5p:4",
        "v5p:4x4x4x4",
        "4x4",
        "v5p:axb",
        "v5e:0x4",
        "",
    ],
)
def test_an_unknown_topology_is_named_with_the_known_ones(topology):
    message = message_of(compile_only, EXPERIMENT, topology)
    assert f"topology {topology!r} is unknown" in message and all(kind in message for kind in CHIPS)


@pytest.mark.parametrize(
    ("topology", "known"),
    [
        ("v5e:100x100", "those of v5e are AxB up to 16x16, such as 1x1, 2x2 and 2x4"),
        ("v6e:16x32", "up to 16x16"),
        ("v5e:2x4x4", "AxB"),
        ("v5p:4x4", "those of v5p are AxBxC up to 16x20x28, such as 2x2x1"),
        ("v5p:4x4x64", "up to 16x20x28"),
    ],
)
def test_a_slice_that_is_nowhere_is_refused_with_those_that_are(topology, known):
    """libtpu would compile for it."""
    message = message_of(compile_only, EXPERIMENT, topology)
    assert message.startswith(f"topology {topology}: no such slice; ") and known in message


@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:8x16", "v5e:16x8", "v5p:2x2x1", "v5p:28x20x16", "v6e:16x16"])
def test_a_slice_is_one_along_any_side(topology):
    assert canonical(topology) == topology


def test_missing_libtpu_is_told_with_its_command(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", "--exp", "qwen3_8b_cpt", "--compile-only", "v5p:4x4x4"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert "libtpu, which is not installed; pip install 'jax[tpu]'" in capsys.readouterr().err


def test_missing_cuda_plugin_is_told_with_its_command(monkeypatch):
    monkeypatch.setattr(absent_devices, "has_gpu_compiler", lambda: False)
    assert "jax's CUDA plugin, which is not installed; pip install 'jax[cuda12]'" in message_of(
        compile_only, EXPERIMENT, "h100:8"
    )


def test_the_shape_of_the_model_that_it_starts_from_is_read_without_its_weights(tmp_path):
    """With the optimizer's float32 parameters; what is set of it stays set."""
    (tmp_path / "config.json").write_text((ORACLE / "wedlm_qwen3" / "model" / "config.json").read_text())
    shape = from_hf(read_json(tmp_path / "config.json"), tmp_path / "config.json")
    experiment = dataclasses.replace(EXPERIMENT, model=ModelOverrides(remat="full"), init_from=str(tmp_path))
    expected = dataclasses.replace(shape, dtype="bfloat16", param_dtype="float32", remat="full")
    assert ahead_of_time.model_of(experiment, "bfloat16") == expected
    message = message_of(compile_only, dataclasses.replace(EXPERIMENT, model=None, init_from="runs/x"), "v5e:2x4")
    assert message.startswith("runs/x: no such directory; ")


def test_a_mesh_that_does_not_fit_the_slice_is_named(eight_cpus_as_a_slice):
    experiment = dataclasses.replace(EXPERIMENT, mesh=MeshConfig(data=3))
    assert "mesh.data=3 x mesh.fsdp=1 x mesh.tensor=1 does not fit 8 devices" in message_of(
        compile_only, experiment, "v5e:2x4"
    )


def test_a_batch_that_does_not_fit_the_slice_is_named(eight_cpus_as_a_slice):
    message = message_of(compile_only, EXPERIMENT, "v5e:2x4")
    assert "train.batch_size=2 cannot be split over train.micro_batches=1 x mesh.data=8 x mesh.fsdp=1" in message


def test_a_step_that_does_not_fit_the_memory_is_told_with_both_sizes(eight_cpus_as_a_slice, monkeypatch):
    class TooLarge:
        def trace(self, *_):
            return self

        lower = trace

        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.55G of 15.75G hbm. Exceeded ...\nmore"
            )

    monkeypatch.setattr(ahead_of_time, "compile_step", lambda *_: TooLarge())
    message = message_of(compile_only, override(EXPERIMENT, "train.batch_size=8"), "v5e:2x4")
    assert message.startswith(
        "tiny does not fit v5e:2x4: it needs 17.55G of the 15.75G of a chip; set model.remat=full"
    )


def test_a_step_that_does_not_fit_gpus_is_told_though_their_compiler_says_nothing(eight_cpus_as_a_slice, monkeypatch):
    small = dataclasses.replace(CHIPS["h100"], hbm=1e3)
    monkeypatch.setitem(CHIPS, "h100", small)
    message = message_of(compile_only, override(EXPERIMENT, "train.batch_size=8"), "h100:8")
    assert message.startswith("tiny does not fit h100:8: it needs 0.0 GB of the 0.0 GB that a run gets of a chip; set ")
    assert message.endswith("or take more GPUs")


def test_a_step_that_fits_a_gpu_but_not_what_a_run_gets_of_it_does_not_fit(eight_cpus_as_a_slice, monkeypatch):
    experiment = override(EXPERIMENT, "train.batch_size=8")
    peak = compile_only(experiment, "h100:8").peak
    for share, fits in ((0.93, False), (0.91, True)):
        monkeypatch.setitem(CHIPS, "h100", dataclasses.replace(CHIPS["h100"], hbm=peak / share))
        if fits:
            assert "GB that a run gets of 0 GB" in "\n".join(compile_only(experiment, "h100:8").lines())
        else:
            assert "that a run gets of a chip" in message_of(compile_only, experiment, "h100:8")


@pytest.mark.parametrize("script", ["gpu.sh", "slurm.sh"])
def test_a_run_gets_what_the_launch_scripts_give_it(script):
    text = (Path(__file__).parents[1] / "launch" / script).read_text()
    assert f"XLA_PYTHON_CLIENT_MEM_FRACTION:-{absent_devices.GPU_SHARE}}}" in text


@pytest.mark.parametrize("kind", [kind for kind, chip in CHIPS.items() if chip.gpu])
def test_the_peak_of_every_kind_of_gpu_is_known(kind):
    assert CHIPS[kind].flops > 0 and canonical(f"{kind}:2x8") == f"{kind}:2x8"


@pytest.mark.parametrize("name", ["qwen3_0p6b_sft", "qwen3_8b_sft", "qwen3_8b_cpt", "qwen25_7b_cpt"])
def test_the_large_experiments_have_a_model_of_their_own_and_compute_in_bfloat16(name):
    model = load_experiment(name).model
    assert (model.dtype, model.param_dtype, model.remat) == ("bfloat16", "float32", "attention")


@NEEDS_LIBTPU
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_a_chip_is_called_as_jax_calls_the_device(topology):
    """By this the bandwidth of a device that is here is found."""
    assert devices(topology)[0].device_kind == chip_of(topology).name


@NEEDS_LIBTPU
def test_a_chip_of_a_tpu7x_is_two_devices():
    assert len(devices("tpu7x:1x1x1")) == 2
    assert len(devices(canonical("ironwood:2x2x1"))) == 8


@NEEDS_LIBTPU
def test_several_slices_are_as_many_times_the_chips_of_one():
    assert canonical("trillium:2x2:1") == "v6e:2x2"
    assert [device.slice_index for device in devices(canonical("v5litepod:2x2:2"))] == [0] * 4 + [1] * 4


@NEEDS_LIBTPU
def test_what_crosses_slices_is_told_beside_the_collectives_of_chips():
    experiment = override(EXPERIMENT, "train.batch_size=8", "mesh.data=2", "mesh.fsdp=4", "model.num_layers=1")
    report = compile_only(experiment, "v5e:2x2:2")
    assert report.chips == 8 and "handed to its host by a chip; not in the least time" in "\n".join(report.lines())
    shapes = param_shapes(dataclasses.replace(EXPERIMENT.model, num_layers=1)).values()
    assert report.between_slices >= 2 * sum(math.prod(x.shape) for x in shapes) / 4, "a chip's part of the gradients"


@NEEDS_LIBTPU
def test_a_tiny_step_compiles_for_a_slice_of_eight_chips():
    experiment = override(EXPERIMENT, "train.batch_size=8", "mesh.data=1", "mesh.fsdp=8", "model.num_layers=1")
    report = compile_only(experiment, "v5e:2x4")
    assert 0 < report.peak < CHIPS["v5e"].hbm
    assert report.traffic["all-gather"] > 0
    assert "libtpu knows no such slice" in message_of(compile_only, experiment, "v5e:3x5")


@NEEDS_GPU_COMPILER
def test_a_tiny_step_compiles_for_gpus_of_one_machine_and_of_two():
    experiment = override(EXPERIMENT, "train.batch_size=8", "mesh.data=2", "mesh.fsdp=4", "model.num_layers=3")
    one, two = (compile_only(experiment, topology) for topology in ("h100:8", "h100:2x4"))
    assert 0 < one.peak < CHIPS["h100"].hbm
    assert one.traffic["all-gather"] > 0 and one.traffic == two.traffic
    assert "NVLink" in "\n".join(one.lines())


@NEEDS_GPU_COMPILER
def test_a_gpu_that_does_not_multiply_in_bfloat16_computes_in_float32(tmp_path):
    """A T4 as Colab lends it, where the experiment leaves the dtype open."""
    (tmp_path / "config.json").write_text((ORACLE / "wedlm_qwen3" / "model" / "config.json").read_text())
    experiment = dataclasses.replace(EXPERIMENT, model=None, init_from=str(tmp_path))
    on_t4, on_l4 = (
        str(trace_step(experiment, make_mesh(experiment.mesh, devices(gpu))).jaxpr) for gpu in ("t4:1", "l4:1")
    )
    assert "bf16" in on_l4 and "bf16" not in on_t4


@NEEDS_GPU_COMPILER
@pytest.mark.parametrize("name", ["qwen3_8b_sft", *(["qwen3_8b_cpt"] if FULL else [])])
def test_a_step_compiles_for_gpus_without_a_mask_or_all_logits_or_a_copy_of_the_heads_gradient(monkeypatch, name):
    """Of SFT's four programs that for all blocks, with --full all four."""
    quarters = (4, 3, 2, 1) if FULL else (4,)
    monkeypatch.setattr(train_step, "capacities", lambda blocks: tuple(n * blocks // 4 for n in quarters))
    text = compiled_text(name, "h100:8")
    shapes = shapes_in(text)
    assert any(2 * L in shape for shape in shapes) and any(V // 2 in shape for shape in shapes), "the search can find"
    assert masks_and_logits(shapes) == []
    tile = f"f32[{cross_entropy._width(jnp.zeros((V // 2, D)), cross_entropy.TILE)},{D}]"
    assert tile in text, "the search can find"
    assert not re.search(rf"{re.escape(tile)}\S* copy\(", text)


@NEEDS_GPU_COMPILER
@pytest.mark.skipif(not FULL, reason="compiles six steps: launch/test.sh --full")
def test_the_benchmark_of_a_step_for_gpus_shows_what_layers_apart_save(monkeypatch, capsys):
    small = ["model.num_layers=4", "model.vocab_size=1024", "data.row_length=1024", "--attention", "xla"]
    monkeypatch.setattr("sys.argv", ["step_for_gpu", *small])
    step_for_gpu.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][-6:]
    moved, kernels = ([float(row[column].replace(",", "")) for row in rows] for column in (1, 3))
    assert moved[0] > moved[3] > 0  # nothing is computed again
    assert all(scanned > apart > 0 for scanned, apart in zip(kernels[:3], kernels[3:], strict=True))


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2", marks=NEEDS_LIBTPU, id="tpu"),
        pytest.param("h100:4", marks=NEEDS_GPU_COMPILER, id="gpus"),
    ],
)
def test_devices_that_cut_an_mlp_sum_hidden_states_twice_with_an_adapter_too(topology):
    """What it puts out, and the gradient of what it reads: of gate and up together."""
    config = ModelConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=128,
        adapter=AdapterConfig(rank=4), dtype="bfloat16",
    )  # fmt: skip
    mesh = make_mesh(MeshConfig(data=1, tensor=4), devices(topology))
    graph, state = nnx.split(nnx.eval_shape(lambda: MLP(config, rngs=nnx.Rngs(params=0, adapter=1))))
    given = jax.ShapeDtypeStruct((2, 512, 256), config.dtype), state
    hidden, state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), given)

    def loss(hidden, state):
        with on_mesh(mesh):
            mlp = nnx.merge(graph, state)
            return jnp.sum(mlp(constrain(hidden, "batch", None, None), True).astype(jnp.float32) ** 2)

    sums = collectives(jax.jit(jax.grad(loss)).lower(hidden, state).compile().as_text())
    of_hidden = hidden.size * hidden.dtype.itemsize
    assert 2 * of_hidden < sum(one.times * one.nbytes for one in sums) < 2.2 * of_hidden


TINY = override(
    EXPERIMENT,
    "data.source=text",
    "data.path=corpus",
    "train.batch_size=8",
    "model.num_layers=3",
    "mesh.data=1",
    "mesh.fsdp=8",
)
SMALL_CPT = ("train.batch_size=128", "train.micro_batches=2", "model.num_layers=4", "model.hidden_size=1024")


@NEEDS_LIBTPU
@pytest.mark.parametrize(
    ("experiment", "topology"),
    [
        (lambda: TINY, "v5e:2x4"),
        pytest.param(
            lambda: load_experiment("qwen3_8b_cpt", [*SMALL_CPT, "model.intermediate_size=3072"]),
            "v5p:4x4x4",
            marks=pytest.mark.skipif(not FULL, reason="compiles for a minute: launch/test.sh --full"),
        ),
    ],
    ids=["tiny", "qwen3_8b_cpt"],
)
def test_over_fsdp_nothing_is_gathered_but_one_layer_at_a_time_and_the_two_ends(experiment, topology):
    """Never all layers of a parameter together; tiles of the output layer, no logits."""
    experiment = experiment()
    mesh = make_mesh(experiment.mesh, devices(topology))
    text = ahead_of_time.trace_step(experiment, mesh).lower().compile().as_text()
    params = jax.eval_shape(lambda: init_params(experiment.model, 0))
    one_at_a_time = {x.shape[1:] if name.startswith("layers.") else x.shape for name, x in params.items()}
    embedding = params["embed.embedding"]
    tile = cross_entropy._width(embedding, cross_entropy.TILE) * embedding.shape[1]
    gathered = [one for one in collectives(text) if one.kind in ("all-gather", GATHERING)]
    assert gathered
    for one in gathered:
        assert tuple(n for n in one.shape if n != 1) in one_at_a_time or math.prod(one.shape) == tile, one
