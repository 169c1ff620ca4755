"""TrainState: all that an update changes. It is born sharded, from a seed or from given parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params, param_axes
from wedlm_jax.sharding import param_shardings, replicated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state after `step` batches."""

    step: jax.Array  # int32 []: batches seen
    params: dict[str, jax.Array]  # by path
    opt_state: optax.OptState
    skipped: jax.Array  # int32 []: updates left out so far, because a loss or gradient was not finite
    skipped_in_row: jax.Array  # int32 []: how many of these were the very last ones


def new_state(params: dict[str, jax.Array], adamw: optax.GradientTransformation) -> TrainState:
    """The state before the first batch."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, adamw.init(params), zero, zero)


def abstract_state(config: ModelConfig, adamw: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: a tree of `jax.ShapeDtypeStruct`."""
    shapes = jax.eval_shape(lambda: new_state(init_params(config, 0), adamw))
    by_name = param_shardings(mesh, param_axes(config), {name: x.shape for name, x in shapes.params.items()})

    def with_sharding(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Adam's moments are dicts by path, as the parameters are, and lie where these lie.
        sharding = by_name.get(getattr(path[-1], "key", None), replicated(mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, shapes)


def shardings_of(abstract: TrainState) -> TrainState:
    """The tree of shardings of an abstract state."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def from_seed(config: ModelConfig, adamw: optax.GradientTransformation, abstract: TrainState, seed: int) -> TrainState:
    """Fresh parameters, made on the devices that hold them; the same ones on every mesh."""
    init = jax.jit(lambda: new_state(init_params(config, seed), adamw), out_shardings=shardings_of(abstract))
    return init()


def from_params(params: dict[str, Any], adamw: optax.GradientTransformation, abstract: TrainState) -> TrainState:
    """Starts from given parameters, in the dtype of the abstract state; takes their arrays over, where it can, without a copy.

    Raises:
      UserError: a parameter is missing, extra or of another shape.
    """
    wanted = {name: tuple(x.shape) for name, x in abstract.params.items()}
    given = {name: tuple(x.shape) for name, x in params.items()}
    if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
        listed = "; ".join(f"{name} is {given.get(name)}, needs {wanted.get(name)}" for name in wrong)
        raise UserError(f"the parameters do not fit the model: {listed}")

    def place(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        sharding: NamedSharding = like.sharding  # type: ignore[assignment]
        return jax.device_put(jnp.asarray(x, like.dtype), sharding)

    placed = {name: place(params[name], like) for name, like in abstract.params.items()}
    init = jax.jit(lambda params: new_state(params, adamw), out_shardings=shardings_of(abstract), donate_argnums=0)
    return init(placed)
