"""Metrics: one line a step whatever happened to the run, and a progress that says how long it still takes."""

import io
import json

import jax.numpy as jnp
import pytest
from rich.console import Console

from wedlm_jax import metrics
from wedlm_jax.errors import UserError
from wedlm_jax.metrics import MetricsWriter, ProgressBar, Throughput, fetch, read_metrics


def test_a_resumed_run_writes_no_step_twice_and_drops_half_a_line(tmp_path):
    with MetricsWriter(tmp_path, start_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here, two steps after the checkpoint
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(3, {"loss": 30.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_step_is_on_disk_when_write_returns(tmp_path):
    MetricsWriter(tmp_path, start_step=0).write(1, {"loss": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_no_metrics_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"metrics.jsonl: no such file"):
        read_metrics(tmp_path)


def test_fetched_metrics_are_json_numbers():
    assert fetch({"loss": jnp.float32(0.5), "tokens": jnp.int32(7)}) == {"loss": 0.5, "tokens": 7}


def test_throughput_leaves_out_the_first_step(monkeypatch):
    now = iter([10.0, 11.0, 12.0, 15.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    throughput = Throughput()
    throughput.add(1000)  # compiled: only starts the clock, at 10
    assert throughput.take() is None
    throughput.add(300)
    assert throughput.take() == 150.0  # 300 tokens from 10 to 12
    throughput.add(600)
    assert throughput.take() == 200.0  # 600 tokens from 12 to 15


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_rate_and_eta(terminal, monkeypatch):
    now = iter([100.0, 160.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with ProgressBar("run", start_step=0, total_steps=100, console=console) as bar:
        bar.show(1, 5.0, None)
        bar.show(61, 1.25, 1234.5)  # a step a second, 39 to go
    shown = out.getvalue()
    for part in ("run", "61/100", "loss 1.2500", "tokens/s", "0:39"):
        assert part in shown
