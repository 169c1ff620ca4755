"""Where metrics go: one line a step whatever happened to the run, valid JSON whatever the numbers, others when asked."""

import hashlib
import json
import os
import shutil
import struct
import sys
import types

import jax.numpy as jnp
import pytest

from tests.bad_input import full_disk
from wedlm_jax.errors import UserError
from wedlm_jax.metrics.report import Report
from wedlm_jax.metrics.writers import MetricsWriter, StepLines, fetch, read_metrics


def test_a_resumed_run_writes_no_step_twice_and_drops_half_a_line(tmp_path):
    with MetricsWriter(tmp_path, start_step=0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
            writer.write_sample(step, {"number": 0, "completion": str(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here, two steps after the checkpoint
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(3, {"loss": 30.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [1, 2]


def test_a_run_killed_while_it_drops_lines_has_them_still(tmp_path, monkeypatch):
    MetricsWriter(tmp_path, start_step=0).write(1, {"loss": 1.0})

    def killed(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path, start_step=1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_a_step_is_on_disk_when_write_returns(tmp_path):
    MetricsWriter(tmp_path, start_step=0).write(1, {"loss": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_null(tmp_path, number):
    """Python alone would write NaN, which is no JSON."""
    numbers = fetch({"loss": jnp.float32(number), "tokens": jnp.int32(7)})
    assert numbers == {"loss": None, "tokens": 7}
    MetricsWriter(tmp_path, start_step=0, tensorboard=True).write(1, numbers)

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)["loss"] is None


def test_fetched_metrics_are_json_numbers():
    assert fetch({"loss": jnp.float32(0.5), "tokens": jnp.int32(7)}) == {"loss": 0.5, "tokens": 7}


def test_no_metrics_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"metrics.jsonl: no such file"):
        read_metrics(tmp_path)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: no JSON"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("line", [b'{"step": "\xff"}', b"[1]", b"3", b'{"loss": 1.0}', b'{"step": "a"}', b"[" * 10_000])
def test_a_damaged_line_is_named_when_a_run_goes_on_too(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    for read in (lambda: read_metrics(tmp_path), lambda: StepLines(tmp_path / "metrics.jsonl", start_step=3)):
        with pytest.raises(UserError, match=r"metrics.jsonl:2: no JSON .*; remove the line") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_half_a_line_that_ends_within_a_character_is_dropped(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes('{"step": 1, "completion": "é"}\n{"step": 2, "completion": "é'.encode()[:-1])
    StepLines(path, start_step=2).close()
    assert path.read_text(encoding="utf-8") == '{"step": 1, "completion": "é"}\n'


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent/metrics.jsonl: cannot be written \(no such file or directory\)"):
        MetricsWriter(tmp_path / "absent", start_step=0)


def events(folder) -> list[bytes]:
    """The records of TensorBoard's event files: length, its checksum, the event, its checksum."""
    found = []
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(content[12 : 12 + length])
            content = content[16 + length :]
    return found


def test_tensorboard_gets_every_number_and_the_samples(tmp_path):
    with MetricsWriter(tmp_path, start_step=0, tensorboard=True) as writer:
        writer.write(1, {"loss": 0.5, "grad_norm": 2.0, "mlm_loss": None})
        writer.write_sample(1, {"number": 0, "completion": "it counts"})
    written = b"".join(events(tmp_path / "tensorboard"))
    assert b"loss" in written and b"grad_norm" in written and b"it counts" in written
    assert b"mlm_loss" not in written


def test_a_disk_that_fills_under_tensorboard_is_one_line_and_no_wait(tmp_path):
    """More numbers than a queue holds; metrics.jsonl still has room."""
    numbers = {f"number_{number}": 0.5 for number in range(60)}
    told = pytest.raises(
        UserError,
        match=r"tensorboard: cannot be written \(file too large\); make room and start .* the checkpoints are kept",
    )
    with told, MetricsWriter(tmp_path, start_step=0, tensorboard=True) as writer, full_disk(2000):
        writer.write(1, numbers)
    assert read_metrics(tmp_path) == [{"step": 1, **numbers}]


def test_no_other_tracker_is_touched_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.write(1, {"loss": 0.5})
    assert not (tmp_path / "tensorboard").exists()


def test_weights_and_biases_that_is_not_installed_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"train.wandb=mine needs the package wandb: pip install wandb"):
        MetricsWriter(tmp_path, start_step=0, wandb="mine")


@pytest.fixture
def calls(monkeypatch):
    """What a package that stands for wandb is called with."""
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((step, numbers))

        def finish(self, exit_code):
            calls.append(f"finished with {exit_code}")

    def init(**arguments):
        calls.append(arguments)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


def test_weights_and_biases_gets_the_numbers_under_one_run_of_the_workdir(tmp_path, calls):
    for step in (1, 2):
        with MetricsWriter(tmp_path, start_step=step - 1, wandb="mine", name="run", config={"a": 1}) as writer:
            writer.write(step, {"loss": 0.5, "mlm_loss": None})
    first, second = calls[0], calls[3]
    assert first == second and first["project"] == "mine" and first["name"] == "run" and first["resume"] == "allow"
    assert calls[1:3] == [(1, {"loss": 0.5}), "finished with 0"]


@pytest.mark.parametrize("broken", ["log", "finish"])
def test_a_training_goes_on_where_weights_and_biases_has_gone(tmp_path, monkeypatch, capsys, broken):
    def gone(*arguments, **named):
        raise BrokenPipeError(32, "Broken pipe")

    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda *_, **__: None)
    setattr(run, broken, gone)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    with MetricsWriter(tmp_path, start_step=0, wandb="mine") as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    told = capsys.readouterr().err
    assert told == "warning: Weights & Biases is told no more (Broken pipe); metrics.jsonl has all\n"


def report(workdir) -> Report:
    """As training opens it, with Weights & Biases."""
    return Report(
        workdir, "run", {}, start_step=0, total_steps=2, log_every=1, devices=1, tensorboard=False, wandb="mine"
    )


def test_a_run_that_ends_by_an_error_is_no_finished_one_at_weights_and_biases(tmp_path, calls):
    with pytest.raises(KeyError), report(tmp_path):
        raise KeyError
    assert calls[-1] == "finished with 1"
    with report(tmp_path):
        pass
    assert calls[-1] == "finished with 0"


def test_a_disk_that_is_full_when_files_are_closed_leaves_no_run_open_at_weights_and_biases(
    tmp_path, calls, monkeypatch
):
    def full():
        raise UserError("full")

    writer = MetricsWriter(tmp_path, start_step=0, wandb="mine")
    monkeypatch.setattr(writer._lines, "close", full)
    with pytest.raises(UserError, match="full"), writer:
        pass
    assert calls[-1] == "finished with 1"


def test_weights_and_biases_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    def init(**arguments):
        raise RuntimeError("No API key configured.\nUse `wandb login`")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(
        UserError, match="^train.wandb=mine: No API key configured. Use .*; run wandb login, or set"
    ) as told:
        MetricsWriter(tmp_path, start_step=0, wandb="mine")
    assert "\n" not in str(told.value)


def wandb_id(workdir, calls):
    MetricsWriter(workdir, start_step=0, wandb="mine")
    return calls[-1]["id"]


def test_a_workdir_that_is_begun_again_is_another_run_at_weights_and_biases(tmp_path, calls):
    first = wandb_id(tmp_path, calls)
    (tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "wandb_id", tmp_path / "moved")
    assert wandb_id(tmp_path, calls) == wandb_id(tmp_path / "moved", calls) == first
    (tmp_path / "wandb_id").unlink()
    assert wandb_id(tmp_path, calls) != first


def test_a_run_of_an_earlier_version_keeps_its_name_at_weights_and_biases(tmp_path, calls):
    """Which was made of the workdir's path, and is the end of the name of the folder that the package left there."""
    earlier = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    (tmp_path / "wandb" / f"run-20260101_101010-{earlier}").mkdir(parents=True)
    assert wandb_id(tmp_path, calls) == earlier
    shutil.rmtree(tmp_path / "wandb")
    assert wandb_id(tmp_path, calls) == earlier
