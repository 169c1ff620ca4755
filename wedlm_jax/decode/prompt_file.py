"""A file of prompts: JSONL, one of text, messages or token ids a line, or one JSON array of the same objects."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.data.json_array import begins_array, elements
from wedlm_jax.data.json_lines import unrepeated
from wedlm_jax.data.records import BadRecord
from wedlm_jax.decode.prompts import BESIDE_MESSAGES, Prompt
from wedlm_jax.errors import UserError, reason

BESIDE_PROMPTS = ("answer", "id")
KINDS = {
    "prompt": "a string",
    "messages": 'a list of {"role": ..., "content": ...}',
    "prompt_ids": "a list of token ids",
}


def read_prompts(path: Path, flag: str = "--input") -> list[tuple[str, Prompt]]:
    """The prompts of a file that a flag names, each with its name `file:line`, of an array `file: record N`.

    Raises:
      UserError: naming file and line, for a line that is not UTF-8, not JSON, has a key twice or is not one prompt; or for an
        empty file.
    """
    return prompts_of(read_objects(path, flag))


def prompts_of(objects: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, Prompt]]:
    """The prompts of named objects. An `answer` beside one, by which others score (`evals/questions.py`), and an `id` are not
    read.

    Raises:
      UserError: beginning with the name, where there is not one prompt and nothing beside it but what goes with messages.
    """
    return [(name, _prompt_in({k: v for k, v in o.items() if k not in BESIDE_PROMPTS}, name)) for name, o in objects]


def read_objects(path: Path, flag: str, example: str = '{"prompt": "Hello"}') -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file of prompts, each with its name. Raises as `read_prompts`, with a line for example where the file is
    empty."""
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # that editors of Windows begin a file with
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({reason(error)}); name a JSONL file") from error
    if begins_array(content):
        places = elements(content, path)
        parts = {f"{path}: record {number}": content[start:end] for number, (start, end) in enumerate(places)}
    else:
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        parts = {f"{path}:{number}": line for number, line in enumerate(lines, 1)}
    if not parts:
        raise UserError(f"{flag} {path}: is empty; give a line such as {example} for each prompt")
    return [(name, _parse_object(part, name)) for name, part in parts.items()]


def _parse_object(line: bytes, name: str) -> dict[str, Any]:
    if not line.strip():
        raise UserError(f"{name}: the line is empty; remove it or write a prompt")
    try:
        record = json.loads(line.decode(), object_pairs_hook=unrepeated)
    except BadRecord as error:
        raise UserError(f"{name}: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{name}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists in lists in lists
        raise UserError(f"{name}: JSON that cannot be read ({error}); write one plain object a line") from error
    if not isinstance(record, dict):
        raise UserError(f'{name}: not a JSON object; write {{"prompt": ...}}')
    return record


def _prompt_in(record: dict[str, Any], name: str) -> Prompt:
    for key in record:
        if key not in KINDS and not ("messages" in record and key in BESIDE_MESSAGES):
            raise UserError(
                f"{name}: unknown key {key!r}; give one of {', '.join(KINDS)}, and beside it at most id and answer"
            )
    given = {kind: value for kind, value in record.items() if kind in KINDS}
    if len(given) != 1:
        raise UserError(f"{name}: has {' and '.join(given) or 'no key'}; give exactly one of {', '.join(KINDS)}")
    ((kind, value),) = given.items()
    if not _is_kind(kind, value):
        raise UserError(f"{name}: {kind} must be {KINDS[kind]}, not {json.dumps(value):.80}")
    if not value:
        raise UserError(f"{name}: {kind} is empty; give at least one token")
    return value if len(record) == 1 else record


def _is_kind(kind: str, value: Any) -> bool:
    if kind == "prompt":
        return isinstance(value, str)
    return isinstance(value, list) and (kind == "messages" or all(type(i) is int for i in value))
