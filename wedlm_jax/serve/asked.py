"""What a client asks: the fields of OpenAI's `completions` and `chat/completions`, as prompts and settings."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from typing import Any

from wedlm_jax.decode.config import DecodeConfig, at_least_one
from wedlm_jax.decode.prompts import Prompt
from wedlm_jax.errors import UserError, shown

SETTINGS = {field.name for field in dataclasses.fields(DecodeConfig)}  # each a field of its own name
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")  # names of one thing
WORDS = {"none": None, "inf": math.inf}  # of entropy_threshold, for which JSON has no numbers
# What no decoder here does, and the values at which it would change nothing.
IDLE: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # there are no tools
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
TEXT_ALONE = "leave it out: answers are text, and hold no calls"
# What does the same, or nearly, for some of them; of what libraries send unasked, as typed outputs do, why it is not to be had.
INSTEAD = {
    "function_call": TEXT_ALONE,
    "functions": TEXT_ALONE,
    "min_tokens": "leave it out; with ignore_eos=true an answer has max_tokens",
    "response_format": "leave it out, and ask for it in the prompt: answers are held to no schema",
    "stop_token_ids": "give stop_ids, which end an answer in the place of the model's own",
    "tool_choice": TEXT_ALONE,
    "tools": TEXT_ALONE,
}
# Names of the client's own, and how long it would have its prompt kept.
UNREAD = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the last would pad events
SEEDS = 1 << 31  # that are drawn; clients may bring any of 64 bits


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request: every prompt is completed `n` times."""

    prompts: list[Prompt]
    config: DecodeConfig
    limited: bool  # whether the client says how many tokens; else the default is cut to what there is room for
    n: int = 1
    stream: bool = False
    counts_usage: bool = False  # a stream ends with an event that counts tokens
    counts_pieces: bool = False  # and the others count those of their choice so far, as at vLLM
    log_probs: bool = False
    echo: bool = False  # the text of an answer begins with the prompt, whose tokens have log-probabilities too
    echo_alone: bool = False  # and ends there; the one token that is decoded is not shown
    token_ids: bool = False


def read_asked(body: Any, defaults: DecodeConfig, *, chat: bool) -> Asked:
    """The request that a JSON body holds.

    A field that is null is one that was left out. What is left out is as in `defaults`, but for the seed, which is another one
    for each request.

    Raises:
      UserError: names the field that is missing, unknown, or asks for what is not done here.
    """
    if not isinstance(body, Mapping):
        raise UserError(f"the body must be a JSON object, not {shown(body)}")
    given = {name: value for name, value in _given(body).items() if name not in (*UNREAD, "model")}
    for name, idle in IDLE.items():
        if (value := given.pop(name, None)) is not None and value not in idle:
            raise UserError(f"{name}={shown(value)}: is not done here; {INSTEAD.get(name, 'leave it out')}")
    n = at_least_one("n", given.pop("n", 1))
    stream, token_ids, ignores_eos = (_flag(given, name) for name in ("stream", "return_token_ids", "ignore_eos"))
    if ignores_eos:  # vLLM's word for no stop ids but those that are given
        given.setdefault("stop_ids", ())
    options = given.pop("stream_options", {})
    if not isinstance(options, Mapping):
        raise UserError(f"stream_options={shown(options)}: must be an object")
    for name, value in options.items():
        if name not in STREAM_OPTIONS and value is not None and value is not False:
            raise UserError(f"stream_options.{name[:80]}={shown(value)}: is not done here; leave it out")
    counts_usage, counts_pieces = (_flag(_given(options), name) for name in STREAM_OPTIONS[:2])
    prompts = [_conversation(given)] if chat else _prompts(given.pop("prompt", None))
    echo = not chat and _flag(given, "echo")
    log_probs = _log_probs(given, chat, echo)
    if stream and (log_probs or echo):
        raise UserError("logprobs and echo: come with whole answers alone; leave out stream")
    limits = {name: given.pop(name) for name in LIMITS if name in given}
    if len(limits) > 1:
        raise UserError(f"{' and '.join(limits)}: are names of one thing; give one of them")
    echo_alone = False
    for name, value in limits.items():
        echo_alone = echo and value == 0 and not isinstance(value, bool)
        given["max_new_tokens"] = 1 if echo_alone else at_least_one(name, value)
    if unknown := [name for name in given if name not in SETTINGS]:
        raise UserError(f"{shown(unknown[0])}: no such field of this request")
    if given.get("top_k") == -1:  # vLLM's word for off
        given["top_k"] = 0
    if given.get("seed") == -1:  # and for none
        del given["seed"]
    settings: dict[str, Any] = {"seed": secrets.randbelow(SEEDS), **given}
    if type(settings["seed"]) is int and -(1 << 63) <= settings["seed"] < 0:  # as OpenAI's may be
        settings["seed"] += 1 << 63
    if isinstance(settings.get("stop"), str):
        settings["stop"] = (settings["stop"],)
    if isinstance(tau := settings.get("entropy_threshold"), str):
        settings["entropy_threshold"] = WORDS.get(tau, tau)
    config = dataclasses.replace(defaults.by(settings.get("decoder", defaults.decoder)), **settings)
    if log_probs and not echo and not config.reads_chain:
        raise UserError(f"logprobs: are of the AR chain, which decoder={config.decoder} does not follow; take verified")
    return Asked(
        prompts, config, bool(limits), n, stream=stream, counts_usage=counts_usage,
        counts_pieces=counts_usage and counts_pieces, log_probs=log_probs, echo=echo, echo_alone=echo_alone,
        token_ids=token_ids,
    )  # fmt: skip


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.pop(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name}={shown(value)}: must be true or false")
    return value


def _log_probs(given: dict[str, Any], chat: bool, echo: bool) -> bool:
    """Whether of the tokens themselves. OpenAI writes true for messages, and for text how many tokens to set beside each: here
    the likeliest, beside those of an echoed prompt, which is what lm-eval asks for."""
    value = given.pop("logprobs", False)
    if value is False or (chat and value is True):
        return value
    if chat or isinstance(value, bool) or value not in ((0, 1) if echo else (0,)):
        asked = "true or false" if chat else "0, or with echo 1: other tokens than the chosen ones are not kept"
        raise UserError(f"logprobs={shown(value)}: must be {asked}")
    return True


def _prompts(prompt: Any) -> list[Prompt]:
    """A prompt or a list of them, each text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_flat(prompt):
            return [prompt]
        if all(isinstance(part, str) or (isinstance(part, list) and _is_flat(part)) for part in prompt):
            return prompt
    raise UserError(
        f"prompt={shown(prompt)}: must be text, token ids, or a list of these; messages go to /v1/chat/completions"
    )


def _is_flat(prompt: list[Any]) -> bool:
    """Whether it may be token ids, which are looked at one by one as the prompt is read."""
    return not any(isinstance(part, (str, list, dict)) for part in prompt)


def _conversation(given: dict[str, Any]) -> Prompt:
    """Messages, and beside them the variables of their template, as at vLLM."""
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise UserError(f'messages={shown(messages)}: must be a list of {{"role": ..., "content": ...}}')
    return {"messages": messages, "chat_template_kwargs": given.pop("chat_template_kwargs", None)}
