"""Calibration: the entropy threshold and distance penalty that were measured for one model, stored beside its weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import split_adapter
from wedlm_jax.model.handle import CALIBRATION_FILE, Model
from wedlm_jax.model.parameters import params_of
from wedlm_jax.model.revision import revision
from wedlm_jax.results import write_json

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What `python -m wedlm_jax.calibrate` found for streaming decoding."""

    entropy_threshold: float  # tau, nats
    distance_penalty: float  # lambda, nats a slot
    window_size: int  # the W that it was measured with
    max_disagreement: float  # what was asked for
    disagreement: float  # share of tokens that AR decoding of the same weights would not have chosen
    tokens: int  # over how many it was measured
    tokens_per_forward: float
    # The fingerprint of the weights that it was measured on; written with it.
    weights: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type == "int" else (int, float)
            number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
            if field.type != "str" and not number:
                raise UserError(f"{field.name}={value!r}: must be a number of at least 0")

    def apply(self, config: DecodeConfig) -> DecodeConfig:
        """`config` with tau and lambda as measured, where it is plain streaming's and leaves tau at auto. A distance penalty that
        is given stays."""
        if not_plain(config) or config.entropy_threshold != "auto":
            return config
        penalty = self.distance_penalty if config.distance_penalty == "auto" else config.distance_penalty
        return dataclasses.replace(config, entropy_threshold=self.entropy_threshold, distance_penalty=penalty)

    def in_words(self) -> str:
        """One line for people."""
        return (
            f"tau {self.entropy_threshold:g}, lambda {self.distance_penalty:g} (calibrated: "
            f"{100 * self.disagreement:.2f} % of {self.tokens} tokens are not AR's)"
        )


def calibration_in_use(model: Model, configs: Sequence[DecodeConfig]) -> list[str]:
    """Lines for the user: that calibrated tau and lambda are used (of the first of these settings, as given, that takes them),
    and what they were not measured with. No lines where no setting takes them."""
    found: Calibration | None = model.calibration
    used = [] if found is None else [applied for config in configs if (applied := found.apply(config)) != config]
    if found is None or not used:
        return []
    settings = {
        f"lambda {used[0].penalty:g}, as given": used[0].penalty != found.distance_penalty,
        f"window_size {used[0].window}": used[0].window != found.window_size,
        f"temperature {used[0].temperature:g}": used[0].temperature > 0,
        f"mask_token_id {used[0].mask_token_id}": used[0].mask_token_id not in (None, model.mask_token_id),
        "ban_mask off": not used[0].ban_mask,
        "kernels of int8": model.config.kernel_dtype is not None,
    }
    unmeasured = ", ".join(setting for setting, differs in settings.items() if differs)
    but = [f"but with {unmeasured}, for which no disagreement was measured"] if unmeasured else []
    return [f"streaming with {found.in_words()}", *but]


def not_plain(config: DecodeConfig) -> str | None:
    """The name of the first setting that differs from plain streaming, the only mode that is calibrated: in others tau and lambda
    mean something else. None if none does."""
    plain = DecodeConfig()
    settings = {"decoder": "decoder", "verify": "verify", "rule": "fill_rule", "refill": "refill", "reorder": "reorder"}
    return next((name for of, name in settings.items() if getattr(config, of) != getattr(plain, of)), None)


def fingerprint(model: Model) -> str:
    """The revision of the weights, and of the adapter beside them: another one once either was trained on or replaced."""
    params = params_of(model.transformer)
    adapter = {f"{name} of an adapter": x for name, x in split_adapter(params)[1].items()}
    return "+".join(revision(model.config, part) for part in (params, adapter) if part)


def read_calibration(directory: Path) -> Calibration | None:
    """That of a model's directory; None where it has none. A `UserError` where the file is not one of ours."""
    command = "python -m wedlm_jax.calibrate"
    return read_stored(directory / CALIBRATION_FILE, lambda stored: Calibration(**stored), "a calibration", command)


def write_calibration(directory: Path, calibration: Calibration, model: Model) -> Path:
    """Writes the file, for the weights of `model`, and returns its path."""
    return write_stored(directory / CALIBRATION_FILE, calibration, model)


def read_stored(file: Path, parse: Callable[[Any], T], what: str, command: str) -> T | None:
    """What a JSON beside the weights holds; None where there is no such file.

    Raises:
      UserError: it is not `what` it should be; `command` writes it anew.
    """
    if not file.is_file():
        return None
    try:
        found: Any = parse(json.loads(file.read_text(encoding="utf-8")))
        if not isinstance(found.weights, str):
            raise UserError(f"weights={found.weights!r}: must be a fingerprint")
        return found
    except (UserError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file}: not {what} ({error}); delete it; {command} then writes another") from error


def write_stored(file: Path, measured: Any, model: Model) -> Path:
    """Writes a dataclass with a field `weights`, into which the fingerprint of the model's goes, and returns the path."""
    write_json(file, dataclasses.asdict(dataclasses.replace(measured, weights=fingerprint(model))))
    return file
