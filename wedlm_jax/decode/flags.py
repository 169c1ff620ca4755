"""DecodeConfig on a command line."""

from __future__ import annotations

from collections.abc import Sequence

OPTIONAL_FLAGS = ("--entropy-threshold", "--stop-ids", "--mask-token-id")


def spell_none(arguments: Sequence[str]) -> list[str]:
    """`none` in any case as the value of a flag that may have none, spelled as the parser wants it: None. The parser takes flags
    with hyphens or underscores, and their value behind a space or an equals sign."""
    spelled = list(arguments)
    for i, argument in enumerate(spelled):
        flag, equals, value = argument.partition("=")
        if _may_be_none(flag) and equals and value.lower() == "none":
            spelled[i] = f"{flag}=None"
        elif i and _may_be_none(spelled[i - 1]) and argument.lower() == "none":
            spelled[i] = "None"
    return spelled


def _may_be_none(flag: str) -> bool:
    return flag.replace("_", "-") in OPTIONAL_FLAGS
