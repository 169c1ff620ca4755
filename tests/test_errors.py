"""What went wrong outside is told in a few words, on the one line of a `UserError`."""

import importlib.util
import os
import subprocess
import sys
import warnings

import pytest

from wedlm_jax import checkpoint
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.errors import UserError, entry, reason, say_interrupted, writing

AT_LENGTH = OSError("INTERNAL: Disk\n  gone\n" + 300 * "at frame ")  # as libraries raise it, with no errno


def write(path):
    with writing(path):
        raise AT_LENGTH


@pytest.mark.parametrize("fails", [write, lambda path: Checkpoints(path, keep=1)], ids=["writing", "checkpoints"])
def test_an_error_of_many_lines_is_told_on_one(fails, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise AT_LENGTH

    monkeypatch.setattr(checkpoint, "_Manager", fail)
    with pytest.raises(UserError) as caught:
        fails(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and "internal: disk gone at frame" in message and len(message) < 500


def test_ctrl_c_before_a_command_begins_is_one_word(monkeypatch, capsys):
    passed_on = []
    monkeypatch.setattr(sys, "excepthook", lambda *raised: passed_on.append(raised))
    say_interrupted()
    for error in (KeyboardInterrupt(), SyntaxError("no")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "interrupted\n" and [kind for kind, *_ in passed_on] == [SyntaxError]


def test_a_warning_to_users_is_one_line_of_a_command(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    for _ in range(2):
        entry(lambda: None)()
    where = "module.py", 3
    assert warnings.formatwarning(UserWarning("not used"), UserWarning, *where) == "warning: not used\n"
    assert warnings.formatwarning(FutureWarning("old"), FutureWarning, *where).startswith(
        "module.py:3: FutureWarning: old"
    )


def test_what_stdout_has_no_letters_for_is_printed_as_escapes():
    program = "from wedlm_jax.errors import entry\n@entry\ndef main(): print('a €')\nmain()"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert told.stdout == b"a \\u20ac\n"


@pytest.mark.parametrize("platforms", ["cuda", "no_such"])
def test_a_kind_of_device_that_is_not_there_is_told_in_one_line(platforms):
    """jax has an assertion for one whose plugin is missing, and a message for a name that it does not know."""
    if platforms == "cuda" and importlib.util.find_spec("jax_cuda13_plugin"):
        pytest.skip("jax's plugin for CUDA is installed")
    program = "import jax\nfrom wedlm_jax.errors import entry\n@entry\ndef main(): jax.devices()\nmain()"
    told = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "JAX_PLATFORMS": platforms}, capture_output=True, text=True
    )
    assert told.returncode == 2
    *_, line = told.stderr.splitlines()
    assert line.startswith(f"error: JAX_PLATFORMS={platforms}: jax finds no such device here (")
    assert line.endswith("; unset it, or install jax for that device") and "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(13, "Permission denied", "a file"), "Permission denied"),
        (KeyError(), "KeyError"),
        (ValueError("a\n  b"), "a b"),
    ],
)
def test_a_reason_is_a_few_words(error, told):
    assert reason(error) == told
