"""Every launch script parses, runs dry, and hands the training command flags that exist."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wedlm_jax.preemption import EXIT_STATUS
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
    "git": {"output"},
    "gcloud": {"worker", "zone", "command"},
    "xpk": {
        "workload", "cluster", "zone", "tpu-type", "docker-image", "max-restarts", "restart-on-exit-codes",
        "termination-grace-period-seconds", "command",
    },
    "srun": {"kill-on-bad-exit"},
}  # fmt: skip


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"} | environment)


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_every_script_parses(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_no_script_expands_an_empty_array_as_bash_3_2_refuses_it(script):
    """Under -u, as macOS runs them: there an empty array is unbound."""
    text = (LAUNCH / script).read_text()
    for name in re.findall(r"^(\w+)=\(\)", text, flags=re.MULTILINE):
        plain, guarded = f'"${{{name}[@]}}"', f'${{{name}[@]+"${{{name}[@]}}"}}'
        assert 0 < text.count(plain) == text.count(guarded)


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


def test_a_script_finds_its_repository_whatever_the_callers_cdpath_holds(tmp_path):
    """With one, `cd launch/..` goes elsewhere, where .venv was made, and prints where."""
    (tmp_path / "launch").mkdir()
    path = {"PATH": "/usr/bin:/bin", "CDPATH": str(tmp_path), "PYTHON": "/no/python"}
    where = "trap pwd EXIT; source launch/setup.sh 2>/dev/null"
    setup = subprocess.run(["bash", "-c", where], cwd=LAUNCH.parent, env=path, capture_output=True, text=True)
    command = ["bash", "launch/tpu_vm.sh", "--dry-run", *DRY["tpu_vm.sh"]]
    tpu_vm = subprocess.run(command, cwd=LAUNCH.parent, env=path, capture_output=True, text=True)
    assert setup.stdout == f"{LAUNCH.parent}\n"
    assert tpu_vm.stdout.startswith(f"git -C {LAUNCH.parent} archive")


def test_an_environment_with_jax_for_an_accelerator_is_left_as_it_is(tmp_path):
    """The pinned jax beside another's CUDA plugin would run everything on the CPU."""
    (tmp_path / "launch").mkdir()
    shutil.copy(LAUNCH / "setup.sh", tmp_path / "launch")
    (tmp_path / "requirements.txt").write_text("jax\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    version = "{}.{}".format(*sys.version_info)
    program(
        tmp_path / ".venv" / "bin" / "python", f'echo {version}; echo "$*" >> {tmp_path}/asked'
    )  # has what it is asked for
    setup = ["bash", "-c", f"source {tmp_path}/launch/setup.sh"]
    done = subprocess.run(
        setup, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 1 and f"{tmp_path}/.venv holds jax for a GPU or a TPU" in done.stderr
    assert "pip" not in (tmp_path / "asked").read_text()


def test_the_readme_names_every_script():
    text = (LAUNCH / "README.md").read_text(encoding="utf-8")
    for script in LAUNCH.glob("*.sh"):
        assert f"`{script.name}`" in text, script.name


def test_hooks_run_the_tools_that_the_setup_installs_from_any_shell():
    root = LAUNCH.parent
    entries = re.findall(r"entry: ([^\s,]+)", (root / ".pre-commit-config.yaml").read_text())
    pinned = re.findall(r"^([\w-]+)==", (root / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert entries and {entry.removeprefix(".venv/bin/") for entry in entries} <= {*pinned}
    assert all(entry.startswith(".venv/bin/") for entry in entries)


def fake_python(folder: Path, *lines: str) -> Path:
    """Has wedlm_jax, and notes its arguments in `folder`/runs before it does what `lines` say."""
    program(folder / "python", "\n".join(["[[ $1 != -c ]] || exit 0", f'echo "$@" >> {folder}/runs', *lines]))
    return folder / "python"


@pytest.mark.parametrize(
    ("status", "runs"), [(0, 1), (2, 1), (130, 1), (143, 1), (1, 3), (75, 3), (134, 3), (137, 3), (139, 3)]
)
def test_a_gpu_box_starts_again_after_a_death_but_not_after_bad_input(tmp_path, status, runs):
    fake = fake_python(tmp_path, f"exit {status}")
    done = run("gpu.sh", "--exp", "sft", PYTHON=str(fake), WEDLM_RESTARTS="2", WEDLM_RESTART_SECONDS="0")
    assert done.returncode == status
    assert (tmp_path / "runs").read_text().splitlines() == ["-m wedlm_jax.train --exp sft"] * runs


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        # Saves first, and is waited for.
        (
            ("trap 'saved=true' TERM", "echo ready", "until [[ -v saved ]]; do sleep 0.05; done", "sleep 0.5; exit 75"),
            75,
        ),
        (("echo ready >&2", "exit 1"), 1),  # while the box waits to start it again
    ],
)
@pytest.mark.parametrize(
    ("tell", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGINT), (os.kill, signal.SIGTERM)],  # Ctrl-C in a terminal; kill PID
    ids=["Ctrl-C", "INT", "TERM"],
)
def test_a_gpu_box_that_is_told_to_end_tells_the_training_and_does_not_start_it_again(
    tmp_path, lines, status, tell, number
):
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake_python(tmp_path, *lines)), "WEDLM_RESTART_SECONDS": "30"}
    box = subprocess.Popen(
        ["bash", str(LAUNCH / "gpu.sh"), "--exp", "sft"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash traps nothing that it was started to ignore
    )  # fmt: skip
    assert box.stdout.readline() == "ready\n"
    if status == 1:
        assert "starting again" in box.stdout.readline()
        time.sleep(0.2)  # until it sleeps
    tell(box.pid, number)
    assert box.wait(timeout=20) == status
    assert box.stdout.read() == ""  # closed: nothing that it started is left
    assert len((tmp_path / "runs").read_text().splitlines()) == 1


def test_gke_starts_again_after_a_run_that_was_told_to_end_and_gives_it_time_to_save():
    (line,) = run("gke.sh", "--dry-run", *DRY["gke.sh"]).stdout.splitlines()
    flags = dict(word.split("=", 1) for word in line.split(" --command=")[0].split() if "=" in word)
    restarted = {int(status) for status in flags["--restart-on-exit-codes"].split(",")}
    assert {1, EXIT_STATUS} == restarted  # and not 2, bad input
    assert int(flags["--termination-grace-period-seconds"]) > 30


def test_a_slurm_task_has_the_cpus_that_sbatch_was_asked_for(tmp_path):
    program(tmp_path / "python3", "")
    program(tmp_path / "srun", 'echo "$SRUN_CPUS_PER_TASK"')
    path = f"{tmp_path}:/usr/bin:/bin"
    assert run("slurm.sh", *TRAIN, PATH=path, SLURM_CPUS_PER_TASK="12").stdout == "12\n"
    assert run("slurm.sh", *TRAIN, PATH=path).stdout == "8\n"  # that of the script's own header


def test_a_slurm_task_may_take_as_much_of_its_gpu_as_gpu_sh(tmp_path):
    program(tmp_path / "python3", "")
    program(tmp_path / "srun", 'echo "$XLA_PYTHON_CLIENT_MEM_FRACTION"')
    path = f"{tmp_path}:/usr/bin:/bin"
    assert run("slurm.sh", *TRAIN, PATH=path).stdout == "0.92\n"
    assert run("slurm.sh", *TRAIN, PATH=path, XLA_PYTHON_CLIENT_MEM_FRACTION="0.5").stdout == "0.5\n"


@pytest.mark.parametrize(("status", "requeued"), [(2, False), (75, True)])
def test_a_slurm_job_is_queued_again_but_not_after_bad_input(tmp_path, status, requeued):
    """srun that kills the other tasks when the first ends has the status of its signal, whatever that of the first was."""
    program(tmp_path / "python3", "")
    program(tmp_path / "srun", f'[[ "$*" == *--kill-on-bad-exit=0* ]] || exit 143; exit {status}')
    program(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/told')
    done = run("slurm.sh", *TRAIN, PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_JOB_ID="7")
    assert done.returncode == status
    assert (tmp_path / "told").is_file() == requeued


@pytest.mark.parametrize("script", ["gpu.sh", "slurm.sh"])
def test_a_python_without_the_package_is_told_once_and_not_tried_again(tmp_path, script):
    program(tmp_path / "python3", "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'jax'\" >&2; exit 1")
    for other in ("srun", "scontrol"):
        program(tmp_path / other, f"touch {tmp_path}/told")
    done = run(script, *TRAIN, PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_JOB_ID="7", WEDLM_RESTART_SECONDS="0")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not (tmp_path / "told").exists()
    assert line.startswith(
        "error: python3 cannot import wedlm_jax (ModuleNotFoundError: No module named 'jax'); activate"
    )


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def worker(tmp_path):
    """(git repository to send, home of a worker with a Python, environment in which gcloud runs there)."""
    repository, home, programs = (tmp_path / name for name in ("repository", "home", "programs"))
    for folder in (repository, home, programs):
        folder.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    (repository / "code").write_text("first")
    for command in (["init", "--quiet"], ["add", "code"], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    (repository / ".venv").mkdir()
    (repository / ".venv" / "large").write_text("not for the workers")
    # gcloud compute tpus tpu-vm scp ... FILE NAME: | ssh ... --command=COMMAND
    run_command = f'last="${{@: -1}}"; PATH={programs}:$PATH bash -c "${{last#--command=}}"'
    gcloud = f'cd {home}; case $4 in scp) cp "${{@: -2:1}}" . ;; ssh) {run_command} ;; esac'
    program(programs / "gcloud", gcloud)
    # It makes a "virtual environment" whose Python tells what it was asked to do.
    program(
        programs / "python3.12",
        'mkdir -p "$3/bin"; printf "#!/bin/bash\\necho \\"\\$@\\"" > "$3/bin/python3"; chmod +x "$3"/bin/*',
    )
    return repository, home, {"PATH": f"{programs}:/usr/bin:/bin", "WEDLM_SOURCE": str(repository), "HOME": str(home)}


def test_a_tpu_worker_gets_the_tracked_files_as_they_are_each_time(worker):
    repository, home, environment = worker
    for content in ("first", "second, not committed"):
        (repository / "code").write_text(content)
        os.utime(repository / "code", (0, 0))  # touched, even where it holds what was committed
        done = run("tpu_vm.sh", *DRY["tpu_vm.sh"], WEDLM_PYTHON="python3.12", **environment)
        assert done.returncode == 0, done.stderr
        sent = home / "wedlm_jax_launch" / "source"
        assert {path.name: path.read_text() for path in sent.iterdir()} == {"code": content}
    assert done.stdout.splitlines() == [
        "-m pip install --quiet ./wedlm_jax_launch/source[tpu]",
        "-m wedlm_jax.train --exp sft --workdir /shared/run 1 data.path=chat.jsonl",
    ]


def test_a_folder_that_is_no_clone_is_not_sent(worker, tmp_path):
    """A downloaded zip: git tracks no file of it."""
    _, _, environment = worker
    (tmp_path / "zip").mkdir()
    environment |= {"WEDLM_SOURCE": str(tmp_path / "zip"), "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    done = run("tpu_vm.sh", *DRY["tpu_vm.sh"], **environment)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ""
    assert line.startswith(f"error: {tmp_path}/zip is no git clone (fatal: ") and line.endswith("WEDLM_SOURCE=DIR")


def test_a_tpu_worker_without_the_named_python_says_so_and_how_to_mend_it(worker):
    _, home, environment = worker
    done = run("tpu_vm.sh", *DRY["tpu_vm.sh"], WEDLM_PYTHON="python3.99", **environment)
    assert done.returncode == 1 and done.stdout == "" and not (home / "wedlm_jax_launch" / "venv").exists()
    assert "error: this worker has none of python3.99; install one" in done.stderr and "WEDLM_PYTHON=" in done.stderr


def test_a_tpu_worker_installs_the_extras_that_are_named(worker):
    _, _, environment = worker
    done = run("tpu_vm.sh", *DRY["tpu_vm.sh"], WEDLM_EXTRAS="wandb,datasets", **environment)
    assert done.stdout.splitlines()[0] == "-m pip install --quiet ./wedlm_jax_launch/source[tpu,wandb,datasets]"


SECRET = 'it\'s $HOME; a "secret"'


def test_a_tpu_worker_gets_the_variables_that_are_passed_in_no_command_line_and_keeps_no_file(worker):
    _, home, environment = worker
    gcloud = Path(environment["PATH"].split(":")[0]) / "gcloud"
    # Notes every command line, and the mode of each file that it sends.
    note = f'echo "$*" >> {home}/commands; [[ $4 != scp ]] || stat -c "%a %n" "${{@: -2:1}}" >> {home}/modes'
    gcloud.write_text(gcloud.read_text().replace("\n", f"\n{note}\n", 1))
    python = gcloud.parent / "python3.12"
    python.write_text(python.read_text().replace('echo \\"\\$@\\"', 'echo \\"\\$HF_TOKEN|\\$B|\\$OTHER\\"'))
    passed = {"WEDLM_PASS": "HF_TOKEN,B", "HF_TOKEN": SECRET, "B": "2", "OTHER": "not for them"}
    for arguments in (("--dry-run", *DRY["tpu_vm.sh"]), DRY["tpu_vm.sh"]):
        done = run("tpu_vm.sh", *arguments, **passed, **environment)
        assert done.returncode == 0, done.stderr
        commands = done.stdout if "--dry-run" in arguments else (home / "commands").read_text()
        assert "wedlm_jax_launch.env" in commands and "secret" not in commands
    assert done.stdout.splitlines()[-1] == f"{SECRET}|2|not for them"  # the fake worker is this machine
    assert "600" in [line.split()[0] for line in (home / "modes").read_text().splitlines() if ".env" in line]
    assert not (home / "wedlm_jax_launch.env").exists()


@pytest.mark.parametrize("name", ["HF_TOKEN", "HF-TOKEN"])
def test_a_variable_that_is_not_there_is_passed_to_no_worker(worker, name):
    _, home, environment = worker
    done = run("tpu_vm.sh", *DRY["tpu_vm.sh"], WEDLM_PASS=f"HOME {name}", **environment)
    assert done.returncode == 2 and [*home.iterdir()] == []
    assert (
        done.stderr == f"error: WEDLM_PASS names {name}, which is not in the environment; export it, or leave it out\n"
    )
