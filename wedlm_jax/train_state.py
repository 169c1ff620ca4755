"""TrainState: all that an update changes. It is born sharded, from a seed or from given parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import split_adapter
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params, param_axes
from wedlm_jax.optimizer import OptimizerConfig, make_adamw
from wedlm_jax.sharding import param_shardings, replicated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state after `step` batches."""

    step: jax.Array  # int32 []: batches seen
    params: dict[str, jax.Array]  # by path: what is trained
    opt_state: optax.OptState
    skipped: jax.Array  # int32 []: updates left out so far, because a loss or gradient was not finite
    skipped_in_row: jax.Array  # int32 []: how many of these were the very last ones
    frozen: dict[str, jax.Array] = dataclasses.field(default_factory=dict)  # by path: the base of an adapter

    @property
    def all_params(self) -> dict[str, jax.Array]:
        return self.frozen | self.params


def new_state(params: dict[str, jax.Array], optimizer: OptimizerConfig) -> TrainState:
    """The state before the first batch. Where there are parameters of an adapter they alone are trained."""
    zero = jnp.zeros((), jnp.int32)
    base, adapter = split_adapter(params)
    trained, frozen = (adapter, base) if adapter else (base, {})
    return TrainState(
        step=zero,
        params=trained,
        opt_state=make_adamw(optimizer).init(trained),
        skipped=zero,
        skipped_in_row=zero,
        frozen=frozen,
    )


@functools.cache
def abstract_state(model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: a tree of `jax.ShapeDtypeStruct`."""
    shapes = jax.eval_shape(lambda: new_state(init_params(model, 0), optimizer))
    by_name = param_shardings(mesh, param_axes(model), shapes.all_params)

    def with_sharding(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Adam's moments are dicts by path, as the parameters are, and lie where these lie.
        sharding = by_name.get(getattr(path[-1], "key", ""), replicated(mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, shapes)


def state_shardings(model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh) -> TrainState:
    """The shardings of the state, as a tree of its form."""
    return jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh))


def from_seed(model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh, seed: int) -> TrainState:
    """Fresh parameters, made on the devices that hold them; the same ones on every mesh."""
    return _compiled_init(model, optimizer, mesh)(seed)


@functools.cache
def _compiled_init(model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh) -> Callable[[int], TrainState]:
    init = lambda seed: new_state(init_params(model, seed), optimizer)  # noqa: E731
    return jax.jit(init, out_shardings=state_shardings(model, optimizer, mesh))


def from_params(
    params: dict[str, Any], model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh, seed: int = 0
) -> TrainState:
    """Starts from given parameters, in the dtype of those of `model`; takes their arrays over, where it can, without a copy.

    Args:
      params: of the model; those of its adapter may be left out, all of them, and are made from `seed`.

    Raises:
      UserError: a parameter is missing, extra or of another shape.
    """
    state = abstract_state(model, optimizer, mesh)
    abstract = state.all_params
    if model.adapter is not None and not split_adapter(params)[1]:  # what is trained; the base of the seed is not made
        own = {name: x.sharding for name, x in state.params.items()}
        params = {**params, **jax.jit(lambda: split_adapter(init_params(model, seed))[1], out_shardings=own)()}
    wanted = {name: tuple(x.shape) for name, x in abstract.items()}
    given = {name: tuple(x.shape) for name, x in params.items()}
    if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
        listed = "; ".join(f"{name} is {given.get(name)}, needs {wanted.get(name)}" for name in wrong)
        raise UserError(f"the parameters do not fit the model: {listed}")
    placed = {name: jax.device_put(jnp.asarray(params[name], x.dtype), x.sharding) for name, x in abstract.items()}
    shardings = state_shardings(model, optimizer, mesh)
    return jax.jit(lambda params: new_state(params, optimizer), out_shardings=shardings, donate_argnums=0)(placed)
