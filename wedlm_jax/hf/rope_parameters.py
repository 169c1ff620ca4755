"""The RoPE of a config.json: its base, and how it is stretched for longer contexts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from wedlm_jax.errors import UserError
from wedlm_jax.hf.fields import real, whole
from wedlm_jax.model.rope_scaling import RopeScaling

Number = TypeVar("Number", int, float)

OBJECTS = ("rope_scaling", "rope_parameters")  # what transformers 4 and 5 call the same
DEFAULT_THETA = 10_000.0  # where a file leaves it out, as the reference implementation

CONTEXT = "original_max_position_embeddings"
# What each type needs, and what it may leave out.
NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
MAY_HAVE = {
    "default": (),
    "linear": (),
    "llama3": (CONTEXT,),
    "yarn": (CONTEXT, "beta_slow", "beta_fast", "attention_factor"),
}
NEUTRAL = {"partial_rotary_factor": 1, "truncate": True}  # fields that change nothing at these values alone


def read_rope(raw: Mapping[str, Any], file: Path) -> tuple[float, RopeScaling | None]:
    """Theta and the scaling of a config.json, under old and new keys.

    Raises:
      UserError: a field is missing, has the wrong type, or asks for what is not implemented; two keys say different things.
    """
    found = {name: _scaling(raw, name, file) for name in OBJECTS if raw.get(name) is not None}
    if len(set(found.values())) > 1:
        raise UserError(f"{file}: {' and '.join(f'{name}={raw[name]!r}' for name in found)} differ; keep one")
    return _theta(raw, file), next(iter(found.values()), None)


def rope_parameters(scaling: RopeScaling | None) -> dict[str, Any]:
    """What a config.json says of the scaling: the fields that its type has."""
    if scaling is None:
        return {"rope_type": "default"}
    names = ("rope_type", *NEEDS[scaling.rope_type], *MAY_HAVE[scaling.rope_type])
    return {name: value for name in names if (value := getattr(scaling, name)) is not None}


def _scaling(raw: Mapping[str, Any], name: str, file: Path) -> RopeScaling | None:
    rope = raw[name]
    if not isinstance(rope, dict):
        raise UserError(f"{file}: {name}={rope!r} is not an object")
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    known = NEEDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise UserError(f"{file}: {name}={rope!r} is not implemented (only rope_type {', '.join(map(repr, NEEDS))})")
    given = {field: value for field, value in rope.items() if field not in ("rope_type", "type", "rope_theta")}
    for field, value in given.items():
        if field not in (*known, *MAY_HAVE[kind]) and (field not in NEUTRAL or value != NEUTRAL[field]):
            raise UserError(f"{file}: {name}={rope!r} is not implemented ({field} with rope_type {kind!r})")
    missing = [field for field in known if given.get(field) is None]
    if missing:
        raise UserError(f"{file}: {name}={rope!r} lacks {', '.join(missing)}")
    if kind == "default":
        return None
    numbers = [field for field in (*known, *MAY_HAVE[kind]) if field != CONTEXT and given.get(field) is not None]
    fields: dict[str, Any] = {field: real(given, field, 0.0, file) for field in numbers}
    if CONTEXT in MAY_HAVE[kind]:
        fields[CONTEXT] = _original_context(raw, given, name, file)
    try:
        return RopeScaling(kind, **fields)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _original_context(raw: Mapping[str, Any], given: Mapping[str, Any], name: str, file: Path) -> int:
    """The context of before, beside the other fields or in the file itself, as some models have it; by default the context."""
    places = {f"{name}.{CONTEXT}": given, CONTEXT: raw}
    stored = {
        place: whole(fields, CONTEXT, file) for place, fields in places.items() if fields.get(CONTEXT) is not None
    }
    return _agreed(stored, file) or whole(raw, "max_position_embeddings", file)


def _theta(raw: Mapping[str, Any], file: Path) -> float:
    places = {"rope_theta": raw} | {f"{name}.rope_theta": raw.get(name) or {} for name in OBJECTS}
    stored = {
        name: real(fields, "rope_theta", DEFAULT_THETA, file)
        for name, fields in places.items()
        if "rope_theta" in fields
    }
    return _agreed(stored, file) or DEFAULT_THETA


def _agreed(stored: Mapping[str, Number], file: Path) -> Number | None:
    """The number that all places have, where there are any; a `UserError` where two differ."""
    if len(set(stored.values())) > 1:
        raise UserError(f"{file}: {' and '.join(f'{place}={x}' for place, x in stored.items())} differ; keep one")
    return next(iter(stored.values()), None)
