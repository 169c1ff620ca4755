"""How fast a run is and how long it still takes."""

import io

import jax
import pytest
from rich.console import Console

from wedlm_jax.metrics import progress, throughput
from wedlm_jax.metrics.profile import traced
from wedlm_jax.metrics.progress import ProgressBar
from wedlm_jax.metrics.throughput import Throughput, peak_flops


def clock(monkeypatch, module, *times: float) -> None:
    now = iter(times)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))


def test_throughput_leaves_out_the_first_step(monkeypatch):
    clock(monkeypatch, throughput, 10.0, 11.0, 12.0, 15.0)
    rates = Throughput()
    rates.add(1000)  # compiled: only starts the clock, at 10
    assert rates.take() == {}
    rates.add(300)
    assert rates.take() == {"tokens_per_second": 150.0}  # 300 tokens from 10 to 12; a CPU has no datasheet peak
    rates.add(600)
    assert rates.take() == {"tokens_per_second": 200.0}  # 600 tokens from 12 to 15


def test_mfu_is_useful_flops_over_the_peak_of_all_devices(monkeypatch):
    clock(monkeypatch, throughput, 10.0, 12.0)
    rates = Throughput(4, "TPU v5p")
    rates.add(1, 1e15)
    rates.add(100, 1836e12)
    assert rates.take() == {"tokens_per_second": 50.0, "mfu": 0.5}


def test_what_is_not_training_does_not_count(monkeypatch):
    clock(monkeypatch, throughput, 10.0, 11.0, 18.0, 19.0)
    rates = Throughput()
    rates.add(1)
    with rates.paused():  # from 11 to 18
        pass
    rates.add(100)
    assert rates.take() == {"tokens_per_second": 50.0}


def test_a_trace_is_written_outside_the_rates(monkeypatch, tmp_path):
    clock(monkeypatch, throughput, 10.0, 11.0, 13.0, 14.0, 24.0, 25.0)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)  # from 11 to 13
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)  # from 14 to 24
    rates = Throughput()
    rates.add(1)
    for step in (2, 3):
        with traced(step, (3,), tmp_path, rates.paused):
            pass
    rates.add(90)
    assert rates.take() == {"tokens_per_second": 30.0}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("TPU v5 lite", 197e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("Tesla T4", 8.1e12),
        ("TPU v5p", 459e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA RTX 6000 Ada Generation", 364e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
        ("NVIDIA T1000", None),
    ],
)
def test_the_peak_is_that_of_the_device(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_rate_and_eta(terminal, monkeypatch):
    clock(monkeypatch, progress, 100.0, 160.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with ProgressBar("run", start_step=0, total_steps=100, console=console) as bar:
        bar.show(1, None, None)
        bar.show(61, 1.25, 1234.5, 0.421, 3.276)  # a step a second, 39 to go
    shown = out.getvalue()
    for part in ("run", "61/100", "loss 1.2500", "epoch 3.28", "tokens/s", "MFU 42.1 %", "0:39"):
        assert part in shown
    assert terminal or "loss not finite" in shown
