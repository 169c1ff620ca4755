"""A conversation's tokens: each turn begins with the tokens of the turns before it, as the model saw and chose them."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest

from wedlm_jax import DecodeConfig, Model
from wedlm_jax.chat.conversation import Conversation
from wedlm_jax.data.tokenizer import encode_behind
from wedlm_jax.decode.prompts import Verbatim, encode_prompt
from wedlm_jax.errors import UserError

from ..data.tiny import sentencepiece
from ..decode.models import TINY
from ..decode.test_stream import TEXT, reciter, settings, tokenizer
from ..engine.models import engine


def with_template(template: str | None):
    model = reciter(TEXT, end=True)
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.chat_template = template
    return model


def answered(model, prompt: list[int], **fields):
    ticket = engine(model).submit(prompt[:1], settings("ar", **fields))
    ticket.result()
    ticket.request = ticket.request._replace(prompt=prompt)  # a reciter starts at position 1
    return ticket


def test_a_turn_begins_with_the_tokens_of_those_before_and_reads_as_the_template_writes_it():
    model = reciter(TEXT, end=True)
    said = Conversation(model, system="be brief")
    first = said.prompt("hey")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hey"}]
    assert first == encode_prompt(model, messages)
    ticket = answered(model, first)
    said.add("hey", ticket)
    second = said.prompt("and?")
    messages += [{"role": "assistant", "content": ticket.completion.text}, {"role": "user", "content": "and?"}]
    assert tokenizer().decode(second) == tokenizer().decode(encode_prompt(model, messages))
    answer = ticket.completion.ids
    assert second[: len(first) + len(answer)] == first + answer  # the stop id too: the template writes it
    said.reset()
    assert said.prompt("hey") == first


def test_an_answer_that_was_split_otherwise_keeps_the_tokens_that_the_model_chose():
    model = reciter("", end=True)
    whole = model.tokenizer.encode("x")
    said, ticket = Conversation(model), answered(model, Conversation(model).prompt("hey"))
    other = [*whole, tokenizer().eos_token_id]
    ticket.completion = dataclasses.replace(ticket.completion, ids=other, text="x")
    said.add("hey", ticket)
    assert said.prompt("more")[len(ticket.request.prompt) :][: len(other)] == other


def test_where_the_template_rewrites_earlier_turns_the_whole_is_encoded_anew():
    last_alone = "{% for m in messages[-1:] %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    model = with_template(last_alone)
    said = Conversation(model)
    said.add("hey", answered(model, said.prompt("hey")))
    assert tokenizer().decode(said.prompt("more")) == "<|im_start|>more<|im_end|>"


def test_an_answer_cut_at_a_stop_string_goes_on_without_it():
    model = reciter("so ENDED", end=True)
    said = Conversation(model)
    said.add("hey", answered(model, said.prompt("hey"), stop=("END",)))
    assert "so <|im_end|>" in tokenizer().decode(said.prompt("more")) and "END" not in tokenizer().decode(
        said.prompt("more")
    )


def test_plain_turns_stand_below_each_other():
    model = with_template(None)
    said = Conversation(model, plain=True)
    assert tokenizer().decode(said.prompt("once")) == "once"
    said.add("once", answered(model, said.prompt("once")))
    assert tokenizer().decode(said.prompt("more")) == f"once{TEXT}\nmore"


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}</s>{% endfor %}"])
def test_a_further_turn_of_sentencepiece_has_no_space_of_the_tokenizers_own(template):
    spoken = copy.deepcopy(sentencepiece())
    spoken.chat_template = template
    model = Model(None, dataclasses.replace(TINY, vocab_size=len(spoken)), spoken)  # type: ignore[arg-type]
    said = Conversation(model, plain=template is None)
    first, reply = said.prompt("tea at ten"), "\na rare treat"
    ids = encode_behind(spoken, "ten" if template is None else "</s>", reply, control_tokens=True)
    request = SimpleNamespace(prompt=first, config=DecodeConfig(stop_ids=(spoken.eos_token_id,)))
    said.add("tea at ten", SimpleNamespace(completion=SimpleNamespace(ids=ids, text=reply), request=request))
    whole = "tea at ten\na rare treat\neat" if template is None else "tea at ten</s>\na rare treat</s>eat</s>"
    assert said.prompt("eat") == encode_prompt(model, Verbatim(whole))
    with pytest.raises(UserError, match="is half of a character"):
        said.prompt("\ud83d")


@pytest.mark.parametrize(
    "model, options, complaint",
    [
        (with_template(None), {}, "no chat template.*--plain"),
        (with_template(None), dict(plain=True, system="x"), "--system needs the chat template"),
        (dataclasses.replace(with_template(None), tokenizer=None), dict(plain=True), "no tokenizer"),
    ],
)
def test_what_cannot_be_is_said_at_once(model, options, complaint):
    with pytest.raises(UserError, match=complaint):
        Conversation(model, **options)
