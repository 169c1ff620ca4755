"""What a client asks becomes prompts and settings, or one line that names the field."""

from __future__ import annotations

import dataclasses
import math

import pytest

from wedlm_jax.errors import UserError
from wedlm_jax.serve.asked import IDLE, LIMITS, SETTINGS, read_asked

from .client import DEFAULTS


def settings(chat: bool = False, **fields):
    """What a request changes of the command's settings."""
    prompt = {"messages": [{"role": "user", "content": "Tom"}]} if chat else {"prompt": "Tom"}
    config = read_asked({**prompt, **fields}, DEFAULTS, chat=chat).config
    before = dataclasses.asdict(DEFAULTS)
    return {name: value for name, value in dataclasses.asdict(config).items() if value != before[name]}


@pytest.mark.parametrize(
    "fields, changed",
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        ({"stop": "\n"}, {"stop": ("\n",)}),
        ({"stop": ["\n", "Q:"]}, {"stop": ("\n", "Q:")}),
        ({"decoder": "streaming", "entropy_threshold": 0.6}, {"decoder": "streaming", "entropy_threshold": 0.6}),
        ({"entropy_threshold": "inf"}, {"entropy_threshold": math.inf}),
        ({"entropy_threshold": "none"}, {"entropy_threshold": None}),
        ({"stop_ids": [3]}, {"stop_ids": (3,)}),
        ({"temperature": None, "stop": None, "tools": None, "model": "x", "user": "me"}, {}),
        ({"stream_options": {"include_usage": None, "include_obfuscation": True, "continuous_usage_stats": False}}, {}),
        ({"prompt_cache_key": "mine", "prompt_cache_retention": "24h", "metadata": {"of": "mine"}}, {}),
        ({"top_k": -1}, {}),
        ({"presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "tools": [], "logit_bias": {}}, {}),
        ({"stop_token_ids": [], "ignore_eos": False}, {}),
        ({"ignore_eos": True, "stop": None}, {"stop_ids": ()}),
        ({"ignore_eos": True, "stop_ids": [3]}, {"stop_ids": (3,)}),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_a_field_is_the_setting_of_its_name(chat, fields, changed):
    assert settings(chat, seed=0, **fields) == changed


def test_a_seed_that_is_left_out_is_another_one_each_time():
    assert len({settings()["seed"] for _ in range(5)}) > 1
    assert settings(seed=7) == {"seed": 7}


@pytest.mark.parametrize("seed, drawn", [(2**31, 2**31), (2**63 - 1, 2**63 - 1), (-2, 2**63 - 2), (-(2**63), 0)])
def test_a_seed_may_have_64_bits(seed, drawn):
    assert settings(seed=seed).get("seed", 0) == drawn


def test_minus_one_is_off_and_no_seed_as_at_other_servers():
    defaults = dataclasses.replace(DEFAULTS, top_k=5)
    assert read_asked({"prompt": "Tom", "top_k": -1}, defaults, chat=False).config.top_k == 0
    assert len({settings(seed=-1)["seed"] for _ in range(5)}) > 1


def test_the_fallback_of_the_command_is_left_to_streaming():
    defaults = dataclasses.replace(DEFAULTS, decoder="streaming", verify="fallback")
    assert read_asked({"prompt": "Tom"}, defaults, chat=False).config.verify == "fallback"
    assert read_asked({"prompt": "Tom", "decoder": "ar"}, defaults, chat=False).config.verify == "none"


@pytest.mark.parametrize("prompt, prompts", [
    ("Tom", ["Tom"]), (["Tom", "Anna"], ["Tom", "Anna"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]]),
])  # fmt: skip
def test_prompts_are_text_or_ids_or_lists_of_them(prompt, prompts):
    assert read_asked({"prompt": prompt}, DEFAULTS, chat=False).prompts == prompts


def test_variables_of_the_chat_template_are_no_setting():
    said = {
        "messages": [{"role": "user", "content": "Tom"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "seed": 0,
    }
    (prompt,) = read_asked(said, DEFAULTS, chat=True).prompts
    assert prompt == {"messages": said["messages"], "chat_template_kwargs": {"enable_thinking": False}}
    assert settings(chat=True, seed=0, chat_template_kwargs={"enable_thinking": False}) == {}


@pytest.mark.parametrize(
    "chat, body, complaint",
    [
        (False, [], "the body must be a JSON object"),
        (False, {}, "prompt=None: must be text"),
        (False, {"prompt": []}, r"prompt=\[\]: must be text"),
        (False, {"prompt": ["Tom", 5]}, "prompt=.*: must be text"),
        # They would be written and encoded however long they are.
        (False, {"prompt": [[{"role": "user", "content": "Tom"}]]}, "prompt=.*; messages go to /v1/chat/completions"),
        (False, {"prompt": "Tom", "messages": []}, "'messages': no such field"),
        (False, {"prompt": "Tom", "temprature": 1}, "'temprature': no such field"),
        (False, {"prompt": "Tom", "n": 0}, "n=0"),
        (False, {"prompt": "Tom", "n": "2"}, "n='2'"),
        (False, {"prompt": "Tom", "stream": 1}, "stream=1: must be true or false"),
        (False, {"prompt": "Tom", "stream_options": True}, "stream_options=True: must be an object"),
        (
            False,
            {"prompt": "Tom", "stream_options": {"include_usag": True}},
            "stream_options.include_usag=True: is not done here; leave it out",
        ),
        (False, {"prompt": "Tom", "max_tokens": 0}, "max_tokens=0"),
        (False, {"prompt": "Tom", "max_tokens": False, "echo": True}, "max_tokens=False"),
        (True, {"messages": [{"role": "user"}], "max_tokens": 0}, "max_tokens=0"),
        (False, {"prompt": "Tom", "top_k": -2}, "top_k=-2"),
        (False, {"prompt": "Tom", "seed": True}, "seed=True"),
        (False, {"prompt": "Tom", "seed": 2**63}, "seed=9223372036854775808: must fit in 64 bits"),
        (
            False,
            {"prompt": "Tom", "max_tokens": 1, "max_new_tokens": 1},
            "max_tokens and max_new_tokens: are names of one",
        ),
        (False, {"prompt": "Tom", "temperature": "hot"}, "temperature='?hot"),
        (False, {"prompt": "Tom", "temperature": -1}, "temperature=-1"),
        (False, {"prompt": "Tom", "decoder": ["ar"]}, "decoder="),
        (False, {"prompt": "Tom", "entropy_threshold": [1]}, "entropy_threshold="),
        (False, {"prompt": "Tom", "stop": 5}, "stop=5"),
        (False, {"prompt": "Tom", "temperature": 10**400}, "temperature: is larger than any float"),
        (False, {"prompt": "Tom", "frequency_penalty": 0.5}, "frequency_penalty=0.5: is not done here"),
        (False, {"prompt": "Tom", "logit_bias": {"5": 1}}, "logit_bias=.*: is not done here"),
        (
            False,
            {"prompt": "Tom", "min_tokens": 9},
            "min_tokens=9: is not done here; leave it out; with ignore_eos=true",
        ),
        (False, {"prompt": "Tom", "ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        (
            False,
            {"prompt": "Tom", "stream_options": {"continuous_usage_stats": 1}},
            "continuous_usage_stats=1: must be true or false",
        ),
        (
            False,
            {"prompt": "Tom", "stop_token_ids": [3]},
            r"stop_token_ids=\[3\]: is not done here; give stop_ids, which",
        ),
        (False, {"prompt": "Tom", "logprobs": 5}, "logprobs=5: must be 0, or with echo 1"),
        (False, {"prompt": "Tom", "logprobs": 1}, "logprobs=1: must be 0, or with echo 1"),
        (False, {"prompt": "Tom", "logprobs": True}, "logprobs=True: must be 0"),
        (False, {"prompt": "Tom", "logprobs": 0, "stream": True}, "leave out stream"),
        (False, {"prompt": "Tom", "echo": True, "stream": True}, "leave out stream"),
        (False, {"prompt": "Tom", "logprobs": 0, "decoder": "streaming"}, "logprobs: are of the AR chain"),
        (True, {"messages": "Tom"}, "messages='Tom': must be a list"),
        (True, {"messages": []}, r"messages=\[\]: must be a list"),
        (True, {"messages": [{"role": "user"}], "logprobs": 0}, "logprobs=0: must be true or false"),
        (
            True,
            {"messages": [{"role": "user"}], "logprobs": True, "top_logprobs": 3},
            "top_logprobs=3: is not done here",
        ),
        (
            True,
            {"messages": [{"role": "user"}], "tools": [{"type": "function"}]},
            "tools=.*: is not done here; leave it out: answers are text, and hold no calls",
        ),
        (
            True,
            {"messages": [{"role": "user"}], "tools": [{"type": "function"}], "tool_choice": "required"},
            "tool_choice='required': is not done here; leave it out: answers are text, and hold no calls",
        ),
        (
            True,
            {"messages": [{"role": "user"}], "response_format": {"type": "json_object"}},
            "response_format=.*; leave it out, and ask for it in the prompt: answers are held to no schema",
        ),
        (True, {"messages": [{"role": "user"}], "echo": True}, "'echo': no such field"),
        (False, {"prompt": "Tom", "chat_template_kwargs": {}}, "'chat_template_kwargs': no such field"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(chat, body, complaint):
    with pytest.raises(UserError, match=complaint) as told:
        read_asked(body, DEFAULTS, chat=chat)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("value", ["x" * 10**4, ["x" * 10**4], [[0] * 10**4], {"x" * 10**4: 1}])
def test_no_complaint_repeats_all_that_a_client_sent(value):
    """It is sent back, and a line of the log."""
    for name in (
        *SETTINGS,
        *LIMITS,
        *IDLE,
        "ignore_eos",
        "n",
        "stream",
        "stream_options",
        "return_token_ids",
        "logprobs",
        "echo",
    ):
        if name == "stop" and isinstance(value, str | list):
            continue
        with pytest.raises(UserError, match=name) as told:
            read_asked({"prompt": "Tom", name: value}, DEFAULTS, chat=False)
        assert len(str(told.value)) < 400
