"""A conversation through the tokenizer's chat template, with exactly the assistant's turns learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.chat_template import NO_VARIABLES, Variables, beside_messages
from wedlm_jax.data.examples import Example, end_token_id
from wedlm_jax.data.records import BadRecord, UnfitTokenizer
from wedlm_jax.data.tokenizer import encode_behind, encode_with_control_tokens
from wedlm_jax.errors import UserError, reason

_THINKING = ("reasoning_content", "thinking", "reasoning")  # its names, of which transformers gives templates the first
_SOMETHING_ELSE = "\N{INVISIBLE SEPARATOR}"

Message = dict[str, Any]  # role, content, and what the template reads besides (tool_calls, reasoning_content, ...)


def from_messages(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_end_tokens: int,
    loss_on_turns: Literal["all", "last"] = "all",
    tools: Sequence[Any] | None = None,
    variables: Variables = NO_VARIABLES,
    document_id: int = 0,
) -> Example:
    """The whole conversation as the template writes it once; learned is what the assistant writes after each of its prompts.

    A learned turn starts where the template's generation prompt for it ends and goes up to its end token, that included.
    The pieces are encoded apart at these places, so a decoder given the prompt of the first learned turn sees the very same
    tokens; that of a later one may differ where a tokenizer joins what an earlier cut parts. After the last turn come
    `num_end_tokens - 1` more end tokens; template text after its end (a line end in ChatML) is dropped, for nobody generates it.

    Args:
      messages: `role` and `content` (text) each; the last is the assistant's. A turn with `weight` 0, as OpenAI has it, is not
        learned.
      loss_on_turns: "all" turns of the assistant, or the "last" alone.
      tools: descriptions of functions, for templates that show them.
      variables: of the chat template, before its defaults.

    Raises:
      BadRecord: the conversation does not end with a reply, a learned turn says nothing, a message holds a control token; the
        template reads no such variable or no tools, or leaves out calls, or a message of another role than user and
        assistant; or it changes an earlier turn when later ones follow (as templates do that take out its thinking), so that
        what is learned is not what was said.
      UserError: a tokenizer without template or end token.
    """
    _require_template(tokenizer)
    end = end_token_id(tokenizer)
    turns = _learned_turns(messages, loss_on_turns)
    beside = _beside(tokenizer, tools, variables)
    _check_control_tokens(messages, tokenizer, beside)
    for number in turns:
        if not messages[number]["content"].strip() and not messages[number].get("tool_calls"):
            raise BadRecord(f"message {number}: the assistant's turn is empty, so there is nothing to learn")
        if number == 0:
            raise BadRecord(
                "message 0: a turn of the assistant's that answers nobody; give it weight 0, so that it is read and not learned, "
                "or take it out"
            )
    whole = _render(tokenizer, messages, beside, generation_prompt=False)
    _check_written(whole, tokenizer, messages, beside, generation_prompt=False)
    tokens: list[int] = []
    learned: list[bool] = []
    done = 0  # characters of `whole` that are tokens already
    for number in turns:
        start, stop = _reply_span(whole, done, tokenizer, messages, number, beside)
        for at, to, is_learned in ((done, start, False), (start, stop, True)):
            ids = encode_behind(tokenizer, whole[:at], whole[at:to], control_tokens=True)
            tokens += ids
            learned += [is_learned] * len(ids)
        tokens.append(end)
        learned.append(True)
        done = stop + len(str(tokenizer.eos_token))
    extra = max(num_end_tokens - 1, 0)
    return Example(
        np.array([*tokens, *[end] * extra], np.int32), np.array([*learned, *[True] * extra], bool), document_id
    )


def _reply_span(
    whole: str,
    done: int,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    number: int,
    beside: Variables,
) -> tuple[int, int]:
    """Where in the whole conversation a learned turn starts, behind its prompt, and where its end token does.

    Args:
      done: where the turn before ends.

    Raises:
      BadRecord: as `from_messages`.
    """
    prompt = _render(tokenizer, messages[:number], beside, generation_prompt=True)
    if not whole.startswith(prompt) or len(prompt) < done:
        mend = "data.loss_on_turns=each or last may do, or a template that takes no thinking out of earlier turns"
        if messages[number - 1]["role"] == "assistant":
            mend = "join it with the turn before, which is the assistant's too"
        raise BadRecord(
            f"message {number}: the chat template's prompt for this turn is no prefix of the whole conversation, so the "
            f"learned part is unknown; {mend}"
        )
    stop = whole.find(str(tokenizer.eos_token), len(prompt))
    if stop < 0:
        raise BadRecord(
            f"message {number}: the chat template does not end the assistant's turn with {tokenizer.eos_token!r}; "
            "name the token that ends a turn as data.end_token"
        )
    before = _render(tokenizer, messages[:number], beside, generation_prompt=False)
    begins = (
        len(before) if prompt.startswith(before) else len(prompt)
    )  # a prompt may open the thinking, as Qwen3-Thinking's
    if not _holds(_squeezed(whole[begins:stop]), messages[number]):
        raise BadRecord(
            f"message {number}: the chat template leaves out some of this turn, such as its thinking, so it would "
            "be learned without; take it out of the record, or data.loss_on_turns=each or last"
        )
    if _reaches_further(whole[:stop], len(prompt), tokenizer, messages, number, beside):
        raise BadRecord(
            f"message {number}: the chat template does not end this turn with {tokenizer.eos_token!r}, which comes only "
            "after a later message, so that would be learned too; name the token that ends every turn as data.end_token, "
            "or give this one weight 0"
        )
    return len(prompt), stop


def up_to_each_turn(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation up to each of the assistant's turns that is learned, that included: with `loss_on_turns="last"` every turn
    is then learned behind the very prompt that a decoder is given, also where a template writes it otherwise once others follow.

    Raises:
      BadRecord: the conversation does not end with a reply, or all of its turns have weight 0.
    """
    return [[*messages[: number + 1]] for number in _learned_turns(messages, "all")]


def _learned_turns(messages: Sequence[Message], loss_on_turns: Literal["all", "last"]) -> list[int]:
    if not messages or messages[-1]["role"] != "assistant":
        raise BadRecord("the last message must be the assistant's; add its reply")
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [number for number in turns[-1 if loss_on_turns == "last" else 0 :] if messages[number].get("weight", 1)]
    if not turns:
        raise BadRecord("every turn that could be learned has weight 0; leave the record out")
    return turns


def prompt_of(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any] | None = None,
    variables: Variables = NO_VARIABLES,
) -> list[int]:
    """Token ids of the prompt for the last reply of a conversation, as a decoder is given them; of one that ends without a
    reply, for the next one.

    Raises:
      BadRecord: no message is left, a message holds a control token, or as `write_prompt`.
      UserError: a tokenizer without template.
    """
    before = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not before:
        raise BadRecord("nothing is before the reply, so there is no prompt")
    prompt = write_prompt(before, tokenizer, tools, variables)
    _check_control_tokens(before, tokenizer, _beside(tokenizer, tools, variables))
    return encode_with_control_tokens(tokenizer, prompt)


def write_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any] | None,
    variables: Variables,
    require: Callable[[str], None] = lambda text: None,
) -> str:
    """A conversation as the chat template writes it, up to where the next reply begins.

    Args:
      require: is given the text, and may raise, before that is searched for what the template left out: of a very long one this
        takes minutes.

    Raises:
      BadRecord: the template refuses it, leaves a message or a call out, or reads no such variable or no tools.
      UserError: a tokenizer without template.
    """
    _require_template(tokenizer)
    beside = _beside(tokenizer, tools, variables)
    prompt = _render(tokenizer, messages, beside, generation_prompt=True)
    require(prompt)
    _check_written(prompt, tokenizer, messages, beside, generation_prompt=True)
    return prompt


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UnfitTokenizer(
            "the tokenizer has no chat template, which conversations need; add one to its tokenizer_config.json, name a "
            "tokenizer that has one as tokenizer.path, or set data.plain_prompt=true if the data are prompts and completions"
        )


def _beside(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] | None, variables: Variables) -> Variables:
    try:
        return beside_messages(tokenizer, tools, variables)
    except UserError as error:
        raise BadRecord(str(error)) from None


def _check_control_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, beside: Variables) -> None:
    # A directory with a tokenizer.json alone has no special tokens by name.
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    control = [token for token in dict.fromkeys((*tokenizer.all_special_tokens, *added)) if token]
    for place, value in [
        *beside.items(),
        *((f"message {number}", message) for number, message in enumerate(messages)),
    ]:
        found = next((token for text in _strings(value) for token in control if token in text), None)
        if found is not None:
            raise BadRecord(f"{place}: the text holds the control token {found!r}; take it out")


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], beside: Variables, *, generation_prompt: bool
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), **beside, tokenize=False, add_generation_prompt=generation_prompt
            )
        )
    except Exception as error:  # the template is a program of its own, and what it reads is the record's
        raise BadRecord(f"the chat template refuses the conversation ({reason(error)})") from None


def _check_written(
    written: str,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    beside: Variables,
    *,
    generation_prompt: bool,
) -> None:
    """Raises a `BadRecord` where the template passes over a message because of its role, as Qwen's do with a developer's, or over
    the calls of a turn. A text that is not in `written` is not enough: templates escape and shorten. Nor is one that is: tools
    beside the messages have the names of calls. All must come out the same without it."""
    squeezed = _squeezed(written)
    for number, message in enumerate(messages):
        less: list[Message] = []
        if message["role"] == "assistant" and message.get("tool_calls"):
            less = [{key: value for key, value in message.items() if key != "tool_calls"}]
            what = "the calls of this turn; use a template that writes them, or take them and what came of them out"
        elif message["role"] in ("user", "assistant") or _holds(squeezed, message):
            continue
        else:
            what = (
                f"messages of the role {message['role']!r}; give it a role that the template writes, such as system, or take "
                "it out"
            )
        others = [*messages[:number], *less, *messages[number + 1 :]]
        try:
            passed_over = _render(tokenizer, others, beside, generation_prompt=generation_prompt) == written
        except BadRecord:  # the template needs it
            continue
        if passed_over:
            raise BadRecord(f"message {number}: the chat template leaves out {what}")


def _squeezed(text: str) -> str:
    """Without white space, which templates move."""
    return "".join(text.split())


def _holds(squeezed: str, message: Message) -> bool:
    """Whether all that the message says is in a squeezed text; templates may add to it."""
    return all(_squeezed(text) in squeezed for text in (*_texts(message), *_called(message)))


def _reaches_further(
    written: str,
    start: int,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    number: int,
    beside: Variables,
) -> bool:
    """Whether what is `written` of turn `number`, from `start` on, has something of the message after it: it then comes out
    otherwise where that message says something else."""
    if number + 1 == len(messages) or written[start:].strip() == messages[number]["content"].strip():
        return False
    said = messages[number + 1]["content"]
    half = len(said) // 2  # in its midst: templates read how a text begins and ends
    other = {**messages[number + 1], "content": f"{said[:half]}{_SOMETHING_ELSE}{said[half:]}"}
    try:
        whole = _render(
            tokenizer, [*messages[: number + 1], other, *messages[number + 2 :]], beside, generation_prompt=False
        )
    except BadRecord:  # the template reads that message as something else than text
        return False
    return not whole.startswith(written)


def _strings(value: Any) -> Iterator[str]:
    """All text in lists and objects, such as the arguments of a call."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (*_strings(key), *_strings(one))
    elif isinstance(value, Sequence):
        for one in value:
            yield from _strings(one)


def _texts(message: Message) -> list[str]:
    return [text for text in map(message.get, ("content", *_THINKING)) if isinstance(text, str)]


def _called(message: Message) -> list[str]:
    """The names of the functions that it calls; `tool_calls` has them within `function`, as at OpenAI, or bare."""
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]
    return [function["name"] for function in functions if isinstance(function.get("name"), str)]
