"""Every launch script parses, runs dry, and hands the training command flags that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from wedlm_jax.train import Flags

LAUNCH = Path(__file__).parents[1] / "launch"
TRAIN = ["--exp", "sft", "--workdir", "/shared/run 1", "data.path=chat.jsonl"]
DRY = {
    "tpu_vm.sh": ["my-tpu", "us-east5-a", "--", *TRAIN],
    "gke.sh": ["run1", "cluster", "us-east5-a", "v5p-128", "image:1", "--", *TRAIN],
    "slurm.sh": TRAIN,
    "gpu.sh": TRAIN,
}
# The flags of each program that a script calls, from its own documentation.
KNOWN = {
    "gcloud": {"recurse", "worker", "zone", "command"},
    "xpk": {"workload", "cluster", "zone", "tpu-type", "docker-image", "max-restarts", "command"},
    "srun": {"kill-on-bad-exit"},
}


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"} | environment)


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_it_parses(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)


@pytest.mark.parametrize("script", DRY)
def test_a_dry_run_shows_the_command_with_every_flag(script):
    done = run(script, "--dry-run", *DRY[script])
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("\\ ", " ")
    assert "-m wedlm_jax.train --exp sft --workdir /shared/run 1 data.path=chat.jsonl" in text


@pytest.mark.parametrize("script", DRY)
def test_the_flags_it_passes_are_known(script):
    for line in run(script, "--dry-run", *DRY[script]).stdout.splitlines():
        program = line.split()[0]
        own = line.partition("python3 -m")[0]
        for flag in re.findall(r"--([a-z-]+)", own):
            assert program in KNOWN and flag in KNOWN[program], f"{script}: {program} --{flag}"
    train_flags = {name.replace("_", "-") for name in Flags.__dataclass_fields__}
    for flag in re.findall(r"--([a-z-]+)", shlex.join(TRAIN)):
        assert flag in train_flags


@pytest.mark.parametrize("script", DRY)
def test_without_flags_it_tells_how_it_is_called(script):
    done = run(script)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ") and script in done.stderr


def test_the_readme_names_every_script():
    text = (LAUNCH / "README.md").read_text(encoding="utf-8")
    for script in LAUNCH.glob("*.sh"):
        assert f"`{script.name}`" in text, script.name


@pytest.mark.parametrize(("status", "runs"), [(0, 1), (2, 1), (75, 3)])
def test_a_gpu_box_starts_again_after_a_death_but_not_after_bad_input(tmp_path, status, runs):
    counted = tmp_path / "runs"
    fake = tmp_path / "python"
    fake.write_text(f'#!/usr/bin/env bash\necho "$@" >> {counted}\nexit {status}\n')
    fake.chmod(0o755)
    done = run("gpu.sh", "--exp", "sft", PYTHON=str(fake), WEDLM_RESTARTS="2", WEDLM_RESTART_SECONDS="0")
    assert done.returncode == status
    assert counted.read_text().splitlines() == ["-m wedlm_jax.train --exp sft"] * runs
