"""Values of a config.json by their type; what is not of it is told with the file and the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wedlm_jax.errors import UserError


def whole(raw: Mapping[str, Any], name: str, file: Path, default: int | None = None) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{file}: {name}={value!r} is not a positive whole number")
    return value


def real(raw: Mapping[str, Any], name: str, default: float, file: Path) -> float:
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UserError(f"{file}: {name}={str(value)[:40]} is not a positive number")
    return float(value)


def flag(raw: Mapping[str, Any], name: str, default: bool, file: Path) -> bool:
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"{file}: {name}={value!r} is not true or false")
    return value
