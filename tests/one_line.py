"""Bad input is told in one line: a function raises it, a command writes it to stderr and ends with status 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wedlm_jax.errors import UserError


def message_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """What the `UserError` of a call says."""
    with pytest.raises(UserError) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def complaint_of(
    capsys: pytest.CaptureFixture[str], command: Callable[..., Any], *arguments: Any, **options: Any
) -> str:
    """What a command that is refused writes; without the line's end."""
    with pytest.raises(SystemExit) as exit:
        command(*arguments, **options)
    line = capsys.readouterr().err
    assert exit.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1
    return line.removesuffix("\n")
