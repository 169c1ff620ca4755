"""Answers in texts: what a completion is scored by, where the questions are your own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

Match = Literal["number", "choice", "text"]

_NUMBER = re.compile(r"(?<![\d.])(?P<minus>(?<!\w)-\$?)?\$?(?P<digits>\d+(?:,\d{3})*(?:\.\d+)?)")
_CHOICE = re.compile(r"(?<!\w)[A-H](?!\w)")


def number(text: str) -> str | None:
    """The first number behind the last `####`, as GSM8K writes its answers; without that mark the last number of the text.

    Signs of currencies, commas between thousands and zeros that change no value are left out: `-$1,200.50` is -1200.5.
    """
    _, mark, marked = text.rpartition("####")
    found = list(_NUMBER.finditer((marked if mark else text).replace("\N{MINUS SIGN}", "-")))
    if not found:
        return None
    chosen = found[0 if mark else -1]
    whole, _, decimals = chosen["digits"].replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{decimals.rstrip('0')}".rstrip(".")
    return f"-{value}" if chosen["minus"] and value != "0" else value


def choice(text: str) -> str | None:
    """The first letter A to H that stands alone, behind the last word `answer` where there is one."""
    *_, behind = re.split("answer", text, flags=re.IGNORECASE)
    found = _CHOICE.search(behind)
    return found.group() if found else None


def whole(text: str) -> str | None:
    """All of it, without white space around it; None where nothing is left."""
    return text.strip() or None


ANSWER: Mapping[Match, Callable[[str], str | None]] = {"number": number, "choice": choice, "text": whole}
