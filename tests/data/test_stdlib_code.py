"""The standard library as data: split by path, tests and packages left out."""

import pytest

from wedlm_jax.data.stdlib_code import code_files, split_of
from wedlm_jax.errors import UserError


def test_the_library_of_this_python_is_found_split_by_path_and_without_tests():
    train, held_out = code_files("train"), code_files("held_out")
    assert len(train) > 200 and 5 < len(held_out) < len(train) / 5
    assert not {file.path for file in train} & {file.path for file in held_out}
    assert all(split_of(file.path) == "train" for file in train)
    assert not any({"test", "site-packages"} & set(file.path.split("/")) for file in train + held_out)
    assert [file.path for file in train] == sorted(file.path for file in train)


def test_the_split_is_fixed():
    assert [split_of(path) for path in ("gzip.py", "hashlib.py", "argparse.py")] == ["held_out", "held_out", "train"]


def test_a_folder_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "argparse.py").write_text("x = 1\n")
    assert [file.path for file in code_files("train", "~/code")] == ["argparse.py"]


def test_a_folder_or_a_link_that_leads_nowhere_is_no_file_of_code(tmp_path):
    (tmp_path / "argparse.py").write_text("x = 1\n")
    (tmp_path / ".#argparse.py").symlink_to("user@host.1234")
    (tmp_path / "chart.py").mkdir()
    assert {split_of(name) for name in (".#argparse.py", "chart.py", "argparse.py")} == {"train"}
    assert [file.path for file in code_files("train", tmp_path)] == ["argparse.py"]


def test_a_missing_folder_an_empty_one_and_a_file_that_is_no_text_are_named(tmp_path):
    with pytest.raises(UserError, match="data.path=.*nowhere is not a folder"):
        code_files("train", tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no .py file of the train split"):
        code_files("train", tmp_path)
    (tmp_path / "argparse.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(UserError, match=r"argparse.py is not UTF-8 \(byte 5\)"):
        code_files("train", tmp_path)
