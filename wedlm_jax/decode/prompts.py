"""Prompts: text, chat messages or token ids, turned into checked token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from wedlm_jax.data.chat import write_prompt
from wedlm_jax.data.chat_template import NO_VARIABLES, Variables
from wedlm_jax.data.messages import read_messages
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.tokenizer import begun, encode_behind
from wedlm_jax.errors import UserError, shown
from wedlm_jax.model.handle import Model

Messages = Sequence[Mapping[str, Any]]
# An object is one of messages, with the tools and the chat_template_kwargs that the template is given beside them.
Prompt = str | Sequence[int] | Messages | Mapping[str, Any]
BESIDE_MESSAGES = ("tools", "chat_template_kwargs")


class Verbatim(str):
    """Text as it is: what a chat template wrote, which gave it a beginning, or what stands behind the text `before`."""

    before: str

    def __new__(cls, text: str, before: str = "") -> Verbatim:
        verbatim = super().__new__(cls, text)
        verbatim.before = before
        return verbatim


def encode_prompt(model: Model, prompt: Prompt, name: str = "prompt") -> list[int]:
    """Token ids of a prompt: text as a document begins (`start_of_text`), messages through the tokenizer's chat template, ids
    checked.

    Raises:
      UserError: where the prompt is empty, holds an id out of range, or is text and the model has no tokenizer.
    """
    if isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)
    if isinstance(prompt, str):
        ids = _encode(model, prompt, name)
        ids = ids if isinstance(prompt, Verbatim) else begun(model.tokenizer, ids)
    elif isinstance(prompt, Mapping) or (isinstance(prompt, Sequence) and prompt and _are_messages(prompt)):
        ids = _encode(model, render_messages(model, prompt, name), name)  # type: ignore[arg-type]
    elif _is_list(prompt) and all(_is_id(i) for i in prompt):
        ids = [int(i) for i in prompt]  # type: ignore[arg-type]
    else:
        raise UserError(f"{name}: must be text, a list of messages or a list of token ids, not {shown(prompt)}")
    if not ids:
        raise UserError(f"{name} is empty: give at least one token")
    for i in ids:
        if not 0 <= i < model.config.vocab_size:
            raise UserError(f"{name}: token id {i} is not in the vocabulary [0, {model.config.vocab_size})")
    return ids


def prompt_text(model: Model, prompt: Prompt, name: str) -> str:
    """A prompt as text: messages as the chat template writes them.

    Raises:
      UserError: for token ids, and as `render_messages`.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) or isinstance(prompt[0], Mapping):
        return render_messages(model, prompt, name)  # type: ignore[arg-type]
    raise UserError(f"{name}: prompt_ids are no text; give prompt or messages")


def digest_of(prompts: Sequence[Any]) -> str:
    """A hash of token ids, or of what else JSON can say of prompts: it tells others from these."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def _encode(model: Model, text: str, name: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # from a cut UTF-16 text, or bytes on a command line that are no UTF-8
        raise UserError(
            f"{name}: {text[error.start]!a} at character {error.start} is half of a character; write whole ones, in UTF-8"
        ) from error
    before = text.before if isinstance(text, Verbatim) else ""
    return encode_behind(_tokenizer(model, name), before, text, control_tokens=True)


def _is_list(value: object) -> bool:
    """Bytes are a sequence of integers too, but of no token ids; an array of one number has no length."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def render_messages(
    model: Model,
    prompt: Messages | Mapping[str, Any],
    name: str = "prompt",
    require: Callable[[str], None] = lambda text: None,
) -> Verbatim:
    """Messages as the tokenizer's chat template writes them, up to where the answer begins; read as training data are. `require`
    is as in `write_prompt`.

    Raises:
      UserError: where there is no tokenizer or template, a message is none, or the template refuses them, leaves one out, or does
        not read what is beside them.
    """
    tokenizer = _tokenizer(model, name)
    messages, tools, variables = _parts(prompt, name) if isinstance(prompt, Mapping) else (prompt, None, NO_VARIABLES)
    if not tokenizer.chat_template:
        raise UserError(f"{name}: the model's tokenizer has no chat template; pass text or token ids instead")
    try:
        return Verbatim(write_prompt(read_messages([*messages], "messages"), tokenizer, tools, variables, require))
    except BadRecord as error:
        raise UserError(f"{name}: {error}") from None


def _parts(prompt: Mapping[str, Any], name: str) -> tuple[Messages, Sequence[Any] | None, Variables]:
    """Messages, tools and variables of a prompt that is an object."""
    if unknown := [key for key in prompt if key not in ("messages", *BESIDE_MESSAGES)]:
        raise UserError(
            f"{name}: unknown key {unknown[0]!r}; beside messages there may be {' and '.join(BESIDE_MESSAGES)}"
        )
    messages, tools, variables = (prompt.get(key) for key in ("messages", *BESIDE_MESSAGES))
    if not isinstance(messages, Sequence) or not messages or not _are_messages(messages):
        raise UserError(f"{name}: messages must be a list of messages, not {shown(messages)}")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{name}: tools must be a list, not {shown(tools)}")
    if variables is not None and not isinstance(variables, Mapping):
        raise UserError(f"{name}: chat_template_kwargs must be an object, not {shown(variables)}")
    return messages, tools, NO_VARIABLES if variables is None else variables


def _are_messages(value: Sequence[Any]) -> bool:
    return all(isinstance(message, Mapping) for message in value)


def _tokenizer(model: Model, name: str):
    if model.tokenizer is None:
        raise UserError(
            f"{name}: this model has no tokenizer, and so reads no text; put its tokenizer.json beside the weights, or give "
            "token ids (prompt_ids in a file of prompts)"
        )
    return model.tokenizer
