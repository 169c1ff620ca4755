"""Processes whose data differ are told so, by source, before they train. Settings: tests/test_two_processes.py."""

import json

import jax
import pytest

from tests.data.tiny import config_of, sentence, tokenizer, write_lines
from wedlm_jax import same_run
from wedlm_jax.data.config import WeightedSource
from wedlm_jax.data.pipeline import batches
from wedlm_jax.errors import UserError
from wedlm_jax.same_run import require_same_data

LINES = [{"text": sentence(number)} for number in range(9)]


@pytest.fixture
def stream(tmp_path):
    """Of two sources, in a process that is one of two."""
    for name in ("one", "two"):
        write_lines(tmp_path / f"{name}.jsonl", LINES)
    parts = tuple(WeightedSource("text", str(tmp_path / f"{name}.jsonl")) for name in ("one", "two"))
    return lambda: batches(config_of(None, "mixture", mixture=parts), tokenizer(), 4, 2, seed=0)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (LINES, None),
        (LINES[:7], "two.jsonl has 7 records for process 1 and 9 for process 0; give all processes the same data"),
        ([*LINES[:8], {"text": "another"}], "two.jsonl has other records for process 1 than for process 0; give"),
    ],
)
def test_a_source_that_another_process_has_otherwise_is_named(stream, tmp_path, monkeypatch, lines, told):
    of_process_0 = json.dumps(stream().fingerprints())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(same_run, "all_texts", lambda own: [of_process_0, own])
    write_lines(tmp_path / "two.jsonl", lines)
    if told is None:
        return require_same_data(stream())
    with pytest.raises(UserError, match=told):
        require_same_data(stream())
