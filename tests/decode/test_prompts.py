"""A prompt of messages may be an object, with tools and variables of the chat template beside them, as in training data."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest

from tests.data.test_chat import ASSISTANT, END, QWEN3_STYLE, USER, messages
from tests.data.test_sources import WITH_TOOLS
from tests.data.tiny import with_bos
from tests.evals.models import tiny_model
from wedlm_jax import DecodeConfig, generate
from wedlm_jax.chat.conversation import Conversation
from wedlm_jax.data.chat import prompt_of
from wedlm_jax.data.columns import read_record
from wedlm_jax.data.config import DataConfig
from wedlm_jax.decode.prompt_file import read_prompts
from wedlm_jax.decode.prompts import encode_prompt, prompt_text
from wedlm_jax.errors import UserError
from wedlm_jax.model.handle import Model
from wedlm_jax.serve.asked import read_asked

ASKED = messages("the cat")
TEMPLATE = "{% for tool in tools or [] %}{{ tool.name }}: {% endfor %}" + QWEN3_STYLE
TOOLS, VARIABLES = [{"name": "look"}], {"enable_thinking": False}


def with_template(template: str) -> Model:
    tokenizer = copy.deepcopy(tiny_model().tokenizer)
    tokenizer.chat_template = template
    return dataclasses.replace(tiny_model(), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model() -> Model:
    return with_template(TEMPLATE)


@pytest.mark.parametrize(
    ("beside", "start", "end"),
    [
        ({}, "", ""),
        ({"tools": None, "chat_template_kwargs": None}, "", ""),
        ({"tools": TOOLS}, "look: ", ""),
        ({"chat_template_kwargs": VARIABLES}, "", "<think>\n\n</think>\n\n"),
        ({"tools": TOOLS, "chat_template_kwargs": VARIABLES}, "look: ", "<think>\n\n</think>\n\n"),
    ],
)
def test_what_is_beside_messages_reaches_the_template_as_in_training(model, tmp_path, beside, start, end):
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": ASKED, **beside}) + "\n")
    ((name, read),) = read_prompts(tmp_path / "in.jsonl")
    for prompt in (read, {"messages": ASKED, **beside}):
        text = prompt_text(model, prompt, name)
        assert text == f"{start}{USER}the cat{END}\n{ASSISTANT}{end}"
        expected = prompt_of(ASKED, model.tokenizer, beside.get("tools"), beside.get("chat_template_kwargs") or {})
        (completion,) = generate(model, [prompt], DecodeConfig("ar", max_new_tokens=1))
        (same,) = generate(model, [expected], DecodeConfig("ar", max_new_tokens=1))
        assert completion.ids == same.ids
        assert encode_prompt(model, prompt) == model.tokenizer(text)["input_ids"] == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"messages": ASKED, "answer": "5"}, "prompt: unknown key 'answer'; beside messages there may be tools and chat_"),
        ({"tools": TOOLS}, "prompt: messages must be a list of messages, not None"),
        ({"messages": []}, "prompt: messages must be a list of messages, not []"),
        ({"messages": "cat"}, "prompt: messages must be a list of messages, not 'cat'"),
        ({"messages": ASKED, "tools": {}}, "prompt: tools must be a list, not {}"),
        ({"messages": ASKED, "chat_template_kwargs": [1]}, "prompt: chat_template_kwargs must be an object, not [1]"),
        ({"messages": ASKED, "chat_template_kwargs": {"mood": 1}}, "prompt: chat_template_kwargs: the tokenizer's chat temp"),
    ],
)  # fmt: skip
def test_what_is_wrong_beside_messages_is_named(model, prompt, message):
    with pytest.raises(UserError) as told:
        encode_prompt(model, prompt)
    assert str(told.value).startswith(message)


def test_tools_that_a_template_does_not_show_are_refused():
    with pytest.raises(UserError, match="prompt: tools: the tokenizer's chat template shows none; leave them out"):
        encode_prompt(with_template(QWEN3_STYLE), {"messages": ASKED, "tools": TOOLS})


def test_messages_of_lines_of_python_and_of_requests_are_read_as_training_data(tmp_path):
    """OpenAI writes no content beside a call, its arguments as text, and a content in parts; ShareGPT names things otherwise."""
    model = with_template(WITH_TOOLS)
    call = {"function": {"name": "look", "arguments": '{"at": "lake"}'}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"from": "observation", "value": "a mat"},
    ]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    ((_, line),) = read_prompts(tmp_path / "in.jsonl")
    (request,) = read_asked({"messages": turns}, DecodeConfig("ar"), chat=True).prompts
    record = read_record({"messages": turns}, DataConfig(source="chat", path="x"))
    expected = prompt_of(record.messages, model.tokenizer)
    assert '"arguments": {"at": "lake"}' in model.tokenizer.decode(expected).replace(" :", ":")
    assert encode_prompt(model, turns) == encode_prompt(model, line) == encode_prompt(model, request) == expected


def test_a_message_that_the_template_passes_over_is_refused():
    """As Qwen's templates do with a developer's, the role that OpenAI's clients have for system."""
    knows = "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="message 0: the chat template leaves out messages of the role .developer."):
        encode_prompt(with_template(knows), [{"role": "developer", "content": "be kind"}, *ASKED])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "cat", "tools": TOOLS}, "unknown key 'tools'"),
        ({"tools": TOOLS}, "unknown key 'tools'"),
        ({"messages": ASKED, "prompt": "cat", "tools": TOOLS}, "has messages and prompt"),
    ],
)
def test_nothing_is_beside_a_prompt_of_another_kind(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=f"in.jsonl:1: {message}"):
        read_prompts(tmp_path / "in.jsonl")


def test_a_text_begins_as_its_tokenizer_begins_texts_and_what_a_template_wrote_does_not():
    tokenizer = with_bos()
    model = dataclasses.replace(tiny_model(), tokenizer=tokenizer)
    bos = tokenizer.bos_token_id
    model.config = dataclasses.replace(model.config, vocab_size=max(model.config.vocab_size, bos + 1))
    ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert encode_prompt(model, "the cat") == tokenizer("the cat")["input_ids"] == [bos, *ids]
    assert encode_prompt(model, "<s>the cat") == [bos, *ids]  # it is there
    assert encode_prompt(model, ids) == ids
    as_messages = encode_prompt(model, ASKED)
    assert bos not in as_messages
    assert encode_prompt(model, prompt_text(model, ASKED, "prompt")) == as_messages
    with pytest.raises(UserError, match="empty"):
        encode_prompt(model, "")


def test_a_plain_chat_begins_once():
    tokenizer = with_bos()
    model = dataclasses.replace(tiny_model(), tokenizer=tokenizer)
    model.config = dataclasses.replace(model.config, vocab_size=max(model.config.vocab_size, len(tokenizer)))
    chat = Conversation(model, plain=True)
    first = chat.prompt("the cat")
    (completion,) = generate(tiny_model(), [[5, 6]], DecodeConfig("ar", max_new_tokens=2))
    request = SimpleNamespace(prompt=first, config=DecodeConfig("ar"))
    chat.add("the cat", SimpleNamespace(completion=completion, request=request))
    assert first[0] == tokenizer.bos_token_id and chat.prompt("a mat").count(tokenizer.bos_token_id) == 1
