"""A command starts anew with huge pages, once, as it was called; a program that imports the package does not."""

import os
import subprocess
import sys

import pytest

SHOW = "import os, sys; os.execv = lambda path, argv: sys.exit(repr((argv, os.environ['GLIBC_TUNABLES'])));"
LOOKING = "sys.argv[0] = '-m';"  # as Python does while it looks for the module of `python -m`

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")


def start(code: str, **environment: str) -> str:
    """What a new process was about to run instead of itself; nothing if it ran on."""
    inherited = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-X", "utf8", "-c", SHOW + code + "import wedlm_jax.host_memory"]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True).stderr


def test_a_command_starts_anew_with_its_own_arguments_and_the_settings_that_were_there():
    anew = start(LOOKING)
    assert str([sys.executable, "-X", "utf8", "-c"])[:-1] in anew and "'glibc.malloc.hugetlb=1'" in anew
    assert "'glibc.malloc.check=1:glibc.malloc.hugetlb=1'" in start(LOOKING, GLIBC_TUNABLES="glibc.malloc.check=1")


@pytest.mark.parametrize("setting", ["glibc.malloc.hugetlb=0", "glibc.malloc.check=1:glibc.malloc.hugetlb=2"])
def test_a_word_of_the_user_stays(setting):
    assert start(LOOKING, GLIBC_TUNABLES=setting) == ""


def test_a_program_that_imports_the_package_is_left_alone():
    assert start("") == ""


def test_a_command_runs_as_it_was_called():
    inherited = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-m", "wedlm_jax.train", "--list"]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    assert "quickstart" in done.stdout and done.stderr == ""
