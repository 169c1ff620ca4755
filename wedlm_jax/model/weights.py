"""Weights: a transformer as an argument of jitted programs, its layers laid out as decoding reads them fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wedlm_jax.model.layers import Linear
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.window_table import PROCESSOR_CACHE
from wedlm_jax.sharding import on_mesh

log = logging.getLogger(__name__)

CPU, GPUS, TPUS = ("cpu",), ("gpu", "cuda", "rocm"), ("tpu",)  # as jax calls the platform of a device

# Parameters of the layers from which on a CPU they are held apart. Fewer are copied in no time, and compile sooner in a scan.
LARGE = 2**20

# Turned kernels are faster for forwards over so many rows or more, of layers that no cache of the processor holds
# (benchmarks/RESULTS.md, "Kernels turned for decoding"). They are a second copy; of layers larger than this none is made.
ROWS_TO_TURN_FOR = 3
LARGEST_COPY = 2**32  # bytes


@dataclasses.dataclass(frozen=True)
class Structure:
    """What programs are compiled for, beside the shapes of arrays."""

    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef  # of the state
    mesh: Mesh | None  # whose devices share the work, each with its rows of the batch and its heads

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Once: a jitted call asks for it every time, and the graph is a tree of its own."""
        return hash((self.graph, self.tree, self.mesh))


_known: dict[Structure, Structure] = {}  # so that models of one shape share one, and are compared without a walk


@jax.tree_util.register_pytree_node_class
class Weights:
    """The arrays of a transformer in a flat list, which a call of a jitted program passes on quickly."""

    def __init__(self, arrays: list[jax.Array], structure: Structure):
        self._arrays, self._structure = arrays, structure

    @classmethod
    def of(cls, transformer: Transformer, rows: int = 1) -> Weights:
        """On a CPU that computes alone, with large layers apart; for forwards over so many rows of tokens or more, turned. On
        GPUs with layers apart where there is room for a copy of them; on one that computes alone, joined. On TPUs with heads
        first in the kernels that have them."""
        mesh = mesh_of(nnx.state(transformer))
        if _gains_from_layers_apart(transformer, mesh):
            transformer = with_layers_apart(
                transformer,
                turned=gains_from_turned_kernels(transformer, rows),
                joined=mesh is None and _lie_on(jax.tree.leaves(nnx.state(transformer.layers)), GPUS),
            )
        elif _lie_on(jax.tree.leaves(nnx.state(transformer.layers)), TPUS):
            transformer = with_heads_first(transformer)
        graph, state = nnx.split(transformer)
        arrays, tree = jax.tree.flatten(state)
        structure = Structure(graph, tree, mesh)
        return cls(arrays, _known.setdefault(structure, structure))

    @property
    def mesh(self) -> Mesh | None:
        return self._structure.mesh

    @contextlib.contextmanager
    def transformer(self) -> Iterator[Transformer]:
        """Inside a traced function: the transformer, while what is traced is for its devices."""
        with on_mesh(self.mesh):
            yield nnx.merge(self._structure.graph, jax.tree.unflatten(self._structure.tree, self._arrays))

    def tree_flatten(self) -> tuple[list[jax.Array], Structure]:
        return self._arrays, self._structure

    @classmethod
    def tree_unflatten(cls, structure: Structure, arrays: list[jax.Array]) -> Weights:
        return cls(arrays, structure)


def mesh_of(params: nnx.State) -> Mesh | None:
    """The devices that parameters are cut over; None for a single one."""
    sharding = jax.tree.leaves(params)[0].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def _gains_from_layers_apart(transformer: Transformer, mesh: Mesh | None) -> bool:
    if isinstance(transformer.layers, nnx.List):
        return False
    arrays = jax.tree.leaves(nnx.state(transformer.layers))
    if _lie_on(arrays, CPU):
        return mesh is None and sum(x.size for x in arrays) >= LARGE
    # Several processes must decide alike, and each sees its own memory: these keep the stack.
    alone = all(x.is_fully_addressable for x in arrays)
    return alone and _lie_on(arrays, GPUS) and _has_room_for([x.addressable_data(0) for x in arrays])


def _lie_on(arrays: list[jax.Array], platforms: tuple[str, ...]) -> bool:
    """Whether they lie on one of these platforms. All are on the devices of the first."""
    return all(device.platform in platforms for array in arrays[:1] for device in array.devices())


def _has_room_for(arrays: list[jax.Array]) -> bool:
    """Whether half of the memory that is left on their device holds a copy of them: the rest is for caches."""
    [device] = arrays[0].devices()
    stats, copy = device.memory_stats() or {}, sum(x.nbytes for x in arrays)
    left = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    if copy <= left / 2:
        return True
    log.warning(
        "decoding copies each layer's weights in every forward, which takes up to three times as long: the %.1f GB of a copy "
        "with layers apart do not fit into half of the %.1f GB that are left on %s",
        copy / 1e9, left / 1e9, device.device_kind,
    )  # fmt: skip
    return False


def gains_from_turned_kernels(transformer: Transformer, rows: int) -> bool:
    """Whether the kernels of layers held apart on a CPU are turned for forwards over so many rows."""
    arrays = jax.tree.leaves(nnx.state(transformer.layers))
    on_cpu = _lie_on(arrays, CPU)
    return on_cpu and rows >= ROWS_TO_TURN_FOR and PROCESSOR_CACHE < sum(x.nbytes for x in arrays) <= LARGEST_COPY


def with_layers_apart(transformer: Transformer, turned: bool = False, joined: bool = False) -> Transformer:
    """The same transformer, with arrays of its own for each layer.

    A scan takes every layer's parameters out of the stack before it computes with them, which on a CPU and a GPU copies the
    whole model in every forward: up to half of the time of one over few tokens on a CPU (`python -m benchmarks.layouts`), on a
    GPU two thirds of the bytes that it moves (`tests/decode/test_on_gpu.py`).

    On a CPU the arrays are views of the stack: no memory is taken, but where rows of it are not aligned as XLA wants them. On a
    GPU they are copies, and so are turned kernels (`Linear.turn`), read in the order in which they lie: of the few rows of a
    decoding step the product with a kernel that lies inputs first, which XLA on CPU reads in strides, takes up to twice as long
    (benchmarks/RESULTS.md, "Kernels turned for decoding"). Kernels of one input can be joined (`layers.join`); over a mesh a
    device's parts of them would not lie side by side.
    """
    graph, stacked = transformer.split_stack()
    of_layer = _views(stacked) if _lie_on(jax.tree.leaves(stacked), CPU) else _copies(stacked)
    apart = [nnx.merge(graph, of_layer(layer)) for layer in range(transformer.config.num_layers)]
    if turned:
        for layer in apart:
            for _, module in nnx.iter_modules(layer):
                if isinstance(module, Linear):
                    module.turn()
    if joined:
        for layer in apart:
            layer.join()
    transformer = nnx.merge(*nnx.split(transformer))
    transformer.layers = nnx.List(apart)
    return transformer


def with_heads_first(transformer: Transformer) -> Transformer:
    """The same transformer, with copies of the kernels of queries, keys and values (`Linear.put_heads_first`), in the place of
    those that every call of a program would make."""
    transformer = nnx.merge(*nnx.split(transformer))
    for _, module in nnx.iter_modules(transformer.layers):
        if isinstance(module, Linear) and len(module.outputs) > 1:
            module.put_heads_first()
    return transformer


def _views(stacked: nnx.State) -> Callable[[int], nnx.State]:
    """The parameters of a layer by its number, where they lie in the memory of the host."""
    [device] = jax.tree.leaves(stacked)[0].devices()
    on_host = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), stacked)
    return lambda layer: jax.tree.map(lambda x: jax.device_put(x[layer], device, may_alias=True), on_host)


def _copies(stacked: nnx.State) -> Callable[[int], nnx.State]:
    """The same as copies, over a mesh cut as the stack is."""

    def copy(layer: int, x: jax.Array) -> jax.Array:
        if not isinstance(x.sharding, NamedSharding):
            return x[layer]
        return jax.device_put(x[layer], NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:])))

    return lambda layer: jax.tree.map(functools.partial(copy, layer), stacked)
