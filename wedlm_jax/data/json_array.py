"""One JSON array of records, as many public instruction sets are: where its elements lie."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from wedlm_jax.errors import UserError, reason

# Lenient, since it only finds where elements end: a line end within a text, or a number of thousands of digits, is for who reads
# that one record.
_DECODER = json.JSONDecoder(strict=False, parse_int=float)
_HEAD = 4096  # bytes in which a file says what it is
_SPACE = re.compile(r"[ \t\n\r]*")


def begins_array(head: bytes) -> bool:
    """Whether a file that begins so is one array: no line of JSONL begins with a bracket."""
    return head[:_HEAD].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def elements(data: bytes, path: Path) -> Iterator[tuple[int, int]]:
    """Where each element of the array that a file holds begins and ends, in bytes.

    Raises:
      UserError: what is no JSON hides all elements behind it; or more follows the array.
    """
    # A character for each byte: those of UTF-8 lie within strings alone, and are none of JSON's own.
    text = data.decode("latin-1")
    at, number = _behind_space(text, text.index("[") + 1), 0
    empty = text[at : at + 1] == "]"
    while not empty:
        try:
            _, end = _DECODER.raw_decode(text, at)
            yield at, end
            at = _behind_space(text, end)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        except (ValueError, RecursionError) as error:
            what = reason(error)
            raise UserError(
                f"{path}: record {number}: broken JSON ({what}), behind which no record of the array can be told; mend it"
            ) from None
        at, number = _behind_space(text, at + 1), number + 1
    if _behind_space(text, at + 1) < len(text):
        raise UserError(f"{path}: more follows its array; JSON records are one array, or one object a line")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
