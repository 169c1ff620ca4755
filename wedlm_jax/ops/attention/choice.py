"""Which implementation of attention a step is compiled with."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Literal

import jax

from wedlm_jax.errors import UserError

Implementation = Literal["auto", "xla", "splash", "tokamax"]
Shaped = jax.Array | jax.ShapeDtypeStruct  # what an implementation is asked about: it need not be there

PLATFORMS = {"splash": ("tpu",), "tokamax": ("gpu", "cuda")}  # of those that one kind of device alone runs

log = logging.getLogger(__name__)


def choose(
    asked: Implementation,
    unsupported: Mapping[str, str | None],
    platform: str | None = None,
    *,
    failures: Mapping[str, Callable[[], str | None]] = {},
    kernels: Mapping[str, str] = {},
) -> str:
    """The implementation that is used: "xla", "splash" or "tokamax", or its name in `kernels`. Each choice is logged once.

    Args:
      asked: "auto" is splash on TPU and tokamax on GPU, where they can do it, and xla everywhere else.
      unsupported: for splash and tokamax, why it cannot do this shape; None if it can.
      platform: for which is compiled; None reads `target_platform()`.
      failures: of what is tried first, why "auto" should not take it on the device that is here (`trial.failure`); None if it is
        right there.
      kernels: what runs in the place of splash or tokamax, where that is another kernel.

    Raises:
      UserError: the implementation that is asked for cannot do it.
    """
    platform = platform or target_platform()
    if reason := unsupported.get(asked):
        raise UserError(f"model.attention={asked} cannot do this: {reason}; choose auto or xla")
    if asked == "tokamax" and platform not in PLATFORMS[asked]:
        raise UserError(f"model.attention=tokamax is for GPUs, and this is {platform}; choose auto or xla")
    kernel = next((name for name, platforms in PLATFORMS.items() if platform in platforms), None)
    falls_back = False
    if asked != "auto":
        chosen, why = str(asked), "as asked"
    elif kernel is None:
        chosen, why = "xla", f"on {platform}"
    elif reason := unsupported[kernel] or (failures[kernel]() if kernel in failures else None):
        chosen, why = "xla", f"on {platform}, because of {kernels.get(kernel, kernel)}: {reason}"
        falls_back = True
    else:
        chosen, why = kernel, f"on {platform}"
    runs = kernels.get(chosen, chosen)
    log_once(runs, why, falls_back=falls_back)
    return runs


def asked_when_loaded(asked: Implementation) -> Implementation:
    """What a trained model asks for once it is loaded: kernels asked for by name are those of its training, of rows of one length
    and on one kind of device; texts of any length, anywhere, go by "auto"."""
    return asked if asked == "xla" else "auto"


def target_platform() -> str:
    """The platform that is compiled for: inside `on_mesh` that of the mesh, whose devices may be elsewhere."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def target_kind() -> str:
    """What jax calls the device that is compiled for, as "TPU v4"."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind


@functools.cache
def log_once(chosen: str, why: str, *, falls_back: bool) -> None:
    """Says what is used, and why, the first time; where that is not what was to be used, as a warning, which Python shows by
    itself."""
    log.log(logging.WARNING if falls_back else logging.INFO, "attention: %s, %s", chosen, why)
