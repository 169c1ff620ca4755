"""A mixture: its shares in every group of rows, every record of a part once an epoch, no part missing silently."""

import itertools
import json

import numpy as np
import pytest

from tests.data.tiny import chat, sentence, stream, tokenizer, write_lines
from wedlm_jax.data.config import DataConfig, WeightedSource
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.split import split_by_hash
from wedlm_jax.errors import UserError

# Where half of all documents are held out, the one is and the other is not.
HELD_OUT, TRAINED = (
    next(chat(n) for n in itertools.count() if split_by_hash(json.dumps(chat(n)).encode(), 0.5) == split)
    for split in ("held_out", "train")
)


def mixture(folder, *counts, **fields):
    """Of long texts and short ones, of about 100 and about 10 tokens, as many documents of one as of the other."""
    parts = []
    for name, count, length in zip(("long", "short"), counts, (90, 4), strict=True):
        texts = [{"text": sentence(number, length)} for number in range(count)]
        parts.append(WeightedSource("text", str(write_lines(folder / f"{name}.jsonl", texts))))
    return DataConfig(source="mixture", mixture=tuple(parts), row_length=128, held_out_share=0.0, **fields)


def test_every_group_has_the_shares_of_the_mixture(tmp_path):
    iterator, long, short = stream(mixture(tmp_path, 30, 30, num_groups=2), batch_size=4), 0, 0
    for _ in range(20):
        batch = next(iterator)
        for row in batch.segment_ids:
            lengths = np.bincount(row)[1:]
            long, short = long + (lengths >= 50).sum(), short + (lengths < 50).sum()
    assert abs(long / (long + short) - 0.5) < 0.05


def drawn_parts(config, split, count, whole=False):
    """Of the first documents of a stream the number of their part; of those of the split alone, or of the `whole`."""
    documents = Documents(config, tokenizer(), 0, split)
    drawn = (documents[index] for index in range(count))
    return [document.part for document in drawn if whole or document.examples]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_part_that_splits_itself_has_its_share_of_either_split(tmp_path, split):
    """Of the other part's documents most are of the training split, and so dropped from the held-out one."""
    path = str(write_lines(tmp_path / "chat.jsonl", [chat(number) for number in range(4000)]))
    parts = (WeightedSource("quickstart_tasks"), WeightedSource("chat", path, weight=3))
    found = drawn_parts(DataConfig(source="mixture", mixture=parts, row_length=1024), split, 6000)
    assert len(found) > 100 and abs(np.mean(found) - 0.75) < 0.05


@pytest.mark.parametrize("kind", ["chat", "quickstart_tasks"])
def test_parts_that_are_split_alike_come_in_one_order_in_both_splits(tmp_path, kind):
    path = None if kind == "quickstart_tasks" else str(write_lines(tmp_path / "chat.jsonl", [chat(0), chat(1)]))
    parts = tuple(WeightedSource(kind, path, weight=weight) for weight in (0.7, 0.1, 0.2))
    config = DataConfig(source="mixture", mixture=parts, row_length=1024)
    train, held_out = (drawn_parts(config, split, 300, whole=True) for split in ("train", "held_out"))
    assert train == held_out


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_a_record_of_a_mixture_comes_once_an_epoch_of_its_part_whatever_the_groups(tmp_path, groups):
    """Also where a part's length is no multiple of their number, over the ends of its epochs."""
    documents = Documents(mixture(tmp_path, 7, 10, num_groups=groups), tokenizer(), 0, "train")
    drawn = [documents[index].examples[0].tokens for index in range(120)]
    for length, texts in (
        (7, [tokens.tobytes() for tokens in drawn if len(tokens) >= 50]),
        (10, [tokens.tobytes() for tokens in drawn if len(tokens) < 50]),
    ):
        assert 54 <= len(texts) <= 66 and len(set(texts)) == length
        for start in range(0, len(texts) - length + 1, length):
            assert len(set(texts[start : start + length])) == length


def with_part(folder, record, **fields):
    """Of many good records, and of one."""
    first = write_lines(folder / "first.jsonl", [chat(number, 3) for number in range(20)])
    second = write_lines(folder / "second.jsonl", [record])
    parts = tuple(WeightedSource("chat", str(path)) for path in (first, second))
    return DataConfig(source="mixture", mixture=parts, row_length=256, held_out_share=0.5, **fields)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (HELD_OUT, "the training split holds no document of .*second.jsonl; lower data.held_out_share"),
        (
            "{",
            "the training split holds no document of .*second.jsonl but bad records, the last: .*second.jsonl:1: broken JSON",
        ),
    ],
)
def test_a_part_that_gives_nothing_ends_the_training_by_its_name(tmp_path, record, message):
    iterator = stream(with_part(tmp_path, record, on_bad_record="skip"))
    with pytest.raises(UserError, match=message):
        for _ in range(100):
            next(iterator)


def test_a_part_that_holds_nothing_out_is_told_once(tmp_path, capsys):
    iterator = stream(with_part(tmp_path, TRAINED, num_groups=2), split="held_out")
    for _ in range(50):
        next(iterator)
    told = f"warning: the held-out split holds no document of {tmp_path / 'second.jsonl'}; raise data.held_out_share"
    assert capsys.readouterr().err.splitlines() == [told]


def test_a_share_that_cannot_be_set_is_not_asked_for(tmp_path, capsys):
    """Beside a source that splits itself."""
    path = write_lines(tmp_path / "few.jsonl", [TRAINED])
    parts = (WeightedSource("quickstart_tasks"), WeightedSource("chat", str(path)))
    config = DataConfig(source="mixture", mixture=parts, row_length=256)
    iterator = stream(config, split="held_out")
    next(iterator)
    told = f"warning: the held-out split holds no document of {path}; give it more records"
    assert capsys.readouterr().err.splitlines() == [told]
