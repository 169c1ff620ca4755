"""What decoders wrote as training data: prompts as a decoder is given them, replies as the tokens that they were."""

import numpy as np
import pytest

from tests.data.test_chat import QWEN25_STYLE, of_style
from tests.data.tiny import chat, config_of, sentence, tokenizer, write_lines
from wedlm_jax.data.chat import from_messages, prompt_of
from wedlm_jax.data.config import SelfGenerated
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.examples import end_token_id
from wedlm_jax.data.prompts import leading_prompts
from wedlm_jax.data.records import BadRecord
from wedlm_jax.errors import UserError

END = end_token_id(tokenizer())


def documents_of(path, **fields):
    return Documents(config_of(path, "completions", **fields), tokenizer(), 0, "train")


@pytest.mark.parametrize(("reason", "ends"), [("stop", 3), ("length", 0)])
def test_a_reply_is_learned_token_for_token_and_ends_only_where_it_ended(tmp_path, reason, ends):
    """Further end tokens follow a reply that stopped; one cut by its length says nothing about an end."""
    ids = [9, 8, END] if reason == "stop" else [9, 8, 7]
    path = write_lines(
        tmp_path / "own.jsonl", [{"prompt_ids": [5, 6], "ids": ids, "finish_reason": reason, "text": "x"}]
    )
    (example,) = documents_of(path, num_end_tokens=3)[0].examples
    assert example.tokens.tolist() == [5, 6, *ids, *[END] * max(ends - 1, 0)]
    assert example.loss_mask.tolist() == [False] * 2 + [True] * (len(example.tokens) - 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": []}, "own.jsonl:1: ids is no list of token ids"),
        ({"prompt_ids": ["a"]}, "own.jsonl:1: prompt_ids is no list of token ids"),
        ({"ids": [10**6]}, "own.jsonl:1: token 1000000 at place 2 is none of the tokenizer's"),
        ({"finish_reason": None}, "own.jsonl:1: finish_reason is None, and not stop or length"),
    ],
)
def test_a_bad_record_is_named(tmp_path, change, message):
    path = write_lines(tmp_path / "own.jsonl", [{"prompt_ids": [5, 6], "ids": [7], "finish_reason": "stop"} | change])
    with pytest.raises(BadRecord, match=message):
        documents_of(path)[0]


@pytest.mark.parametrize("turns", [1, 3])
def test_the_prompt_of_a_conversation_is_that_of_its_last_reply(turns):
    """The same whether the reply is there or not, and a prefix of what is learned from it."""
    made, messages = of_style(QWEN25_STYLE), chat(3, turns)["messages"]
    prompt = prompt_of(messages, made)
    assert prompt == prompt_of(messages[:-1], made)
    whole = from_messages(messages, made, num_end_tokens=1, loss_on_turns="last")
    assert prompt == whole.tokens[: int(np.argmax(whole.loss_mask))].tolist()


def test_prompts_are_those_of_the_training_split_in_the_order_of_the_stream(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [chat(number) for number in range(40)])
    config = config_of(path, held_out_share=0.5, self_generated=SelfGenerated())
    prompts = {split: [] for split in ("train", "held_out")}
    for split, found in prompts.items():
        documents = Documents(config, tokenizer(), 7, split)
        examples = [example for index in range(40) for example in documents[index].examples]
        found += [e.tokens[: int(np.argmax(e.loss_mask))].tolist() for e in examples]
    assert 5 < len(prompts["train"]) < 35
    assert [ids.tolist() for ids in leading_prompts(config, tokenizer(), 7)] == prompts["train"]


def test_an_empty_prompt_is_a_bad_record(tmp_path):
    records = [{"prompt": prompt, "completion": "cat"} for prompt in ("", "the")]
    path = write_lines(tmp_path / "plain.jsonl", records)
    fields = dict(plain_prompt=True, self_generated=SelfGenerated())
    with pytest.raises(BadRecord, match="plain.jsonl:1: the prompt is empty"):
        leading_prompts(config_of(path, **fields), tokenizer(), 0)
    assert len(leading_prompts(config_of(path, on_bad_record="skip", **fields), tokenizer(), 0)) == 1


def test_a_prompt_without_room_for_a_reply_is_a_bad_record(tmp_path, capsys):
    path = write_lines(
        tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": sentence(1, 200)}]}, chat(2)]
    )
    fields = dict(row_length=64, self_generated=SelfGenerated())
    with pytest.raises(
        BadRecord, match="chat.jsonl:1: a prompt of .* has no room for a reply .*; raise data.row_length"
    ):
        leading_prompts(config_of(path, **fields), tokenizer(), 0)
    assert len(leading_prompts(config_of(path, on_bad_record="skip", **fields), tokenizer(), 0)) == 1
    assert "warning: data.self_generated: 1 prompts left out, the first: " in capsys.readouterr().err
    write_lines(path, [{"messages": [{"role": "user", "content": sentence(1, 200)}]}])
    with pytest.raises(UserError, match="the training split holds no prompt that can be read"):
        leading_prompts(config_of(path, on_bad_record="skip", **fields), tokenizer(), 0)
