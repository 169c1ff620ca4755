"""From the keys or columns of a record to a text, a completion or a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from wedlm_jax.data.config import SourceConfig
from wedlm_jax.data.messages import read_messages
from wedlm_jax.data.records import BadRecord, Chat, Completion, DecodedReply, Record, Text, plain
from wedlm_jax.errors import UserError

Kind = Literal["text", "messages", "completion"]
_USUAL: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("messages", ("messages",)),
    ("messages", ("conversations",)),  # ShareGPT
    ("text", ("text",)),
    ("completion", ("prompt", "completion")),
)
# Alpaca's, whose question may go on in `input`; where nothing else is found, since its tables often have a `text` as well.
_ALPACA, _INPUT = ("instruction", "output"), "input"
_HISTORY = "history"  # and earlier turns beside them, as some have it
_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "chat": ("messages", "completion"),
    "text": ("text",),
    "table": ("messages", "text", "completion"),
}
_FIELDS: Mapping[Kind, str] = {
    "messages": "data.messages_column",
    "text": "data.text_column",
    "completion": "data.prompt_column with data.completion_column",
}
# A system prompt, descriptions of functions for the chat template, and its variables.
_BESIDE_MESSAGES = ("system", "tools", "functions", "chat_template_kwargs")


def choose_columns(config: SourceConfig, names: Iterable[str]) -> tuple[Kind, tuple[str, ...]]:
    """The columns that make a document, of those there are: one of text or of messages, or a prompt and its completion.

    Raises:
      BadRecord: one that the config names is missing; or it names none, and not one kind is found by its usual names.
    """
    names = list(names)
    found: list[tuple[Kind, tuple[str, ...]]] = []
    if config.text_column is not None:
        found = [("text", (config.text_column,))]
    elif config.messages_column is not None:
        found = [("messages", (config.messages_column,))]
    elif config.prompt_column is not None and config.completion_column is not None:
        found = [("completion", (config.prompt_column, config.completion_column))]
    if found:
        if missing := [name for name in found[0][1] if name not in names]:
            raise BadRecord(f"no column {missing[0]!r} (there are: {_listed(names)})")
        return found[0]
    kinds = _KINDS.get(config.source, _KINDS["table"])
    usual = [one for one in _USUAL if one[0] in kinds]
    alpaca: list[tuple[Kind, tuple[str, ...]]] = [("completion", _ALPACA)] if "completion" in kinds else []
    found = [one for one in usual if set(one[1]) <= set(names)] or [one for one in alpaca if set(one[1]) <= set(names)]
    if len(found) == 1:
        return found[0]
    fields = " or ".join(dict.fromkeys(_FIELDS[kind] for kind, _ in usual))
    known = ", ".join(" with ".join(columns) for _, columns in (*usual, *alpaca))
    what = f"{found[0][1][0]} and {found[1][1][0]} are both there" if found else f"none of {known} is there"
    raise BadRecord(f"{what} (there are: {_listed(names)}); name what to learn as {fields}")


def read_record(fields: Mapping[str, Any], config: SourceConfig) -> Record:
    """Raises `BadRecord`: a column is missing, or its value is not what it should be."""
    try:
        return _record(fields, config)
    except RecursionError:
        raise BadRecord("lists or objects are nested too deep") from None


def _record(fields: Mapping[str, Any], config: SourceConfig) -> Record:
    if config.source == "completions":
        return _decoded_reply(fields)
    kind, columns = choose_columns(config, fields)
    values = [plain(fields[column]) for column in columns]
    of_trl = kind == "completion" and any(isinstance(value, list | Mapping) for value in values)  # both are messages
    if config.plain_prompt and (of_trl or kind == "messages"):
        raise BadRecord(f"{columns[0]} is messages, which the chat template writes; leave out data.plain_prompt")
    if kind == "messages":
        return _chat(read_messages(_parsed(values[0], columns[0]), columns[0]), fields)
    if of_trl:
        before, after = (read_messages(value, column) for value, column in zip(values, columns, strict=True))
        return _chat([*({**message, "weight": 0} for message in before), *after], fields)
    texts = [_text(value, column) for value, column in zip(values, columns, strict=True)]
    if kind == "text":
        return Text(texts[0])
    if _are_alpaca(config, columns):
        if fields.get(_HISTORY):
            raise BadRecord(f"{_HISTORY} holds earlier turns, which are not read beside {columns[0]}; write messages")
        if more := plain(fields.get(_INPUT)):
            texts[0] += f"\n{_text(more, _INPUT)}"
    if config.plain_prompt:
        if beside := [name for name in _BESIDE_MESSAGES if fields.get(name)]:
            raise BadRecord(f"{beside[0]} is for the chat template; leave it out, or data.plain_prompt")
        return Completion(*texts)
    return _chat([{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}], fields)


def _are_alpaca(config: SourceConfig, columns: Sequence[str]) -> bool:
    """Whether the columns are Alpaca's, found and not named: those that are named are all that is read."""
    return config.prompt_column is None and tuple(columns) == _ALPACA


def _chat(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> Chat:
    beside = {name: plain(fields.get(name)) for name in _BESIDE_MESSAGES}
    if beside["functions"] is not None:
        raise BadRecord(
            'functions is OpenAI\'s earlier form of tools; write {"type": "function", "function": ...} of each there'
        )
    messages = [*_system(beside["system"]), *messages]
    return Chat(messages, _tools(beside["tools"]), _variables(beside["chat_template_kwargs"]))


def _decoded_reply(fields: Mapping[str, Any]) -> DecodedReply:
    for name in ("prompt_ids", "ids"):
        value = fields.get(name)
        if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
            raise BadRecord(f"{name} is no list of token ids (there are: {_listed(fields)})")
    reason = fields.get("finish_reason")
    if reason not in ("stop", "length"):
        raise BadRecord(f"finish_reason is {reason!r}, and not stop or length")
    return DecodedReply(fields["prompt_ids"], fields["ids"], reason == "stop")


def table_columns(config: SourceConfig, names: Sequence[str], place: str) -> list[str]:
    """The columns to read of a table: the same ones in every row, so a wrong name is no matter of records.

    Raises:
      UserError: as `choose_columns`; or one of them is there twice.
    """
    try:
        kind, chosen = choose_columns(config, names)
    except BadRecord as error:
        raise UserError(f"{place}: {error}") from None
    if twice := [name for name in chosen if names.count(name) > 1]:
        raise UserError(f"{place}: the column {twice[0]!r} is there twice; take one out")
    beside = () if kind == "text" else _BESIDE_MESSAGES
    if _are_alpaca(config, chosen):
        beside = (_INPUT, _HISTORY, *beside)
    return [*chosen, *(name for name in beside if name in names and name not in chosen)]


def _system(value: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(value, "system")}] if value else []


def _parsed(value: Any, column: str) -> Any:
    """Lists and objects may be written as JSON, as in a CSV file, where an empty text is none."""
    if not isinstance(value, str):
        return value
    try:
        value = json.loads(value) if value else None
    except (ValueError, RecursionError):
        raise BadRecord(f"{column} is text that is no JSON") from None
    return plain(value)  # an escape in it may be half a character


def _tools(value: Any) -> list[Any] | None:
    value = _parsed(value, "tools")
    if value is not None and not isinstance(value, list):
        raise BadRecord(f"tools is {type(value).__name__}, not a list")
    return value or None


def _variables(value: Any) -> dict[str, Any]:
    """Of the chat template; in a table a variable that a row does not set is null."""
    value = _parsed(value, "chat_template_kwargs")
    if value is not None and not isinstance(value, Mapping):
        raise BadRecord(f"chat_template_kwargs is {type(value).__name__}, not an object")
    return {name: one for name, one in (value or {}).items() if one is not None}


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{column} is {'missing' if value is None else f'{type(value).__name__}, not text'}")
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none"
