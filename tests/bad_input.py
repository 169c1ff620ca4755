"""What the tables of bad input share: a small world of files that every case starts from, and what every case must hold.

Each case runs a command's own `main` with its command line and shows: one line on stderr that says what and where, exit
status 2, and every byte that was there before is there after. Where the workdir is new, nothing of the failed run stands in
the way of the command once it is mended.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib
import os
import re
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.data.tiny import chat, write_lines
from tests.tiny_training import EXPERIMENT, one_device_mesh
from wedlm_jax import train as train_module
from wedlm_jax.checkpoint import saved_steps
from wedlm_jax.data.quickstart_tasks import QuickstartProblems
from wedlm_jax.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.experiment import override
from wedlm_jax.train_state import TrainState

EXPERIMENTS = """from wedlm_jax.experiment import *


def tiny():
    return Experiment.from_json('''{json}''')


def broken():
    return tiny().steps


def unequal():
    return Experiment("unequal", None, data=DataConfig(
        source="mixture", mixture=(WeightedSource("text", "texts"), WeightedSource("text", "texts", weight=0))))
"""
TRAIN = "train --exp tiny.py --workdir fresh"
RESUME = "train --exp tiny.py --workdir stopped"
CHAT = "data.source=chat tokenizer.path=tokenizer data.held_out_share=0"
TEXT = "data.source=text data.held_out_share=0"
MODULES = {"generate": "generate.__main__", "data": "data.__main__", "metrics": "metrics.__main__"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line (its first word the module), the message as a regular expression, and what is broken before it."""

    command: str
    message: str
    damage: Callable[[], Any] = lambda: None
    changes: str | None = None  # the one file that the command rightly changes
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def make_world(folder: Path) -> None:
    """Files of every kind, all of them good.

    tiny.py         experiments; `tiny` trains in a moment
    stopped/        its workdir after two of four steps
    exported/       the same model as a Hugging Face directory
    texts/ chat.jsonl prompts.jsonl tokenizer/
    """
    experiment = override(
        EXPERIMENT, "train.steps=4", "train.batch_size=8", "train.checkpoint_every=2", "tokenizer.path=tokenizer"
    )
    (folder / "tiny.py").write_text(EXPERIMENTS.replace("{json}", experiment.to_json()))
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("Tom has three apples. " * 200)
    write_lines(folder / "chat.jsonl", [chat(number) for number in range(40)])
    write_lines(folder / "prompts.jsonl", [{"prompt": "Q: Count"}, {"prompt_ids": [5, 6]}])
    problems = QuickstartProblems("train", seed=0, length=100)
    save_tokenizer(train_tokenizer((p.prompt + p.solution for p in problems), 300), folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:  # the files of a run are wanted, not what it learns
        patch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
        patch.setattr(train_module, "compile_step", lambda step, settings, mesh: _counted)
        assert run_command(TRAIN.replace("fresh", "stopped"), folder) == 0
    assert run_command("convert --from stopped --to exported", folder) == 0
    shutil.rmtree(folder / "stopped" / "checkpoints" / "4")


def run_command(line: str, folder: Path) -> int | str | None:
    """Exit status of a command."""
    module, *arguments = shlex.split(line)
    main = importlib.import_module(f"wedlm_jax.{MODULES.get(module, module)}").main
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            main()
        except SystemExit as stop:
            return stop.code
    return 0


def check(case: Case, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Runs a case in a copy of the world and holds what the docstring of this file says."""
    folder = tmp_path / "world"
    shutil.copytree(world, folder)
    monkeypatch.chdir(folder)
    case.damage()
    before = contents(folder)
    capsys.readouterr()
    monkeypatch.setattr(train_module, "compile_step", lambda step, settings, mesh: _counted)
    with case.around():
        status = run_command(case.command, folder)
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if not line.startswith("warning: ")]
    assert status == 2, shown
    assert len(lines) == 1 and len(lines[0]) < 700, shown
    assert re.search("^error: .*" + case.message, lines[0]), lines[0]
    after = contents(folder)
    changed = [path for path in before if after.get(path) != before[path] and path != case.changes]
    assert changed == [], "what was there has changed"
    added = sorted(path for path in after.keys() - before.keys() if not path.startswith(("fresh", "__pycache__")))
    added = [path for path in added if "orbax-checkpoint-tmp" not in path]  # the next run takes these away
    assert added == [], "something is left lying about"
    if case.changes is not None:
        assert run_command(case.command, folder) == 0, "the same command goes on, now that there is room"
    if case.command.startswith(TRAIN):
        assert saved_steps("fresh") == []
        shutil.copytree(world, folder, dirs_exist_ok=True)  # mended
        monkeypatch.setattr(train_module, "compile_step", _reached)
        with pytest.raises(Reached):
            run_command(TRAIN, folder)


def _counted(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """A step that learns nothing."""
    numbers = {"loss": 1.0, "tokens": 1, "useful_flops": 1.0, "skipped_in_row": 0}
    return dataclasses.replace(state, step=state.step + 1), {name: jnp.asarray(x) for name, x in numbers.items()}


class Reached(Exception):
    """The mended command has come as far as its training step."""


def _reached(*_: Any) -> Any:
    raise Reached


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file, the empty text of every folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.exists())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in paths
    }


def edit(path: str, old: str, new: str) -> None:
    """Replaces a text that must be there."""
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new, 1))


def cut(path: str, size: int = 100) -> None:
    """Ends every large file below `path` early, as a crash or a broken download does."""
    place = Path(path)
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    for file in files:
        if file.stat().st_size > 2 * size:
            file.write_bytes(file.read_bytes()[:size])


@contextlib.contextmanager
def full_disk(size: int = 0) -> Iterator[None]:
    """No file may grow past `size` bytes, as on a disk that is full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def forbidden(path: str, mode: int = 0) -> Iterator[None]:
    """A file or folder that may not be read (or, with 0o500, not written): for root too, who gives its privilege up."""
    os.chmod(path, mode)
    with _without_privilege():
        try:
            yield
        finally:
            os.chmod(path, 0o700)


@contextlib.contextmanager
def _without_privilege() -> Iterator[None]:
    """This thread without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, where it has them (capset(2), version 3)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0, os.strerror(ctypes.get_errno())
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~0b110  # effective; the permitted set stays, so that they come back
    assert libc.capset(header, fewer) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0, os.strerror(ctypes.get_errno())
