"""A mixture: its shares in every group of rows, every record of a part once an epoch, no part missing silently."""

import numpy as np
import pytest

from tests.data.tiny import sentence, stream, tokenizer, write_lines
from wedlm_jax.data.config import DataConfig, WeightedSource
from wedlm_jax.data.documents import Documents


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
