"""Lowering for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lowered_for_cuda(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The text of what is compiled for an H100."""
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):  # jax from 0.11 on asks for one
        return jax.jit(function).trace(*arguments, **named).lower(lowering_platforms=("cuda",)).as_text()
