"""Engines in other processes: what they answer, and what they cannot."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import pytest

from tests.baselines.engines import with_fake_engines
from wedlm_jax.baselines.process import Baseline, EngineEnded
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


def test_what_an_engine_said_is_read_whatever_its_bytes_are(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"no such kernel \(all that it said is in .*log\)$"):
        Baseline("vllm", sys.executable, Path("x"), broken=True, said=[0xFF, 0xC3, 0xA9, 0x0A])
    [kept] = tmp_path.glob("vllm-*.log")
    assert "\ufffdé\n" in kept.read_text(encoding="utf-8")


ASKED = {"prompts": [[1]], "max_new_tokens": 1, "stop_ids": []}


@pytest.mark.parametrize(("platform", "seen"), [("cpu", ""), ("gpu", "0,1")])
def test_an_engine_sees_gpus_only_where_jax_runs_on_them(platform, seen, monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with Baseline("transformers", sys.executable, Path("x")) as engine:
        assert engine.ask(ASKED)["gpus"] == seen


def test_an_engine_that_is_killed_is_said_so_and_so_it_is_when_asked_again(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Baseline("vllm", sys.executable, Path("x"), killed=True) as engine:
        for _ in range(2):
            with pytest.raises(EngineEnded, match="was ended by SIGKILL and said last: generating .*vllm-.*log"):
                engine.ask(ASKED)
    [kept] = tmp_path.glob("vllm-*.log")  # one, however often it fails
    assert kept.read_text() == "loading x\ngenerating\n"


def is_running(pid):
    """Not a zombie either: what an engine started has nobody here to read its status."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid):
    limit = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < limit:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.fixture
def ctrl_c_interrupts():
    """Also where the tests are a job in the background, which a shell starts with this signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_an_engine_in_the_middle_of_an_answer_and_what_it_started(ctrl_c_interrupts, monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Baseline("vllm", sys.executable, Path("x"), slow=True, child=True) as engine:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            engine.ask(ASKED)
        finally:
            child = int(re.findall(r"child (\d+)", engine._words())[0])
            assert is_running(engine._process.pid) and is_running(child)
    assert gone(engine._process.pid) and gone(child) and time.monotonic() - start < 60


def test_an_engine_that_cannot_be_loaded_is_ended(monkeypatch, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(UserError, match="no such kernel"):
        Baseline("vllm", sys.executable, Path("x"), broken=True)
    [process] = started
    assert process.returncode == -signal.SIGKILL and process.stdin.closed


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_an_engine_that_is_not_installed_is_said_so():
    with pytest.raises(UserError, match="vllm under .*python.*cannot import what it needs .*vllm"):
        Baseline("vllm", sys.executable, Path("x"), dtype="float32")


def test_transformers_on_a_cpu_is_not_held_against_jax_on_an_accelerator(monkeypatch, tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        pytest.skip("needs torch")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="JAX runs on a gpu and this torch would on the CPU; name a --python"):
        Baseline("transformers", sys.executable, Path("x"), dtype="float32")


def test_a_checkout_that_is_none_is_said_so(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    with pytest.raises(UserError, match="is no checkout of the official repository"):
        Baseline("official", sys.executable, Path("x"), checkout=str(tmp_path))


# What `official_engine.py` reaches for in a checkout; a step of it fails.
FAILING_CHECKOUT = {
    "engine/llm_engine": """
from types import SimpleNamespace
class Config:
    def __post_init__(self): pass
class LLMEngine:
    def __init__(self, *_, **__):
        self.scheduler = SimpleNamespace(waiting=[])
        self.model_runner = SimpleNamespace(wedlm_decoder=SimpleNamespace(prepare_decode_inputs=None))
    def add_request(self, prompt, params): self.scheduler.waiting.append(SimpleNamespace(seq_id=0))
    def is_finished(self): return not self.scheduler.waiting
    def step(self): raise RuntimeError("no room")
""",
    "engine/model_runner": "class ModelRunner: pass",
    "engine/wedlm_decoder": "",
    "layers/attention": "",
    "layers/layernorm": "class RMSNorm: pass",
    "sampling_params": "SamplingParams = dict",
}


def test_what_a_failed_request_left_in_the_official_engine_is_never_decoded_beside_another(monkeypatch, tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        pytest.skip("needs torch")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, text in FAILING_CHECKOUT.items():
        file = tmp_path / "wedlm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    job = dict(checkout=str(tmp_path), dtype="float32", window_size=4, mask_token_id=0, rows=1, context=8)
    with Baseline("official", sys.executable, Path("x"), **job) as engine:
        for said in ("no room", "what is left of a request that failed"):
            with pytest.raises(UserError, match=said):
                engine.run([[1]], 4, [], entropy_threshold=0.4, distance_penalty=0.0)
