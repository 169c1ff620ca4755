"""Engines in other processes: what they answer, and what they cannot."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest

from tests.baselines.engines import with_fake_engines
from wedlm_jax.baselines.process import Baseline
from wedlm_jax.decode.stats import Stats
from wedlm_jax.errors import UserError


def test_an_engine_answers_whatever_it_prints_and_counts_one_forward_a_token(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    with Baseline("transformers", sys.executable, Path("x"), dtype="float32") as engine:
        run = engine.run([[1, 5], [7]], 3, [10])
        first, second = run.completions
        assert (first.ids, second.ids) == ([6, 7, 8], [8, 9, 10])
        assert (first.finish_reason, second.finish_reason) == ("length", "stop")
        assert first.stats == Stats(3, 3, 3) and run.seconds >= 0 and run.steps is None
        assert engine.run([[0]], 2, []).completions[0].ids == [1, 2]


def test_an_engine_that_counts_its_forwards_is_believed(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    with Baseline("official", sys.executable, Path("x")) as engine:
        run = engine.run([[1], [2]], 4, [], entropy_threshold=0.4)
    assert [c.stats for c in run.completions] == [Stats(4, 8, 72)] * 2
    assert (run.decode_seconds, run.steps) == (0.5, 8)


@pytest.mark.parametrize(
    ("settings", "python", "said"),
    [
        ({"broken": True}, sys.executable, "RuntimeError: no such kernel \\(all that it said is in .*vllm-.*log\\)$"),
        ({}, "/no/such/python", "/no/such/python: cannot be run"),
        ({}, "/bin/false", "ended with status 1 and said nothing"),
    ],
)
def test_an_engine_that_cannot_be_loaded_is_one_line(settings, python, said, monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=said):
        Baseline("vllm", python, Path("x"), **settings)


def test_what_an_engine_said_before_it_failed_is_kept(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError):
        Baseline("vllm", sys.executable, Path("x"), broken=True)
    [kept] = tmp_path.glob("vllm-*.log")
    assert kept.read_text() == "loading x\n"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_an_engine_that_is_not_installed_is_said_so():
    with pytest.raises(UserError, match="vllm under .*python.*cannot import what it needs .*vllm"):
        Baseline("vllm", sys.executable, Path("x"), dtype="float32")


def test_a_checkout_that_is_none_is_said_so(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    with pytest.raises(UserError, match="is no checkout of the official repository"):
        Baseline("official", sys.executable, Path("x"), checkout=str(tmp_path))
