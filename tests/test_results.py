"""Results are replaced whole or not at all, and are JSON that every reader takes."""

import io
import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from tests.bad_input import full_disk
from wedlm_jax.errors import UserError
from wedlm_jax.results import replacing, tell_written, write_json, write_results


def test_a_number_that_is_none_is_null(tmp_path):
    write_json(tmp_path / "r.json", {"a": [math.nan, 1.5], "b": {2: -math.inf}, "c": ("é", None, 3)})
    assert (tmp_path / "r.json").read_text(encoding="utf-8").count("é") == 1
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"), parse_constant=pytest.fail) == {
        "a": [None, 1.5], "b": {"2": None}, "c": ["é", None, 3],
    }  # fmt: skip


def test_a_full_disk_leaves_what_was_there(tmp_path):
    (tmp_path / "r.json").write_text("old\n")
    with pytest.raises(UserError, match=r"r.json: cannot be written \(file too large\); make room"), full_disk():
        write_json(tmp_path / "r.json", {"a": 1})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.json", "old\n")]


def test_what_was_written_is_told_in_one_line():
    console = Console(file=io.StringIO(), width=40)
    paths = [Path("[a] folder") / ("long" * 20) / name for name in ("r.json", "r.png")]
    tell_written(console, *paths)
    assert console.file.getvalue() == f"\nwrote {paths[0]} and {paths[1]}\n"


def test_no_picture_of_the_results_before_lies_beside_new_ones(tmp_path):
    for name in ("r.json", "r.png", "other.png"):
        (tmp_path / name).write_text("old\n")
    with pytest.raises(UserError, match="r.json: cannot be written"), full_disk():
        write_results(tmp_path, "r", 1)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("r.json", "r.png", "other.png"), "old\n"
    )
    write_results(tmp_path, "r", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "other.png"}


def test_what_breaks_off_leaves_what_was_there(tmp_path):
    (tmp_path / "r.png").write_text("old\n")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "r.png") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.png", "old\n")]


def test_a_link_stays_one_and_the_file_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "r.json").symlink_to(tmp_path / "far" / "real.json")
    for number in (1, 2):  # at first it leads nowhere
        write_json(tmp_path / "r.json", number)
        assert (tmp_path / "r.json").is_symlink()
        assert [(path.name, path.read_text()) for path in (tmp_path / "far").iterdir()] == [
            ("real.json", f"{number}\n")
        ]


def test_a_pipe_or_a_device_is_written_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for name in ("pipe", "link"):
            write_json(tmp_path / name, name)
            assert os.read(reader, 100).decode() == f'"{name}"\n'
        with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "pipe"):
            raise KeyboardInterrupt
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 2
