"""One device or eight: the same parameters, loss, gradients and update, and nothing kept whole that the table cuts up."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.conftest import FULL
from tests.tiny_training import MODEL, SETTINGS, one_device_mesh, packed_batch
from wedlm_jax import train_step
from wedlm_jax.absent_devices import devices
from wedlm_jax.errors import UserError
from wedlm_jax.model import kept_blocks
from wedlm_jax.sharding import MeshConfig, batch_sharding, make_mesh, mesh_of_first, row_shares
from wedlm_jax.train_state import abstract_state, from_seed
from wedlm_jax.train_step import compile_step, wedlm_step

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")


@functools.cache
def two_updates(
    mesh_config: MeshConfig | None, micro_batches: int, mlp_tile: int | None = None, skip: bool | None = None
):
    """(state at birth, state after two updates, metrics of both); the first update has learning rate 0."""
    mesh = one_device_mesh() if mesh_config is None else make_mesh(mesh_config)
    model = dataclasses.replace(MODEL, mlp_tile=mlp_tile)
    settings = dataclasses.replace(SETTINGS, model=model, micro_batches=micro_batches, skip_unread=skip)
    step = compile_step(wedlm_step, settings, mesh)
    state = from_seed(MODEL, SETTINGS.optimizer, mesh, SETTINGS.seed)
    at_birth = jax.device_get(state)
    batch = jax.device_put(packed_batch(), batch_sharding(mesh))
    state, first = step(state, batch)
    state, second = step(state, batch)
    return at_birth, state, (first, second)


@pytest.mark.parametrize(
    ("mesh_config", "micro_batches", "mlp_tile"),
    [
        *([(MeshConfig(data=8), 1, None)] if FULL else []),  # else in test_kill
        (MeshConfig(data=1, fsdp=8), 1, None),
        (MeshConfig(data=2, fsdp=2, tensor=2), 2, None),
        (MeshConfig(data=1, fsdp=4, tensor=2), 1, None),
        (MeshConfig(data=1, fsdp=4, tensor=2), 1, 12),
        (MeshConfig(data=2, fsdp=1, tensor=4), 1, None),  # more than the two kv heads
    ],
    ids=lambda x: "-".join(map(str, dataclasses.astuple(x))) if isinstance(x, MeshConfig) else str(x),
)
def test_eight_devices_give_the_update_of_one(mesh_config, micro_batches, mlp_tile):
    assert_same_updates(two_updates(mesh_config, micro_batches, mlp_tile), two_updates(None, 1))


def test_eight_devices_leave_out_the_same_blocks(monkeypatch):
    """The fullest row of all devices says how many run; of four programs two are compiled."""
    monkeypatch.setattr(train_step, "capacities", lambda blocks: (blocks, blocks - 1))
    monkeypatch.setattr(kept_blocks, "capacities", train_step.capacities)
    on_eight = two_updates(MeshConfig(data=2, fsdp=2, tensor=2), 2, skip=True)
    assert_same_updates(on_eight, two_updates(None, 1, skip=True))


def assert_same_updates(found, wanted):
    at_birth, state, metrics = found
    expected_at_birth, expected, expected_metrics = wanted
    for name, value in expected_at_birth.params.items():
        np.testing.assert_array_equal(at_birth.params[name], value, err_msg=f"{name} at birth")
    for numbers, wanted in zip(metrics, expected_metrics, strict=True):
        for name in wanted:
            np.testing.assert_allclose(numbers[name], wanted[name], rtol=2e-5, err_msg=name)
    for name, value in expected.params.items():
        gradient, wanted = state.opt_state[0].mu[name], expected.opt_state[0].mu[name]
        np.testing.assert_allclose(gradient, wanted, atol=1e-6, err_msg=f"gradient of {name}")
        # Adam divides by the gradient's size, so the rounding of a tiny gradient counts as much as a large one's.
        np.testing.assert_allclose(state.params[name], value, atol=1e-4, err_msg=name)


def test_parameters_and_moments_are_cut_as_the_table_says():
    abstract = abstract_state(MODEL, SETTINGS.optimizer, make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)))
    for tree in (abstract.params, abstract.opt_state[0].mu, abstract.opt_state[0].nu):
        for name, shape in {
            "embed.embedding": (160, 4),  # [V, D] over tensor and fsdp
            "layers.attention.k_proj.kernel": (2, 4, 1, 8),  # [layers, D, K, H]
            "layers.mlp.down_proj.kernel": (2, 16, 4),  # [layers, F, D]
            "final_norm.scale": (4,),
        }.items():
            assert tree[name].sharding.shard_shape(tree[name].shape) == shape, name


def test_an_updated_state_stays_where_it_was_born():
    _, state, _ = two_updates(MeshConfig(data=2, fsdp=2, tensor=2), 2)
    for tree in (state.params, state.opt_state[0].nu):
        assert tree["embed.embedding"].addressable_shards[0].data.shape == (160, 8)


def test_eight_devices_hold_the_batch_in_eight_parts():
    batch = jax.device_put(packed_batch(), batch_sharding(make_mesh(MeshConfig(data=2, fsdp=4))))
    assert batch.tokens.addressable_shards[0].data.shape == (1, 24)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 3}, "mesh.data=3 x mesh.fsdp=1 x mesh.tensor=1 does not fit 8 devices"),
        ({"data": 0}, "mesh.data=0 must be at least 1"),
        (
            {"data": -1, "fsdp": -1},
            "mesh.data and mesh.fsdp are -1, and only one can have all that are left; set mesh.data=1",
        ),
        ({"data": -1, "tensor": 16}, "mesh.fsdp=1 x mesh.tensor=16 does not divide the 8 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(fields, message):
    with pytest.raises(UserError) as error:
        make_mesh(MeshConfig(**fields))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "sizes, count", [((1, 1, 1), 1), ((1, 1, 2), 2), ((2, 2, 1), 4), ((-1, 1, 2), 8), ((8, 1, 1), 8)]
)
def test_a_mesh_takes_the_first_devices(sizes, count):
    mesh = mesh_of_first(MeshConfig(*sizes))
    assert (mesh is None) == (count == 1)
    assert mesh is None or [*mesh.devices.flat] == jax.devices()[:count]


def test_an_axis_that_cannot_be_cut_is_named():
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=8))
    with pytest.raises(UserError, match="mesh.tensor=8 does not divide heads=4 of layers.attention.o_proj.kernel"):
        abstract_state(MODEL, SETTINGS.optimizer, mesh)


def test_kv_heads_fewer_than_the_tensor_axis_stay_whole():
    params = abstract_state(MODEL, SETTINGS.optimizer, make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))).params
    kernel, queries = params["layers.attention.k_proj.kernel"], params["layers.attention.q_proj.kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 2, 8)
    assert queries.sharding.shard_shape(queries.shape) == (2, 8, 1, 8)


@pytest.mark.parametrize("topology", ["v6e:4x4", "v5p:2x2x4", "v5e:4x4"])
@pytest.mark.parametrize("sizes", [(1, -1, 2), (2, -1, 1), (1, -1, 1), (1, 2, 8)])
def test_the_axes_of_a_mesh_need_not_be_those_of_a_slice(topology, sizes):
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -r requirements-tpu.txt")
    mesh = make_mesh(MeshConfig(*sizes), devices(topology))
    assert mesh.size == 16 and len({device.id for device in mesh.devices.flat}) == 16


@pytest.mark.parametrize("count", [3, 6])
def test_a_mesh_may_be_of_chips_that_are_no_box_of_a_slice(count):
    """As the first devices may be, over which a model of 12 heads is decoded."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -r requirements-tpu.txt")
    mesh = make_mesh(MeshConfig(data=1, tensor=count), devices("v5p:2x2x2")[:count])
    assert len({device.id for device in mesh.devices.flat}) == count


@dataclasses.dataclass(frozen=True)
class Gpu:
    """As much of a `jax.Device` as a mesh takes."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"


def gpus(*nodes: int, a_process: int) -> list[Gpu]:
    """Nodes, each a slice of so many GPUs, `a_process` of them driven by one process; told in any order."""
    places = [node for node, count in enumerate(nodes) for _ in range(count)]
    return [Gpu(number, node, number // a_process) for number, node in enumerate(places)][::-1]


@pytest.mark.parametrize(
    ("nodes", "sizes", "of_slice"),
    [
        ((1, 1), (-1, 1, 1), [[[0]], [[1]]]),
        ((1, 1), (1, 1, 2), [[[0, 1]]]),
        ((4, 4), (1, -1, 2), [[[0, 0], [0, 0], [1, 1], [1, 1]]]),
        ((2, 2, 2, 2), (2, 4, 1), [[[0], [0], [1], [1]], [[2], [2], [3], [3]]]),
    ],
)
def test_the_outermost_axes_of_a_mesh_lie_over_the_slices(nodes, sizes, of_slice):
    mesh = make_mesh(MeshConfig(*sizes), gpus(*nodes, a_process=nodes[0]))
    assert np.vectorize(lambda device: device.slice_index)(mesh.devices).tolist() == of_slice
    assert {device.id for device in mesh.devices.flat} == set(range(sum(nodes)))


def test_slices_that_are_not_equal_are_told():
    with pytest.raises(UserError, match="the slices .nodes. have 2, 4 devices; start as many on each of them"):
        make_mesh(MeshConfig(), gpus(4, 2, a_process=2))


@pytest.mark.parametrize(
    ("a_process", "sizes", "shares"),
    [
        (4, (8, 1, 1), [0, 1]),
        (2, (2, 2, 2), [0, 1, 2, 3]),
        (1, (2, 2, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (4, (1, 1, 8), [0, 0]),
        (2, (1, 2, 4), [0, 0, 1, 1]),
    ],
)
def test_processes_that_hold_the_same_rows_feed_one_share(a_process, sizes, shares):
    found = row_shares(make_mesh(MeshConfig(*sizes), gpus(4, 4, a_process=a_process)))
    assert [found[process] for process in range(len(found))] == shares


def test_processes_that_hold_some_of_the_same_rows_are_told():
    mesh = make_mesh(MeshConfig(data=3, tensor=2), gpus(6, a_process=3))
    with pytest.raises(UserError, match="mesh.tensor=2 lies over processes that hold other rows"):
        row_shares(mesh)
