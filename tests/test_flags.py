"""A bad flag of any command is one line that names it, with exit status 2."""

import ast
import dataclasses
import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_type_hints

import jax
import pytest
import tyro

import wedlm_jax
from tests.one_line import message_of
from wedlm_jax import train
from wedlm_jax.chat.__main__ import Chat
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evaluate import Evaluate
from wedlm_jax.flags import TextFlag, parse
from wedlm_jax.generate.__main__ import Generate
from wedlm_jax.sharding import ONE_DEVICE, MeshConfig


@dataclasses.dataclass(frozen=True)
class Flags:
    """Does nothing."""

    number: int
    """a number"""
    name: str = "x"
    mesh: MeshConfig = ONE_DEVICE

    def __post_init__(self) -> None:
        if self.number > 9:
            raise UserError(f"--number {self.number}: must be at most 9")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--number", "many"], "Error parsing --number: invalid literal for int() with base 10: 'many'"),
        (["--number", "1", "--nmae", "y"], "Unrecognized options: --nmae, y; did you mean --name?"),
        (["--number"], "Missing value for argument '--number'. Expected 1 values"),
        ([], "Missing from command: --number INT a number (required)"),
        (["--number", "10"], "--number 10: must be at most 9"),
        (["--number", "1", "--mesh.tensor", "0"], "mesh.tensor=0 must be at least 1"),
    ],
)
@pytest.mark.parametrize("boxes", [True, False])
def test_a_bad_flag_is_one_line(args, message, boxes, capsys, monkeypatch):
    """Whatever frame tyro draws around it."""
    monkeypatch.setattr("tyro._fmtlib._FORCE_UTF8_BOXES", boxes)
    assert message_of(parse, Flags, prog="command", args=args).startswith(message)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("args", [["--workdir", ""], ["--workdir="], ["train.steps=3", "--workdir", ""]])
def test_an_empty_path_is_refused(args):
    """As of a variable that is not set: it would be the current folder, in which all is written."""
    with pytest.raises(UserError, match="--workdir is empty; name a path, or leave it out"):
        parse(train.Flags, prog="command", args=args)
    assert parse(train.Flags, prog="command", args=["a=", "", "--workdir", "."]).workdir == Path(".")


def test_good_flags_are_read():
    assert parse(Flags, prog="command", args=["--number", "3"]) == Flags(3)


@dataclasses.dataclass(frozen=True)
class Places:
    out: Path | None = None
    text: str = ""


def test_the_tilde_of_a_path_is_the_home_directory_behind_an_equals_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    assert parse(Places, prog="command", args=["--out=~/a"]) == Places(Path("/home/x/a"))
    assert parse(Places, prog="command", args=["--text=~/a"]) == Places(text="~/a")
    assert parse(Places, prog="command", args=["--out=~nobody-of-this-name/a"]) == Places(
        Path("~nobody-of-this-name/a")
    )


@dataclasses.dataclass(frozen=True)
class Overridden:
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    exp: str | None = None
    number: int = 0
    dry: bool = False


@pytest.mark.parametrize(
    "args",
    ["a=1 b=2 --exp x --number -1 --dry", "a=1 --exp x b=2 --number=-1 --dry", "--dry a=1 --number -1 --exp x b=2"],
)
def test_what_is_no_flag_may_stand_anywhere(args):
    """But what follows a flag is its value, whatever it looks like."""
    read = parse(Overridden, prog="command", args=args.split(), config=(tyro.conf.FlagCreatePairsOff,))
    assert read == Overridden(("a=1", "b=2"), "x", -1, True)
    assert parse(Overridden, prog="command", args=["a=1", "--exp", "b=2"]) == Overridden(("a=1",), "b=2")


@dataclasses.dataclass(frozen=True)
class Inner:
    ban_mask: bool = True
    size: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Nested:
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    task: str | None = None
    limits: tuple[float, ...] = ()
    inner: Annotated[Inner, tyro.conf.arg(name="")] = Inner()


@pytest.mark.parametrize(("flag", "banned"), [("--no-ban-mask", False), ("--ban-mask", True)])
def test_a_boolean_of_a_nested_config_takes_no_value_from_behind_it(flag, banned):
    expected = Nested(("a=1",), "counting", inner=Inner(banned, 2))
    assert parse(Nested, prog="command", args=[flag, "--task", "counting", "a=1", "--size", "2"]) == expected
    assert parse(Nested, prog="command", args=["--size", "2", "--task", "counting", flag, "a=1"]) == expected


def test_all_that_follows_a_list_flag_up_to_the_next_flag_belongs_to_it():
    args = ["a=1", "--stop", "A", "B", "--limits", "-1", "2", "--task", "counting", "b=2", "--stop_ids", "3", "4"]
    expected = Nested(("a=1", "b=2"), "counting", (-1, 2), Inner(stop=("A", "B"), stop_ids=(3, 4)))
    assert parse(Nested, prog="command", args=args) == expected
    read = parse(Evaluate, prog="evaluate", args=["--model", "DIR", "--stop", "A", "B"])
    assert (read.overrides, read.decode.stop) == ((), ("A", "B"))


@pytest.mark.parametrize("again", [["--stop", "B"], ["--stop=B"], ["--task", "counting", "--stop", "A", "B"]])
def test_a_list_that_is_given_in_parts_is_refused(again):
    with pytest.raises(UserError, match="^--stop is there 2 times; write all its values behind one$"):
        parse(Evaluate, prog="evaluate", args=["--stop", "A", "--model", "DIR", *again])


@dataclasses.dataclass(frozen=True)
class Text:
    said: TextFlag = None


@pytest.mark.parametrize("args", [["--said", "None"], ["--said=None"]])
def test_the_text_none_is_a_text(args):
    assert parse(Text, prog="command", args=args).said == "None"
    assert parse(Text, prog="command", args=[]).said is None


def test_what_a_user_writes_is_a_text():
    """No prompt, message or system message is lost because it reads None."""
    texts = {Generate: ("prompt", "message"), Chat: ("system",)}
    for command, names in texts.items():
        kinds = get_type_hints(command, include_extras=True)
        assert all(kinds[name] == TextFlag for name in names)


def test_a_flag_without_its_value_takes_none_from_before_it():
    with pytest.raises(UserError, match="Missing value for argument '--exp'"):
        parse(Overridden, prog="command", args=["a=1", "--exp"])


def test_the_help_is_shown_as_ever(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(Flags, prog="command", args=["--help"])
    assert exit.value.code == 0
    assert "a number" in capsys.readouterr().out


@pytest.mark.parametrize("margin", ["", "    "])
def test_each_example_of_the_help_is_a_line(margin, capsys):
    examples = ["python -m command --number 1", "python -m command --number 2"]
    with pytest.raises(SystemExit):
        parse(
            Flags,
            prog="command",
            args=["--help"],
            description="\n".join(["Does.", "", *(margin + e for e in examples)]),
        )
    assert {f"$ {example}" for example in examples} <= set(map(str.strip, capsys.readouterr().out.splitlines()))


OF_A_MODEL = ["--model", "a"]
COMMANDS = {
    "train": [],
    "evaluate": [],
    "metrics.__main__": [],
    "data.__main__": [],
    "convert": ["--from", "a", "--to", "b"],
    "calibrate": ["--model", "a", "--data", "b"],
    "generate.__main__": OF_A_MODEL,
    "chat.__main__": OF_A_MODEL,
    "serve.__main__": OF_A_MODEL,
    "bench": OF_A_MODEL,
    "tradeoff": OF_A_MODEL,
    "cacheability": OF_A_MODEL,
    "open_ended": OF_A_MODEL,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_a_bad_flag_in_one_line(command, monkeypatch, capsys):
    main = importlib.import_module(f"wedlm_jax.{command}").main
    monkeypatch.setattr(sys, "argv", [command, *COMMANDS[command], "--no-such-flag", "3"])
    with pytest.raises(SystemExit) as exit:
        main()
    shown = capsys.readouterr().err
    assert exit.value.code == 2
    assert shown.startswith("error: Unrecognized options: --no-such-flag") and shown.count("\n") == 1


def test_these_are_all_the_commands_that_take_flags():
    package = Path(wedlm_jax.__file__).parent
    texts = {path.relative_to(package).with_suffix(""): path.read_text() for path in package.rglob("*.py")}
    commands = {
        ".".join(path.parts) for path, text in texts.items() if "\n@entry\n" in text and re.search(r"\bparse\(", text)
    }
    assert commands == set(COMMANDS)


def test_a_command_whose_reader_has_left_says_nothing():
    """As in `python -m wedlm_jax.train --list | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "wedlm_jax.train", "--list"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_what_is_printed_is_one_line(unbuffered):
    """As in `python -m wedlm_jax.generate ... > file`; and nothing more at the exit of Python."""
    script = "from wedlm_jax.errors import entry; entry(lambda: print('text'))()"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    told = "error: what is printed, or a file, cannot be written (no space left on device); make room or name another place\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_device_with_too_little_memory_is_one_line(capsys):
    """As in loading a model, where there is no batch to lower; another error of the device keeps its traceback."""

    def main_of(message: str):
        @entry
        def main() -> None:
            raise jax.errors.JaxRuntimeError(message)

        return main

    with pytest.raises(SystemExit) as exit:
        main_of("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nBuffers:\n")()
    told = capsys.readouterr().err
    assert exit.value.code == 2 and told.count("\n") == 1
    assert told.startswith(
        "error: a device has too little memory (RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        main_of("INTERNAL: failed")()


def test_another_broken_pipe_is_not_hidden():
    @entry
    def main() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        main()


def test_the_help_of_a_field_is_one_line_of_source():
    """Of a docstring of several tyro breaks its lines where the source does, whatever the width of the terminal."""
    package = Path(wedlm_jax.__file__).parent
    bodies = [
        (path, scope.body)
        for path in sorted(package.rglob("*.py"))
        for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(scope, ast.ClassDef)
    ]
    helps = [
        (f"{path.relative_to(package)}:{said.lineno}", said.value.value)
        for path, body in bodies
        for field, said in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    ]
    assert len(helps) > 50
    assert [place for place, text in helps if "\n" in text] == []
