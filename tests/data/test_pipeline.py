"""The stream of batches: deterministic, restartable, endless, with an id of its own for every example."""

import dataclasses
import json

import numpy as np
import pytest

from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.quickstart_tasks import split_of
from wedlm_jax.data.tokenizer import TokenizerConfig
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError

CONFIG = DataConfig(row_length=128, num_problems=60)
TOKENIZER = make_tokenizer(TokenizerConfig(), DataConfig())


def stream(seed=0, split="train", config=CONFIG, batch_size=4):
    return batches(config, TOKENIZER, block_size=8, batch_size=batch_size, seed=seed, split=split)


def examples(config, tokenizer, seed, split):
    """The stream's documents of one piece each, by index."""
    documents = Documents(config, tokenizer, seed, split)

    class Pieces:
        def __getitem__(self, index):
            (example,) = documents[index].examples
            return example

    return Pieces()


def equal(one, two):
    return all(np.array_equal(a, b) for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True))


def documents(batch):
    """document id -> its tokens."""
    real = batch.segment_ids > 0
    return {int(i): batch.tokens[real & (batch.document_ids == i)] for i in np.unique(batch.document_ids[real])}


def test_one_seed_gives_one_stream_and_another_seed_another():
    one, two, other = stream(0), stream(0), stream(1)
    for _ in range(5):
        batch = next(one)
        assert equal(batch, next(two)) and not equal(batch, next(other))


def test_a_state_through_json_goes_on_with_the_very_next_batch():
    uninterrupted, saved = stream(), stream()
    for _ in range(7):
        next(uninterrupted), next(saved)
    state = json.loads(json.dumps(saved.get_state()))
    restored = stream()
    restored.set_state(state)
    for _ in range(7):
        assert equal(next(uninterrupted), next(restored))


def test_every_example_of_the_stream_arrives_once_and_in_full():
    iterator, seen = stream(), {}
    while len(seen) < 150:  # past the end of the first two epochs of 60
        batch = documents(next(iterator))
        assert not seen.keys() & batch.keys()
        seen |= batch
    assert sorted(seen) == list(range(len(seen)))
    source = examples(CONFIG, TOKENIZER, 0, "train")
    for index, tokens in seen.items():
        np.testing.assert_array_equal(tokens, source[index].tokens)


def test_epochs_hold_the_same_examples_in_another_order():
    source = examples(CONFIG, TOKENIZER, 0, "train")
    first, second = ([source[epoch * 60 + i].tokens.tobytes() for i in range(60)] for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second)


def test_the_batch_size_changes_the_packing_but_no_document_and_no_id():
    small, large = stream(batch_size=2), stream(batch_size=8)
    first, second = {}, {}
    for _ in range(8):
        first |= documents(next(small))
    for _ in range(2):
        second |= documents(next(large))
    shared = first.keys() & second.keys()
    assert len(shared) > 10
    for index in shared:
        np.testing.assert_array_equal(first[index], second[index])


def test_training_batches_hold_no_held_out_prompt():
    for split in ("train", "held_out"):
        source = examples(CONFIG, TOKENIZER, 0, split)
        for index in range(60):
            example = source[index]
            assert split_of(TOKENIZER.decode(example.tokens[~example.loss_mask])) == split


def test_code_is_cut_into_documents_without_loss(tmp_path):
    for name in range(40):
        (tmp_path / f"module_{name}.py").write_text(f"def f{name}(x):\n    return x + {name}\n" * 30)
    config = DataConfig(source="stdlib_code", path=str(tmp_path), row_length=64)
    tokenizer = make_tokenizer(TokenizerConfig(vocab_size=300), config)
    texts = set()
    for split in ("train", "held_out"):
        source = examples(config, tokenizer, 0, split)
        iterator = batches(config, tokenizer, 16, 2, 0, split)
        assert next(iterator).loss_mask.sum() > 64
        for index in range(200):
            assert 1 <= len(source[index].tokens) <= 64 and source[index].loss_mask.all()
            texts.add((split, tokenizer.decode(source[index].tokens)))
    assert {split for split, _ in texts} == {"train", "held_out"}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"row_length": 0}, "data.row_length=0 must be at least 1"),
        ({"num_problems": 0}, "data.num_problems=0 must be at least 1"),
        ({"num_end_tokens": 0}, "data.num_end_tokens=0 must be at least 1"),
        ({"path": "code"}, "data.path is set, but data.source=quickstart_tasks does not read it"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(change, message):
    with pytest.raises(UserError, match=message):
        stream(config=dataclasses.replace(CONFIG, **change))
