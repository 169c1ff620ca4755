"""Variables of a chat template, such as `enable_thinking` of Qwen3's: what a model's makers let its users set."""

from __future__ import annotations

import copy
import inspect
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from wedlm_jax.errors import UserError, shown

Variables = Mapping[str, Any]
NO_VARIABLES: Variables = types.MappingProxyType({})

# What is said of every conversation, and what transformers would take for arguments of its own.
_GIVEN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}


def read_variables(text: str, name: str) -> dict[str, Any]:
    """The variables that a JSON object holds.

    Raises:
      UserError: it is none; beginning with `name`.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{name}={text!r}: no JSON ({error}); write {{"enable_thinking": false}}') from None
    if not isinstance(found, dict):
        raise UserError(f'{name}={text!r}: must be an object, as {{"enable_thinking": false}}')
    return found


def beside_messages(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] | None, variables: Variables) -> Variables:
    """What the chat template is given beside messages, as arguments of `apply_chat_template`.

    Args:
      tools: descriptions of functions.

    Raises:
      UserError: the template does not read it.
    """
    _require_read(tokenizer, variables, "chat_template_kwargs")
    if tools and not _reads(tokenizer, "tools"):
        raise UserError("tools: the tokenizer's chat template shows none; leave them out")
    return {"tools": tools, **variables}


def _require_read(tokenizer: PreTrainedTokenizerBase, variables: Variables, name: str) -> None:
    """Raises a `UserError`, beginning with `name`, where the chat template does not read one of the variables, or is given it
    otherwise: it would be without effect."""
    if variables and not tokenizer.chat_template:
        raise UserError(f"{name}: the tokenizer has no chat template; leave it out")
    for variable in variables:
        if variable in _GIVEN or variable in tokenizer.special_tokens_map:
            raise UserError(f"{name}: {variable} is given to every chat template and cannot be set; leave it out")
        if not variable.isidentifier() or not _reads(tokenizer, variable):
            raise UserError(f"{name}: the tokenizer's chat template reads no {shown(variable)}; leave it out")


def with_defaults(tokenizer: PreTrainedTokenizerBase, variables: Variables, name: str) -> PreTrainedTokenizerBase:
    """A tokenizer whose chat template has these variables where its caller does not set them; the given one where that has them
    already, such as the one that a workdir keeps.

    They are written into the template itself, as Jinja, so they stay with it wherever it is saved and read.

    Raises:
      UserError: the template does not read one of them; beginning with `name`.
    """
    _require_read(tokenizer, variables, name)
    # What JSON holds is written in Python as in Jinja. Jinja drops the line end behind a block, as transformers sets it up.
    lines = "".join(f"{{% set {key} = {key} | default({value!r}) %}}\n" for key, value in variables.items())
    before = templates_of(tokenizer)
    if all(text.startswith(lines) for text in before.values()):
        return tokenizer
    tokenizer, templates = copy.deepcopy(tokenizer), {of: lines + text for of, text in before.items()}
    tokenizer.chat_template = templates if isinstance(tokenizer.chat_template, dict) else templates["default"]
    return tokenizer


def _reads(tokenizer: PreTrainedTokenizerBase, variable: str) -> bool:
    return any(re.search(rf"\b{variable}\b", text) for text in templates_of(tokenizer).values())


def templates_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Every chat template by its name; that of a tokenizer with one alone is the default."""
    found = tokenizer.chat_template
    return found if isinstance(found, dict) else {"default": found} if found else {}


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no value of JSON")
