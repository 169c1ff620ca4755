"""benchmarks/gpu.sh: every stage runs, and one that fails is told without ending the others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FULL

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
STAGES = 5  # where there is one kind of kernels
PATH = {"PATH": "/usr/bin:/bin"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=PATH | environment)


def stand_in(folder: Path, body: str) -> str:
    """A python that says what it was asked to run."""
    python = folder / "python"
    python.write_text(f'#!/usr/bin/env bash\nif [[ "$1" == -c ]]; then exit 0; fi\n{body}\n')
    python.chmod(0o755)
    return str(python)


def test_a_stage_that_fails_is_told_and_the_others_still_run(tmp_path):
    fails = 'echo "ran $2"; if [[ $2 == benchmarks.loss ]]; then echo out of memory >&2; exit 3; fi'
    done = run("--smoke", str(tmp_path / "gpu.md"), PYTHON=stand_in(tmp_path, fails))
    text = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 1
    assert text.count("ran benchmarks.") == STAGES and text.index("FAILED (status 3)") < text.index("decode_forward")
    assert text.count("FAILED") == 1 and "out of memory" in text


def test_the_kernels_that_a_stage_took_stand_beside_its_figures(tmp_path):
    says = "echo 'attention: xla, since no kernel passed its trial' >&2; echo 'attention is all' >&2"
    run("--smoke", str(tmp_path / "gpu.md"), PYTHON=stand_in(tmp_path, says))
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("- attention: xla, since no kernel passed its trial\n") == STAGES and "is all" not in text


def test_on_a_gpu_all_stages_together_get_less_than_eight_minutes(tmp_path):
    (tmp_path / "timeout").write_text('#!/usr/bin/env bash\necho "limit $2"\n')
    (tmp_path / "timeout").chmod(0o755)
    done = run(str(tmp_path / "gpu.md"), PYTHON=stand_in(tmp_path, ""), PATH=f"{tmp_path}:{PATH['PATH']}")
    text = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, done.stderr
    limits = [int(limit) for limit in re.findall(r"^limit (\d+)$", text, re.MULTILINE)]
    assert len(limits) == STAGES + 4  # a second shape of the step; attention, step and decoding by both implementations
    assert sum(limits) <= 480
    assert "--attention tokamax" in text and "--attention xla" in text


@pytest.mark.parametrize(("given", "used"), [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "3,4"}, "3")])
def test_of_several_gpus_one_is_measured(tmp_path, given, used):
    python = stand_in(tmp_path, 'echo "on GPU $CUDA_VISIBLE_DEVICES"')
    run("--smoke", str(tmp_path / "gpu.md"), PYTHON=python, **given)
    assert (tmp_path / "gpu.md").read_text().count(f"on GPU {used}\n") == STAGES


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run(str(tmp_path / "gpu.md"), PYTHON=sys.executable, JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: jax sees no GPU") and done.stderr.count("\n") == 1


def test_a_requirement_that_is_missing_is_named_in_one_line_before_any_stage(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError(\"No module named 'tyro'\")")
    done = run("--smoke", str(tmp_path / "gpu.md"), PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and not (tmp_path / "gpu.md").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "ModuleNotFoundError: No module named 'tyro'; pip install" in done.stderr


@pytest.mark.skipif(not FULL, reason="two minutes; launch/test.sh --full")
def test_the_smoke_run_passes(tmp_path):
    done = run("--smoke", str(tmp_path / "gpu.md"), PYTHON=sys.executable)
    text = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, done.stderr + text
    assert text.count("\n### ") == STAGES and "WRONG" not in text
