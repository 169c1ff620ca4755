"""Messages of a conversation as chat templates take them, from the forms in which people keep them: OpenAI's, ShareGPT's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from wedlm_jax.data.records import BadRecord, plain
from wedlm_jax.errors import shown

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Messages as chat templates take them: `role` and `content`, ShareGPT's names told apart, a content in parts joined,
    arguments of calls as objects. What came out goes through unchanged.

    Raises:
      BadRecord: `column` holds no messages, or one of them is not as it should be.
    """
    if isinstance(value, Mapping):
        # A sequence of records, as tfds gives it, is one list for each key. Anything else is one message without its list.
        if not all(isinstance(one, list) for one in value.values()) or len({len(one) for one in value.values()}) != 1:
            raise BadRecord(f"{column} is an object, not a list of messages")
        value = [dict(zip(value, one, strict=True)) for one in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise BadRecord(f"{column} is {type(value).__name__}, not a list of messages")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRecord(f"message {number} is {type(message).__name__}, not an object with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    sharegpt = "from" in message and "role" not in message
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    role, content = message.pop(role_key, None), message.pop(content_key, None)
    if sharegpt:
        role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role is None:
        raise BadRecord(f"message {number} has no role (keys: {', '.join(map(str, message))[:80] or 'none'})")
    if role not in _ROLES:
        known = [*_ROLES, *(_SHAREGPT_ROLES if sharegpt else ())]
        raise BadRecord(f"message {number}: the role {shown(role)} is unknown; the roles are {', '.join(known)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_text_of(part, number) for part in content)
    if not isinstance(content, str):
        kind = "missing" if content is None else f"{type(content).__name__}, not text"
        raise BadRecord(f"message {number}: {content_key} is {kind}")
    if "function_call" in message:
        raise BadRecord(f"message {number}: function_call is OpenAI's earlier form of a call; write it as tool_calls")
    if message.get("weight", 1) not in (0, 1):
        raise BadRecord(f"message {number}: weight is {shown(message['weight'])}; 0 for a turn not to be learned, or 1")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise BadRecord(f"message {number}: tool_calls is {shown(calls)}, and not a list of calls, each an object")
        message["tool_calls"] = [_call(call, number) for call in calls]
    elif "tool_calls" in message:  # none; some templates take one for being named
        del message["tool_calls"]
    return {"role": role, "content": content, **message}


def _text_of(part: Any, number: int) -> str:
    """OpenAI allows a content in parts, of which some may be pictures or sound."""
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadRecord(f'message {number}: content holds {shown(part)}, and not {{"type": "text", "text": ...}} alone')
    return part["text"]


def _call(call: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """With the arguments as an object: OpenAI writes them as text, which templates would quote once more."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], number)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise BadRecord(f"message {number}: the arguments of a call are text that is no JSON object")
    return {**call, "arguments": plain(parsed)}
