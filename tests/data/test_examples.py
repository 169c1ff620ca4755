"""What is learned of an example: the completion and its end tokens, never the prompt."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.tiny import sentence, sentencepiece, with_bos
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.examples import (
    check_mask,
    end_token_id,
    from_completion,
    from_tokens,
    label_completion,
    pieces_of_text,
)
from wedlm_jax.data.packing import pack
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.tokenizer import TokenizerConfig, decoder_behind, encode_text
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError

TOKENIZER = make_tokenizer(TokenizerConfig(), DataConfig())
END = TOKENIZER.eos_token_id
ORACLE = json.loads((Path(__file__).parents[1] / "fixtures" / "oracle" / "packing.json").read_text())


def labels(example):
    return np.where(example.loss_mask, example.tokens, -100).tolist()


@pytest.mark.parametrize("case", ORACLE["labels"])
def test_labels_equal_the_official_ones(case):
    """The official code cuts a conversation to its maximal length first; we get the cut one here, and never cut."""
    tokens = case["full_ids"][: case["max_seq_length"] - max(case["num_learnable_im_end"] - 1, 0)]
    prompt_length = len(tokens) if case["prompt_ids"] is None else min(len(case["prompt_ids"]), len(tokens))
    example = label_completion(
        tokens, prompt_length, num_end_tokens=case["num_learnable_im_end"], end_token_id=case["im_end_id"]
    )
    assert example.tokens.tolist() == case["input_ids"]
    assert labels(example) == case["labels"]


@pytest.mark.parametrize("case", ORACLE["packing"])
def test_unlike_the_official_packing_no_sample_is_cut_or_dropped(case):
    """A known difference: samples longer than a row are an error, all others arrive whole."""
    length = case["batch_seq_length"]
    examples = [
        label_completion(
            sample["input_ids"], sum(label == -100 for label in sample["labels"]), num_end_tokens=0, end_token_id=0
        )
        for sample in case["samples"]
        if len(sample["input_ids"]) <= length
    ]
    tokens, done = 0, 0
    while done < len(examples):
        batch, count = pack(examples[done:], num_rows=1, row_length=length, block_size=1, pad_token_id=0)
        done += count
        tokens += int((batch.segment_ids > 0).sum())
    assert tokens == sum(len(example.tokens) for example in examples)
    if any(len(sample["input_ids"]) > length for sample in case["samples"]):
        with pytest.raises(UserError, match="nothing is cut silently"):
            long = next(sample for sample in case["samples"] if len(sample["input_ids"]) > length)
            pack([from_tokens(long["input_ids"])], num_rows=1, row_length=length, block_size=1, pad_token_id=0)


@pytest.mark.parametrize("num_end_tokens", [1, 4, 8])
def test_a_completion_is_learned_with_its_end_tokens_and_the_prompt_is_what_a_decoder_is_given(num_end_tokens):
    example = from_completion("Q: Tom. A:", " Ben", TOKENIZER, num_end_tokens=num_end_tokens, document_id=5)
    prompt = example.tokens[~example.loss_mask]
    assert TOKENIZER.decode(prompt) == "Q: Tom. A:"
    learned = example.tokens[example.loss_mask].tolist()
    assert TOKENIZER.decode(learned[:-num_end_tokens]) == " Ben" and learned[-num_end_tokens:] == [END] * num_end_tokens
    assert example.loss_mask.tolist() == sorted(example.loss_mask.tolist()) and example.document_id == 5


def test_a_plain_prompt_is_read_as_a_decoder_reads_it():
    """Also where it is a conversation that a template has written already."""
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    example = from_completion(prompt, "a<|im_end|>b", TOKENIZER, num_end_tokens=1)
    end = TOKENIZER.eos_token_id
    asked, learned = example.tokens[~example.loss_mask].tolist(), example.tokens[example.loss_mask].tolist()
    assert asked == TOKENIZER(prompt)["input_ids"] and asked.count(end) == 1
    assert learned.count(end) == 1 == learned[::-1].index(end) + 1  # what is learned is text, but for its end


@pytest.mark.parametrize("reply", ["tee", " tee", "  tee a", "a"])
def test_a_reply_is_learned_with_its_own_spaces_alone(reply):
    """A tokenizer of SentencePiece's kind puts one before every text."""
    kind = sentencepiece()
    example = from_completion("tee:\n", reply, kind, num_end_tokens=1)
    assert decoder_behind(kind)(example.tokens[example.loss_mask][:-1].tolist()) == reply


def test_all_of_a_plain_text_is_learned():
    assert labels(from_tokens([5, 6, 7])) == [5, 6, 7]


def test_every_text_of_a_tokenizer_with_a_bos_begins_with_it_in_pieces_that_fill_a_row():
    tokenizer = with_bos()
    bos, end = tokenizer.bos_token_id, end_token_id(tokenizer)
    text = " ".join(sentence(number) for number in range(4))
    ids = encode_text(tokenizer, text)
    pieces = pieces_of_text(text, tokenizer, 8)
    assert [len(piece) for piece in pieces[:-1]] == [8] * (len(ids) // 7) and len(pieces[-1]) <= 8
    assert all(piece[0] == bos for piece in pieces)
    assert np.concatenate([piece[1:] for piece in pieces]).tolist() == [*ids, end]
    assert pieces_of_text(text, TOKENIZER, 8, ends=False)[0].tolist() == encode_text(TOKENIZER, text)[:8]


def test_the_prompt_of_a_completion_begins_as_a_decoder_begins_it():
    tokenizer = with_bos()
    example = from_completion("one red", " bird", tokenizer, num_end_tokens=1)
    prompt = tokenizer("one red")["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id
    assert example.tokens[: len(prompt)].tolist() == prompt and not example.loss_mask[: len(prompt)].any()
    assert tokenizer.bos_token_id not in example.tokens[1:]


def test_an_empty_prompt_is_none_whatever_its_tokenizer_begins_texts_with():
    for tokenizer in (TOKENIZER, with_bos()):
        with pytest.raises(BadRecord, match="no token of it is prompt"):
            check_mask(from_completion("", "bird", tokenizer, num_end_tokens=1))
