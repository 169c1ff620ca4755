"""Parameters by path ("layers.mlp.up_proj.kernel"): the flat view that training, checkpoints and interchange share."""

from __future__ import annotations

import jax
from flax import nnx

from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.transformer import Transformer

_ADAPTER = 1  # folded into the key of the parameters


def params_of(transformer: Transformer) -> dict[str, jax.Array]:
    """The parameters of a transformer by path."""
    return {name: variable[...] for name, variable in _variables(nnx.state(transformer, nnx.Param)).items()}


def init_params(config: ModelConfig, seed: int | jax.Array) -> dict[str, jax.Array]:
    """Fresh parameters by path."""
    key = jax.random.key(seed)
    # Streams of their own, so that the base of a seed is the same with and without an adapter.
    return params_of(Transformer(config, rngs=nnx.Rngs(key, adapter=jax.random.fold_in(key, _ADAPTER))))


def param_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parameters by path; none is made."""
    return jax.eval_shape(lambda: init_params(config, 0))


def transformer_from(config: ModelConfig, params: dict[str, jax.Array]) -> Transformer:
    """A transformer around given parameters; nothing is initialised, so it also serves inside a traced function.

    Raises:
      UserError: the paths are not those of the config.
    """
    graph, state = nnx.split(_abstract(config))
    variables = _variables(state)
    if variables.keys() != params.keys():
        raise UserError(f"parameters do not fit the config: {', '.join(sorted(variables.keys() ^ params.keys()))}")
    filled = [(tuple(name.split(".")), variable.replace(params[name])) for name, variable in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def param_axes(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The names of every parameter's axes; the parameters of the layers are stacked on a first axis, "layers"."""
    axes = {}
    for name, variable in _variables(nnx.state(_abstract(config), nnx.Param)).items():
        own = variable.get_metadata()["axes"]
        axes[name] = ("layers",) * (variable.ndim - len(own)) + tuple(own)
    return axes


def _abstract(config: ModelConfig) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0, adapter=0)))


def _variables(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
