"""A tree of frozen dataclasses as named fields: read from text and JSON by type, and every mistake told by its field."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from wedlm_jax.errors import UserError

Config = TypeVar("Config")


def from_json(cls: type[Config], text: str | bytes, source: str) -> Config:
    """Reads what `json.dumps(dataclasses.asdict(...))` wrote.

    Args:
      cls: the dataclass at the root.
      text: the JSON.
      source: where it came from, for the messages.

    Raises:
      UserError: `source` is no JSON, or a field is unknown, missing or of the wrong type.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}:{error.lineno}: no JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # bytes that are no text, a number of too many digits, deep nesting
        raise UserError(f"{source}: no JSON ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{source}: holds no {cls.__name__.lower()}")
    known = fields_of(cls)
    for name in _names(tree):
        if name not in known:
            raise UserError(f"{source}: {unknown_field(name, known)}")
    return validated(cls, tree, source)


def validated(cls: type[Config], tree: Mapping[str, Any], source: str) -> Config:
    """The config of a tree of dicts, every value checked against the type of its field; `source` opens the messages.

    Raises:
      UserError: a field is missing, unknown or not of its type, or the config itself refuses a value.
    """
    try:
        config = pydantic.TypeAdapter(cls).validate_python(tree)
    except pydantic.ValidationError as error:
        wrong = _first(error)
        name = ".".join(part for part in map(str, wrong["loc"]) if not part[:1].isupper())  # no classes of a union
        line = _first_line(error)
        name = "" if line.startswith((f"{name}.", f"{name}:")) else name  # it says so itself
        raise UserError(": ".join(part for part in (source, name, line) if part)) from None
    _check_integers(dataclasses.asdict(config), f"{source}: " if source else "")  # type: ignore[call-overload]
    return config


def read_value(annotation: Any, name: str, text: str) -> Any:
    """The value that `text` stands for in a field of this type: `none`, comma-separated tuples and, for a tuple of sections, a
    JSON list of objects are understood.

    Raises:
      UserError: the text is not of this type; `name` is what the message calls the field.
    """
    try:
        value = pydantic.TypeAdapter(annotation).validate_python(_parse(annotation, text))
    except json.JSONDecodeError as error:
        raise UserError(f"{name}={text!r}: no JSON ({error.msg}); write a list of objects") from None
    except pydantic.ValidationError as error:
        place = "".join(f"{part}: " for part in _first(error)["loc"] if isinstance(part, str))  # a field of an object
        raise UserError(f"{name}={text!r}: {place}{_first_line(error)}") from None
    _check_integers(value, "", name)
    return value


def fields_of(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every field of a tree of configs by dotted name, sections included, with its annotation."""
    fields: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(cls).items():
        fields[prefix + name] = annotation
        for section in reversed(sections_of(annotation)):
            fields |= fields_of(section, f"{prefix}{name}.")
    return fields


def sections_of(annotation: Any) -> list[type]:
    """The dataclasses that a field may hold; none for a plain value."""
    return [option for option in _options(annotation) if isinstance(option, type) and dataclasses.is_dataclass(option)]


def inner_section(place: dict[str, Any], path: Sequence[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The dict of a section inside a section, which begins with its defaults where it is None.

    Args:
      place: the dict of the first section of the path, or of the root where the path is empty.
      path: the names of the sections, from the root.
      fields: as `fields_of` gives them.
    """
    for depth in range(1, len(path)):
        if place[path[depth]] is None:
            place[path[depth]] = dataclasses.asdict(sections_of(fields[".".join(path[: depth + 1])])[0]())
        place = place[path[depth]]
    return place


def unknown_field(name: str, known: Mapping[str, Any]) -> str:
    """What is said of a field that does not exist: the nearest one that does."""
    last = name.rpartition(".")[2]
    near = [field for field in known if field.rpartition(".")[2] == last] or difflib.get_close_matches(
        name, known, 1, 0.5
    )
    if near:
        return f"unknown field {name}; did you mean {near[0]}?"
    sections = [field for field in known if sections_of(known[field])]
    there = f"the sections are {', '.join(sections)}" if sections else f"the fields are {', '.join(known)}"
    return f"unknown field {name}; {there}"


def check_choices(config: Any, section: str) -> None:
    """Raises a `UserError` where a field of a dataclass that is one of several words holds another one, as it may where it was
    made in Python and not read; `section` is what the message calls the dataclass."""
    for name, choices in _choices(config.__class__).items():
        if (value := getattr(config, name)) not in choices:
            *others, last = map(str, choices)
            listed = f"{', '.join(others)} or {last}" if others else last
            raise UserError(f"{section}.{name}={value!r} is unknown; choose {listed}")


@functools.cache
def _choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """The fields that hold one of several words, and None where they may."""
    found = {}
    for name, annotation in typing.get_type_hints(cls).items():
        words = [option for option in _options(annotation) if option is not type(None)]
        if all(typing.get_origin(option) is typing.Literal for option in words):
            none = (None,) if type(None) in _options(annotation) else ()
            found[name] = (*(word for option in words for word in typing.get_args(option)), *none)
    return found


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], free: Sequence[str] = ()) -> list[str]:
    """The fields in which two trees of dicts differ, as "name: saved -> current"; `free` names fields and sections to skip."""

    def walk(saved: Any, current: Any, name: str) -> list[str]:
        if name in free or saved == current:
            return []
        if isinstance(saved, Mapping) and isinstance(current, Mapping):
            prefix = f"{name}." if name else ""
            names = sorted(saved.keys() | current.keys())
            return [line for key in names for line in walk(saved.get(key), current.get(key), prefix + key)]
        if _are_sections(saved) and _are_sections(current) and len(saved) == len(current):
            pairs = enumerate(zip(saved, current, strict=True))
            return [line for number, (one, other) in pairs for line in walk(one, other, f"{name}[{number}]")]
        return [f"{name}: {saved} -> {current}"]

    return walk(saved, current, "")


def _are_sections(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def is_none(text: str) -> bool:
    return text.lower() in ("none", "null")


def _parse(annotation: Any, text: str) -> Any:
    """What pydantic is to convert: None, a list for a tuple, of objects where it is one of sections, else the text itself."""
    options = _options(annotation)
    named = [
        value for option in options if typing.get_origin(option) is typing.Literal for value in typing.get_args(option)
    ]
    if is_none(text) and type(None) in options and text not in named:  # `none` can be a value: model.remat=none
        return None
    if tuples := [option for option in options if typing.get_origin(option) is tuple]:
        if text.strip() and any(sections_of(item) for item in typing.get_args(tuples[0])):
            return json.loads(text)
        return [part.strip() for part in text.strip("[]()").split(",") if part.strip()]
    return text


def _check_integers(value: Any, opening: str, *path: str) -> None:
    """Raises a `UserError` at an integer, anywhere inside `value`, that an int32 does not hold: JAX's own are no larger."""
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise UserError(f"{opening}{'.'.join(path)}={value}: must fit in 32 bits")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
    for key, part in parts:
        _check_integers(part, opening, *path, str(key))


def _first(error: pydantic.ValidationError) -> Any:
    """The first of what a config's own check says; else the first of all: of a union, what is wrong with its first choice."""
    own = [wrong for wrong in error.errors() if isinstance(wrong.get("ctx", {}).get("error"), UserError)]
    return (own or error.errors())[0]


def _first_line(error: pydantic.ValidationError) -> str:
    wrong = _first(error)
    own = wrong.get("ctx", {}).get("error")
    return str(own) if isinstance(own, UserError) else wrong["msg"][0].lower() + wrong["msg"][1:]


def _options(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")
