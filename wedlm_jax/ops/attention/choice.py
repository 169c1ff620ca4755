"""Which implementation of attention a step is compiled with."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax

from wedlm_jax.errors import UserError

Implementation = Literal["auto", "xla", "splash"]

log = logging.getLogger(__name__)


def choose(asked: Implementation, unsupported: str | None, platform: str | None = None) -> Implementation:
    """The implementation that is used: "xla" or "splash". Each choice is logged once.

    Args:
      asked: "auto" is splash on TPU where it can do the shape, and xla everywhere else.
      unsupported: why splash cannot do this shape; None if it can.
      platform: for which is compiled; None reads `target_platform()`.

    Raises:
      UserError: splash is asked for and cannot do it.
    """
    platform = platform or target_platform()
    if asked == "splash" and unsupported:
        raise UserError(f"model.attention=splash cannot do this: {unsupported}; choose auto or xla")
    if asked != "auto":
        chosen, reason = asked, "as asked"
    elif platform != "tpu":
        chosen, reason = "xla", f"on {platform}"
    elif unsupported:
        chosen, reason = "xla", f"on tpu, because of splash: {unsupported}"
    else:
        chosen, reason = "splash", "on tpu"
    _log_once(chosen, reason)
    return chosen


def target_platform() -> str:
    """The platform that is compiled for: inside `on_mesh` that of the mesh, whose devices may be elsewhere."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


@functools.cache
def _log_once(chosen: str, reason: str) -> None:
    log.info("attention: %s, %s", chosen, reason)
