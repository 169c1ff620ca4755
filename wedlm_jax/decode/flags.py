"""DecodeConfig on a command line."""

from __future__ import annotations

from collections.abc import Sequence

OPTIONAL_FLAGS = ("--entropy-threshold", "--stop-ids", "--mask-token-id")


def spell_none(arguments: Sequence[str]) -> list[str]:
    """`none` in any case as the value of a flag that may have none, spelled as the parser wants it: None."""
    spelled = list(arguments)
    for i in range(1, len(spelled)):
        if spelled[i - 1] in OPTIONAL_FLAGS and spelled[i].lower() == "none":
            spelled[i] = "None"
    return spelled
