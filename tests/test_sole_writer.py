"""While one training is at work in a workdir no other begins there, and one that was killed holds nobody off."""

import errno
import subprocess
import sys

import pytest

from wedlm_jax.errors import UserError
from wedlm_jax.sole_writer import sole_writer

HOLD = """
import sys
from pathlib import Path
from wedlm_jax.sole_writer import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that is inside for `tmp_path`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "inside\n"
        yield process
        process.kill()


def test_a_second_process_waits_and_is_refused(other, tmp_path, monkeypatch):
    monkeypatch.setattr("wedlm_jax.sole_writer._GRACE", 0.3)
    with (
        pytest.raises(
            UserError, match="another training is at work there; wait for it, end it, or choose another --workdir"
        ),
        sole_writer(tmp_path),
    ):
        pytest.fail("two are inside")


def test_a_killed_one_holds_nobody_off(other, tmp_path):
    other.kill()
    with sole_writer(tmp_path):
        pass


def test_another_folder_and_another_time_are_free(other, tmp_path):
    (tmp_path / "another").mkdir()
    for _ in range(2):
        with sole_writer(tmp_path / "another"):
            pass


def test_a_file_system_without_locks_goes_without(other, tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with sole_writer(tmp_path):
        pass
