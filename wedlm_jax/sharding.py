"""The mesh, and one table that says which mesh axis each named axis of an array is cut over.

Model code is single-device: parameters name their axes, activations pass through `constrain`, XLA's partitioner does the
rest (what used to be called pjit is `jax.jit` with in and out shardings).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from wedlm_jax.errors import UserError

# Axis of an array -> axes of the mesh. An axis that is not here (head_dim, layers) is whole on every device.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

# Axes that stay whole where the mesh does not divide them, because whole they are small: 8 kv heads over tensor=16. Any
# other such axis is an error.
WHOLE_IF_NOT_DIVIDED = ("kv_heads",)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1: all the devices that are left."""

    data: int = -1  # copies of the model, each with its share of the batch
    fsdp: int = 1  # as `data`, but parameters and optimizer are cut up too
    tensor: int = 1  # cuts heads, mlp and vocabulary

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{name}={size} must be at least 1, or -1 for all the devices that are left")
        left = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
        if len(left) > 1:
            raise UserError(f"{' and '.join(left)} are -1, and only one can have all that are left; set {left[0]}=1")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices`, by default all.

    Several slices (TPU slices, or nodes with GPUs) have a slow network between them: the outermost axes lie over them.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or the slices are not equal.
    """
    sizes = dataclasses.asdict(config)
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    named = math.prod(size for size in sizes.values() if size != -1)
    shape = tuple(count // named if size == -1 else size for size in sizes.values())
    if math.prod(shape) != count:
        given = " x ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size != -1)
        if -1 in sizes.values():
            raise UserError(f"{given} does not divide the {count} devices; give sizes whose product does")
        raise UserError(f"{given} does not fit {count} devices; make the product {count}, or one of them -1")
    names, types = tuple(sizes), (AxisType.Auto,) * len(shape)
    slices = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(slices) == 1:
        return Mesh(_of_one_slice(shape, devices), names, axis_types=types)
    if len(set(slices.values())) > 1:
        raise UserError(
            f"mesh: the slices (nodes) have {', '.join(map(str, slices.values()))} devices; start as many on each of them"
        )
    left, across = len(slices), []
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    inside = [size // over for size, over in zip(shape, across, strict=True)]
    return Mesh(
        create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True), names, axis_types=types
    )


def _of_one_slice(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Not by `jax.make_mesh`, which on most TPUs knows no mesh whose axes are others than the slice's own, as 8 x 2 of 4 x 4."""
    try:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except AssertionError:  # some chips of a TPU that are no box, such as 3 of 2 x 2: jax knows no order of these
        return np.array(devices).reshape(shape)


ONE_DEVICE = MeshConfig(data=1)


def mesh_of_first(config: MeshConfig) -> Mesh | None:
    """A mesh over the first devices, as many as the sizes multiply to, or all for one that is -1; None for a single device.

    Raises:
      UserError: there are not so many, or as `make_mesh`.
    """
    sizes, here = dataclasses.asdict(config), jax.devices()
    count = len(here) if -1 in sizes.values() else math.prod(sizes.values())
    if count > len(here):
        given = " x ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size != 1)
        raise UserError(f"{given} takes {count} devices, and there are {len(here)}; lower it, or start on more")
    mesh = make_mesh(config, here[:count])
    return mesh if mesh.size > 1 else None


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the devices; of [B, ...] arrays."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_parts(mesh: Mesh | AbstractMesh | None) -> int:
    """The parts that the mesh cuts a batch into."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in RULES["batch"])


def rows_of_a_device(rows: int, mesh: Mesh | AbstractMesh | None) -> int:
    """How many of the `rows` of a batch one device computes: its part, or all where they cannot be cut evenly."""
    parts = batch_parts(mesh)
    return rows if rows % parts else rows // parts


def row_shares(mesh: Mesh) -> dict[int, int]:
    """Process -> the number of the share of a batch's rows that it feeds.

    Processes over which a row is replicated, since `mesh.tensor` lies over them, hold and feed one share.

    Raises:
      UserError: processes hold some of the same rows, but not all.
    """
    rows: dict[int, set[int]] = {}
    placed: Mapping[Any, Any] = batch_sharding(mesh).devices_indices_map((mesh.size,))
    for device, (part,) in placed.items():
        rows.setdefault(device.process_index, set()).add(part.start or 0)
    shares = sorted({tuple(sorted(held)) for held in rows.values()})
    if len({row for share in shares for row in share}) < sum(map(len, shares)):
        raise UserError(
            f"mesh.tensor={mesh.shape['tensor']} lies over processes that hold other rows beside those they share; make it "
            "a divisor or a multiple of the devices of a process, and the rest mesh.data or mesh.fsdp"
        )
    return {process: shares.index(tuple(sorted(held))) for process, held in rows.items()}


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(
    mesh: Mesh, axes: Mapping[str, tuple[str, ...]], params: Mapping[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct]
) -> dict[str, NamedSharding]:
    """The sharding of each of these parameters, from the names of its axes; `axes` may have those of others too.

    Raises:
      UserError: an axis is not a multiple of the mesh axis that it is cut over (the axes of WHOLE_IF_NOT_DIVIDED apart).
    """
    shardings = {}
    for name, x in params.items():
        for axis, size in zip(axes[name], x.shape, strict=True):
            for mesh_axis in RULES.get(axis, ()):
                if size % mesh.shape[mesh_axis] and axis not in WHOLE_IF_NOT_DIVIDED:
                    raise UserError(
                        f"mesh.{mesh_axis}={mesh.shape[mesh_axis]} does not divide {axis}={size} of {name}; "
                        "choose a divisor"
                    )
        shardings[name] = NamedSharding(mesh, _spec(mesh.shape, axes[name], x.shape))
    return shardings


def on_mesh(mesh: Mesh | None) -> AbstractContextManager[None]:
    """Entered inside a traced function: what `constrain` there means, and which platform is compiled for; nothing, of None."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def mesh_in_force() -> AbstractMesh | None:
    """The mesh of `on_mesh`; None outside it, and on one device, where there is nothing to cut."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` cut as the rules say for these names of its axes; None for an axis that is whole. Outside `on_mesh`, x itself."""
    mesh = mesh_in_force()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, _spec(mesh.shape, axes, x.shape))


def cut_for_batch(axes: Sequence[str], batch: int) -> tuple[str | None, ...]:
    """Of the names of a parameter's axes those that `whole_for_batch` leaves cut; None in the place of the others."""
    over = axes_over("batch", batch)
    return tuple(None if set(over).intersection(RULES.get(axis, ())) else axis for axis in axes)


def whole_for_batch(param: jax.Array, axes: Sequence[str], batch: int) -> jax.Array:
    """A parameter as a product with a batch of so many rows takes it: gathered along the axes that are cut over devices which the
    rows are cut over too. Outside `on_mesh`, or where the mesh does not divide the rows, the parameter itself.

    XLA gathers it anyway. But on TPU, where nobody says so, it cuts the product into as many as there are devices, to compute
    with each part as it arrives: narrow ones, which take 1.5 to 2 times the cycles of the whole, to hide traffic that lasts about
    a tenth of that (benchmarks/RESULTS.md, "A training step on a TPU, compiled ahead of time").
    """
    return constrain(param, *cut_for_batch(axes, batch)) if axes_over("batch", batch) else param


def attend_over_mesh(
    attend: Callable[..., jax.Array], q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, rows: Any
) -> jax.Array:
    """`attend(q, k, v, rows)`, by each device on its own rows of the batch and its own heads.

    Attention mixes neither, so the devices need nothing of each other; a kernel, a loop or a custom gradient, into which
    the partitioner does not look, stays whole inside. Where the tensor axis does not divide the K kv heads, they are
    repeated until it does, and a device holds only those that its own query heads read. Outside `on_mesh`, `attend` itself.

    Args:
      attend: a function of one device, returning [B, T, N, H].
      q_BTNH, k_BSKH, v_BSKH: queries, keys and values, N a multiple of K.
      rows: whatever else `attend` reads of each row, a tree of arrays [B, ...].
    """
    mesh = mesh_in_force()
    if mesh is None:
        return attend(q_BTNH, k_BSKH, v_BSKH, rows)
    queries = _spec(mesh.shape, ("batch", None, "heads", None), q_BTNH.shape)
    k_BSKH, v_BSKH = (repeat_heads(x, kv_heads_held(q_BTNH.shape[2], x.shape[2])) for x in (k_BSKH, v_BSKH))
    on_devices = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(queries, queries, queries, PartitionSpec(queries[0])),
        out_specs=queries,
        check_vma=False,  # Pallas kernels do not say over which axes their outputs vary
    )
    return on_devices(q_BTNH, k_BSKH, v_BSKH, rows)


def over_mesh(
    function: Callable[..., Any],
    in_axes: Sequence[tuple[str | None, ...]],
    out_axes: Sequence[tuple[str | None, ...]],
    *arrays: jax.Array,
) -> Any:
    """`function(*arrays)`, by each device on its own part of every array; outside `on_mesh`, `function` itself.

    Args:
      function: of one device; what it does needs nothing of the other devices.
      in_axes, out_axes: the names of the axes of its arguments and of its results. A name that the mesh cuts stands
        for one size everywhere.

    Raises:
      ValueError: for two.
    """
    mesh = mesh_in_force()
    if mesh is None:
        return function(*arrays)
    sizes: dict[str | None, int] = {}
    for names, x in zip(in_axes, arrays, strict=True):
        for name, size in zip(names, x.shape, strict=True):
            known = sizes.setdefault(name, size)
            if known != size and name is not None and (axes_over(name, known) or axes_over(name, size)):
                raise ValueError(f"{name} has two sizes, {known} and {size}, and the mesh cuts it")
    in_specs = tuple(_spec(mesh.shape, names, x.shape) for names, x in zip(in_axes, arrays, strict=True))
    out_specs = tuple(_spec(mesh.shape, names, [sizes[name] for name in names]) for names in out_axes)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arrays)


def kv_heads_held(num_heads: int, num_kv_heads: int) -> int:
    """Kv heads that the devices hold between them: repeated until the tensor axis divides them, where it cuts query heads."""
    over = axes_over("heads", num_heads)
    mesh = mesh_in_force()
    return num_kv_heads if mesh is None else math.lcm(num_kv_heads, *(mesh.shape[name] for name in over))


def repeat_heads(x_BTKH: jax.Array, held: int) -> jax.Array:
    repeats = held // x_BTKH.shape[2]
    return jnp.repeat(x_BTKH, repeats, axis=2) if repeats > 1 else x_BTKH


def axes_over(axis: str, size: int) -> tuple[str, ...]:
    """The axes of the mesh, where they are of more than one device, that an axis of this size is cut over inside `on_mesh`."""
    mesh = mesh_in_force()
    if mesh is None:
        return ()
    over = tuple(name for name in RULES.get(axis, ()) if mesh.shape.get(name, 1) > 1)
    return over if size % math.prod(mesh.shape[name] for name in over) == 0 else ()


def _spec(mesh: Mapping[str, int], axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    cuts = (RULES.get(axis) if axis else None for axis in axes)
    fits = (
        cut if cut and size % math.prod(mesh[a] for a in cut) == 0 else None
        for cut, size in zip(cuts, shape, strict=True)
    )
    return PartitionSpec(*fits)
