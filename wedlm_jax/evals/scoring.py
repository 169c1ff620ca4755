"""Answers in texts: what a completion is scored by, where the questions are your own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Literal

Match = Literal["number", "choice", "text"]

_NUMBER = re.compile(
    r"(?<![0-9.])(?P<minus>(?<!\w)-)?[$€£¥₹]?(?P<digits>(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
)
_MARKED = re.compile(r"####[ \t]*" + _NUMBER.pattern)
# A and I that begin or go on a sentence are words: "A train", "I think", but not "A because".
_LETTER = r"(?<![\w'\u2019])(?:[B-HJ]|[AI](?!['\u2019]| (?!because\b|since\b|as\b|is\b)[a-z]))(?![\w'\u2019])"
_NAMED = re.compile(rf"\b(?i:answer|choice|option)(?i:\s+is)?\s*[:=]?\s*[(\[*\"']*({_LETTER})")
_FIRST = re.compile(rf"\s*[(\[*\"']*({_LETTER})")
_ALONE = re.compile(r"\W*([a-jA-J])\W*")


def number(text: str) -> str | None:
    """The number behind the first `####` that has one, as GSM8K writes its answers; else the last number of the text.

    It is written in one form, without signs of currencies, commas between thousands, exponents and zeros that change no value:
    `-$1,200.50` is -1200.5.
    """
    text = re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", text)
    found = _MARKED.search(text) or next(reversed(list(_NUMBER.finditer(text))), None)
    if found is None:
        return None
    whole, _, decimals = f"{Decimal(found['digits'].replace(',', '')):f}".partition(".")
    value = f"{whole.lstrip('0') or '0'}.{decimals.rstrip('0')}".rstrip(".")
    return f"-{value}" if found["minus"] and value != "0" else value


def only_number(text: str) -> str | None:
    """`number` of an answer to score by: the only one in it, or, where one is marked, in that line. 1/2 and 8:30 have none."""
    marked = _MARKED.search(text)
    counted = text if marked is None else text[marked.start() :].partition("\n")[0]
    return number(text) if len(_NUMBER.findall(counted)) == 1 else None


def choice(text: str) -> str | None:
    """A letter A to J: the first that is named, as in "the answer is (C)" or "Option: C"; else one that the text begins with;
    else the last one that stands alone. Where there is nothing but a letter, a small one too."""
    if (alone := _ALONE.fullmatch(text)) is not None:
        return alone[1].upper()
    if (found := _NAMED.search(text) or _FIRST.match(text)) is not None:
        return found[1]
    return next(reversed(re.findall(_LETTER, text)), None)


def whole(text: str) -> str | None:
    """All of it, without white space around it; None where nothing is left."""
    return text.strip() or None


# What a completion says, and what an answer to score by has to say.
ANSWER: Mapping[Match, Callable[[str], str | None]] = {"number": number, "choice": choice, "text": whole}
EXPECTED: Mapping[Match, Callable[[str], str | None]] = {**ANSWER, "number": only_number}
