"""A model whose layers hold their kernels in int8: half of the bytes of bfloat16, which is what a forward over few tokens takes
on an accelerator. For decoding: nothing trains, saves or exports such a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wedlm_jax.errors import UserError
from wedlm_jax.model.config import DType, ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import param_axes, param_shapes, params_of, transformer_from
from wedlm_jax.ops.int8 import to_int8
from wedlm_jax.sharding import param_shardings


def rounded(
    config: ModelConfig, params: dict[str, jax.Array], frees: bool = False
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """Config and parameters with the kernels of all layers in int8. All else stays: embeddings, output layer, norms, biases, and
    an adapter beside them. With `frees` the memory of each kernel is given back as soon as it is rounded."""
    config = dataclasses.replace(config, kernel_dtype="int8")
    shapes = param_shapes(config)
    found = dict(params)
    for name, x in params.items():
        if (scale := shapes.get(f"{name}_scale")) is not None:
            inputs = range(1, 1 + x.ndim - scale.ndim)  # behind the axis of layers
            made = jax.jit(to_int8, static_argnums=1)(x, tuple(inputs))
            found[name], found[f"{name}_scale"] = jax.block_until_ready(made) if frees else made
            if frees:
                x.delete()
    return config, found


def in_int8(model: Model, mesh: Mesh | None = None, dtype: DType | None = None, frees: bool = False) -> Model:
    """The model `rounded`, on the devices of `mesh`, or on the first one. What was measured of the model goes on to hold. What
    lies on the host is rounded there.

    Args:
      dtype: of what is not rounded, and of the computation; None: as it is.
      frees: of the model's own kernels nothing is left.
    """
    with on_host():
        config, params = rounded(model.config, params_of(model.transformer), frees)
        if dtype is not None:
            config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
            shapes = param_shapes(config)
            params = {name: x.astype(shapes[name].dtype) for name, x in params.items()}
        fetched = {name: np.asarray(x) for name, x in params.items()}
    if mesh is None:
        placed = {name: jnp.asarray(x) for name, x in fetched.items()}
    else:
        placed = jax.device_put(fetched, param_shardings(mesh, param_axes(config), fetched))
    return dataclasses.replace(model, config=config, transformer=transformer_from(config, placed))


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, arrays are made in the memory of the host: a model that is to be rounded need not fit on an accelerator.

    Raises:
      UserError: jax was told to do without the host.
    """
    try:
        [host, *_] = jax.local_devices(backend="cpu")
    except RuntimeError:
        raise UserError(
            "dtype=int8 rounds the weights on the host, which JAX_PLATFORMS leaves out; add it: JAX_PLATFORMS=cuda,cpu"
        ) from None
    with jax.default_device(host):
        yield


def require_unrounded(config: ModelConfig) -> None:
    """Raises a `UserError` where the kernels are int8: what they were rounded from is what is saved and exported."""
    if config.kernel_dtype is not None:
        raise UserError("the weights of this model were rounded to int8 for decoding; load it without dtype=int8")
