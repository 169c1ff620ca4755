"""Command-line flags: tyro reads them into a dataclass, and a bad one is told in one line as every other bad input is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from wedlm_jax.errors import UserError

Flags = TypeVar("Flags")

MAY_BE_NONE = ("--entropy-threshold", "--stop-ids", "--mask-token-id")  # and not by default: none has to be given

# The field `adapter` of a command that loads a model.
AdapterFlag = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="DIR", help="Adapter to put beside it: a directory of save_adapter or of PEFT, or its workdir."
    ),
]

# The field `dtype` of a command that decodes.
DTypeFlag = Annotated[
    Literal["float32", "bfloat16", "int8"] | None,
    tyro.conf.arg(
        help="Of parameters and compute; None is bfloat16 on accelerators, float32 on CPUs and GPUs before Ampere. float32 "
        "multiplies in float32 on accelerators too. int8 computes as None, with the layers' kernels rounded to 8 bits, a half or "
        "a quarter of their bytes."
    ),
]

# The field `chat_template_kwargs` of a command that puts messages through a chat template.
ChatTemplateFlag = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="JSON", help='Variables of the chat template, as {"enable_thinking": false} for Qwen3\'s not to think.'
    ),
]

# A field of text that need not be given. By itself tyro would take the text None for no text.
TextFlag = Annotated[str | None, tyro.conf.arg(constructor=str, metavar="TEXT", help_behavior_hint="(default: None)")]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"[╭╮╰╯│─]+|-{3,}")
_EXAMPLE = re.compile(r"^ *(?=python -m )", re.MULTILINE)


def parse(
    flags: type[Flags], *, prog: str, args: Sequence[str] | None = None, description: str | None = None, **options: Any
) -> Flags:
    """The flags of a command.

    Args:
      flags: a dataclass; its fields are the flags.
      prog: how the command is started, for the help.
      args: the command line; that of the process if not given.
      description: for the help; the docstring of `flags` if not given. Examples in it are lines that begin with `python -m`.
      **options: of `tyro.cli`.

    Raises:
      UserError: a flag is unknown, missing or of the wrong type, names an empty path, or is a list that is there twice.
    """
    args = _positional_first(flags, spell_none(sys.argv[1:] if args is None else args))
    _refuse_empty_paths(flags, args)
    _refuse_lists_in_parts(flags, args)
    if description is not None:
        description = _EXAMPLE.sub("$ ", description)  # tyro joins lines that begin with a letter
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return _at_home(tyro.cli(flags, prog=prog, args=args, description=description, **options))
    except SystemExit as exit:
        if exit.code in (None, 0):
            raise
        raise UserError(f"{_one_line(shown.getvalue())}; {prog} --help shows the flags") from None


def _refuse_empty_paths(flags: type, args: Sequence[str]) -> None:
    """An empty path, as of a variable that is not set, would be the current folder, and all be written there."""
    kinds = get_type_hints(flags)
    paths = {_spelled(name) for name, kind in kinds.items() if kind is Path or Path in get_args(kind)}
    for flag, value in itertools.zip_longest(args, args[1:]):
        name, equals, behind = flag.replace("_", "-").partition("=")
        if name in paths and (behind if equals else value) == "":
            raise UserError(f"{name} is empty; name a path, or leave it out")


def _refuse_lists_in_parts(flags: type, args: Sequence[str]) -> None:
    """Of a list that is given twice, such as `--stop A --stop B`, the first values would be dropped."""
    named = [flag.partition("=")[0].replace("_", "-") for flag in args if flag.startswith("--")]
    for flag, count in _value_counts(flags):
        if count == math.inf and named.count(flag) > 1:
            raise UserError(f"{flag} is there {named.count(flag)} times; write all its values behind one")


def _at_home(flags: Flags) -> Flags:
    """With the home directory for the `~` of a path, which no shell writes out behind an equals sign."""
    paths = {name: Path(os.path.expanduser(path)) for name, path in vars(flags).items() if isinstance(path, Path)}
    return dataclasses.replace(flags, **paths)  # type: ignore[type-var]


def each_once(flags: Flags) -> Flags:
    """Without what a list flag holds a second time: it would be measured twice under one name."""
    once = {name: tuple(dict.fromkeys(values)) for name, values in vars(flags).items() if isinstance(values, tuple)}
    return dataclasses.replace(flags, **once)  # type: ignore[type-var]


def require_positive(flags: Any, *names: str) -> None:
    """Refuses a flag that is given and below 1, or a list flag that is empty or holds a number below 1.

    Raises:
      UserError: names the flag.
    """
    for name in names:
        value = getattr(flags, name)
        if isinstance(value, tuple):
            require_some(flags, name)
            value = min(value)
        if value is not None and value < 1:
            raise UserError(f"{_spelled(name)} {value}: must be at least 1")


def require_some(flags: Any, *names: str) -> None:
    """Refuses a list flag that is empty.

    Raises:
      UserError: names the flag.
    """
    for name in names:
        if not getattr(flags, name):
            raise UserError(f"{_spelled(name)}: give at least one")


def refuse_beside(flags: Any, instead: dict[str, str]) -> None:
    """Refuses a flag that another one of the command takes the place of.

    Args:
      flags: as given; a field at its default is one that was not.
      instead: by the field's name, the flag to use.

    Raises:
      UserError: names both.
    """
    for name, other in instead.items():
        if getattr(flags, name) != getattr(type(flags), name):
            raise UserError(f"{_spelled(name)} does nothing here; use {other}")


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_line(box: str) -> str:
    """The message of tyro's box: without the title, the frame (of ASCII where stdout is) and what follows the ruler."""
    lines = [_FRAME.sub(" ", line).split() for line in _ANSI.sub("", box).splitlines()[1:]]  # the first holds the title
    said: list[str] = []
    for words in lines:
        if not words and said:
            break
        said += words
    # The name of a class or section says nothing.
    message = re.sub(r"^Error parsing \w+: ", "", " ".join(said)).rstrip(".:")
    meant = [line[0] for line in lines if line and line[0].startswith("--")] if "Unrecognized" in message else []
    return f"{message}; did you mean {meant[0]}?" if meant else message


def spell_none(arguments: Sequence[str]) -> list[str]:
    """`none` in any case as the value of a flag that may have none, spelled as tyro wants it: None. Flags come with hyphens or
    underscores, and their value behind a space or an equals sign."""
    spelled = list(arguments)
    for i, argument in enumerate(spelled):
        flag, equals, value = argument.partition("=")
        if _may_be_none(flag) and equals and value.lower() == "none":
            spelled[i] = f"{flag}=None"
        elif i and _may_be_none(spelled[i - 1]) and argument.lower() == "none":
            spelled[i] = "None"
    return spelled


def _positional_first(flags: type, arguments: list[str]) -> list[str]:
    """With what stands before, between and behind the flags in one place, for tyro takes no more than its first such place."""
    kinds = get_type_hints(flags, include_extras=True)
    if not any(tyro.conf.Positional in getattr(kind, "__metadata__", ()) for kind in kinds.values()):
        return arguments
    counts = dict(_value_counts(flags))
    positional, flagged = [], []
    room = 0.0  # for values of the flag before
    for argument in arguments:
        if argument.startswith("--"):
            room = 0 if "=" in argument else counts.get(argument.replace("_", "-"), 1)
            flagged.append(argument)
        elif room or argument.startswith("-"):
            room = max(room - 1, 0)
            flagged.append(argument)
        else:
            positional.append(argument)
    return positional + flagged


def _value_counts(flags: type) -> Iterator[tuple[str, float]]:
    """How many values follow a flag where that is not one: none a boolean, any number a list. Those of a nested config with them,
    which has no prefix here."""
    yield "--help", 0
    for name, kind in get_type_hints(flags).items():
        if kind is bool:
            yield from ((_spelled(name), 0), (_spelled(f"no_{name}"), 0))
        elif any(get_origin(of) is tuple for of in (kind, *get_args(kind))):
            yield _spelled(name), math.inf
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _value_counts(kind)


def _may_be_none(flag: str) -> bool:
    return flag.replace("_", "-") in MAY_BE_NONE
