"""Streaming beside the official engine: what is compared, and that a difference is found."""

import dataclasses
import io
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from tests.baselines.engines import with_fake_engines
from tests.evals.models import tiny_model
from tests.evals.test_speed import PROBLEMS
from wedlm_jax.baselines.process import Baseline
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.errors import UserError
from wedlm_jax.evals.beside_official import (
    beside,
    beside_table,
    streaming_as_official,
    where_they_part,
)
from wedlm_jax.evals.speed import Work


def test_steps_and_tokens_of_both_are_compared(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr("wedlm_jax.evals.beside_official.PAUSE", 0)
    work = Work("echo", batch=2, prompt_tokens=8, output_tokens=4)
    config = DecodeConfig(window_size=4, stop_ids=())
    with Baseline("official", sys.executable, Path("x")) as engine:
        row = beside(tiny_model(), engine, work, PROBLEMS, config, repeats=1)
    assert row.steps[0] == 8 and row.seconds[0] == 0.5 / 8
    assert 2 <= row.steps[1] <= 5 and row.seconds[1] > 0 and row.floor_seconds > 0
    assert 4 <= row.slots <= 8
    assert row.same_rows == 0 and row.parts_at == (0, 0)  # it counts on, and our model does not
    console = Console(width=80, file=io.StringIO())
    console.print(beside_table([dataclasses.replace(row, work=dataclasses.replace(work, task="word_problems"))]))
    shown = console.file.getvalue()
    assert "same" in shown and "0/2" in shown and max(map(len, shown.splitlines())) <= 80
    assert where_they_part([row]) == [f"{work}: 2 rows part from the official engine's, row 0 at token 0."]


def test_what_does_not_fit_in_memory_is_one_line(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr("wedlm_jax.evals.beside_official.PAUSE", 0)

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")

    monkeypatch.setattr("wedlm_jax.evals.beside_official.Batch", exhausted)
    fits_not = pytest.raises(UserError, match="out of memory with a batch of 2")
    with Baseline("official", sys.executable, Path("x")) as engine, fits_not:
        beside(tiny_model(), engine, Work("echo", 2, 8, 4), PROBLEMS, DecodeConfig(window_size=4), repeats=1)


def test_settings_are_those_of_the_official_engine():
    config = streaming_as_official(DecodeConfig("verified", temperature=1.0, entropy_threshold=0.3, refill="paper"), 9)
    assert config == DecodeConfig(
        "streaming", entropy_threshold=0.3, fill_rule="each", refill="eager", ban_mask=False, max_new_tokens=9
    )
