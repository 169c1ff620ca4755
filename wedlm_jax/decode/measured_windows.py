"""Measured windows: what `calibrate --decoder verified` found of one model, stored beside its weights, its costs by device."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from wedlm_jax.decode.calibration import calibration_in_use, read_stored, write_stored
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.errors import UserError
from wedlm_jax.model.handle import WINDOWS_FILE, Model
from wedlm_jax.model.window_table import AUTO_WINDOWS, WindowTable

Costs = tuple[tuple[float, float], ...]  # as of `WindowTable`


@dataclasses.dataclass(frozen=True)
class MeasuredWindows:
    """What windows bring holds on every device; what forwards cost is of the one that they were measured on."""

    accepted: tuple[float, ...]  # tokens per forward with each of AUTO_WINDOWS
    fed: tuple[float, ...]  # slots per forward
    tokens: int  # over how many with each window
    costs: dict[str, Costs]  # by `device_name`
    # The fingerprint of the weights that it was measured on; written with it.
    weights: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        counts = [len(self.accepted), len(self.fed)]
        numbers = [*self.accepted, *self.fed, *itertools.chain(*itertools.chain(*self.costs.values()))]
        if counts != 2 * [len(AUTO_WINDOWS)] or not all(_positive(x) for x in numbers):
            raise UserError(f"accepted, fed and costs must be positive numbers, {len(AUTO_WINDOWS)} of the first two")
        for device, points in self.costs.items():
            slots, costs = zip(*points, strict=True)
            if len(points) < 2 or sorted(set(slots)) != list(slots) or sorted(costs) != list(costs):
                raise UserError(f"costs on {device}: must be two pairs of slots and cost or more, ascending")

    def table(self, model: Model, presumed: WindowTable) -> WindowTable:
        """For decoding on the devices of `model`, at the presumed costs where forwards were not measured on such ones."""
        return WindowTable(self.costs.get(device_name(model), presumed.costs), self.accepted, self.fed)


def device_name(model: Model) -> str:
    """What the cost of a forward depends on beside the weights: the kind of device, how many of them, and the dtype."""
    device, dtype = jax.devices()[0], jnp.dtype(model.config.dtype).name
    kind = f"{_processor()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    of_kernels = "" if model.config.kernel_dtype is None else f", kernels of {model.config.kernel_dtype}"
    return f"{1 if model.mesh is None else model.mesh.size} x {kind}, {dtype}{of_kernels}"


def measured_in_use(model: Model, configs: Sequence[DecodeConfig]) -> list[str]:
    """Lines for the user: what was measured of the model, thresholds or windows, and is used by any of these settings."""
    return [*calibration_in_use(model, configs), *windows_in_use(model, configs)]


def windows_in_use(model: Model, configs: Sequence[DecodeConfig]) -> list[str]:
    """A line for the user, where any of these settings leaves the window to a model whose windows were measured."""
    found: MeasuredWindows | None = model.measured_windows
    if found is None or not any(config.adapts for config in configs):
        return []
    if model.config.kernel_dtype is not None:
        return ["windows by what forwards are presumed to cost: those that were measured are not of int8 weights"]
    if device_name(model) in found.costs:
        return [f"windows as measured on {device_name(model)}"]
    return [
        f"windows by what forwards are presumed to cost: they were measured on {', '.join(found.costs)}, not on "
        f"{device_name(model)}; python -m wedlm_jax.calibrate --decoder verified measures them here"
    ]


def read_measured_windows(directory: Path) -> MeasuredWindows | None:
    """Those of a model's directory; None where it has none. A `UserError` where the file is not one of ours."""
    command = "python -m wedlm_jax.calibrate --decoder verified"
    return read_stored(directory / WINDOWS_FILE, _from_json, "a file of measured windows", command)


def write_measured_windows(directory: Path, measured: MeasuredWindows, model: Model) -> Path:
    """Writes the file, for the weights of `model`, and returns its path."""
    return write_stored(directory / WINDOWS_FILE, measured, model)


def _from_json(stored: dict[str, Any]) -> MeasuredWindows:
    costs = {name: tuple((slots, cost) for slots, cost in points) for name, points in stored.pop("costs").items()}
    accepted, fed = (tuple(stored.pop(name)) for name in ("accepted", "fed"))
    return MeasuredWindows(accepted=accepted, fed=fed, costs=costs, **stored)


def _positive(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x > 0


def _processor() -> str:
    """Its model where Linux says it: Python itself knows the architecture alone there."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
