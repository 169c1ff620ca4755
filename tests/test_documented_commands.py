"""Every training command in the scripts, the experiments, the README and docs/ gets past what is checked before any work."""

import ast
import dataclasses
import functools
import math
import re
import shlex
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from wedlm_jax.data.config import SourceConfig
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.experiment import DataConfig, Study, TokenizerConfig, load_named

ROOT = Path(__file__).parents[1]
TRAINS = re.compile(r"(?:wedlm_jax\.train|launch/(\w+)\.sh) .*--exp (\w+)([^`\n]*)")
# Devices and processes of the machines that a script's example is for: v5p-128 is 64 chips on 16 hosts.
MACHINES = {"tpu_vm": (64, 16), "gke": (64, 16), "slurm": (16, 16), "gpu": (8, 1)}


def documented() -> list:
    """(experiment, overrides, devices, processes) of each command, once; its id begins with the files."""
    found: dict[tuple, list[str]] = {}
    texts = {path: path.read_text().replace("\n#     ", " ") for path in (ROOT / "launch").glob("*.sh")}
    for path in (ROOT / "experiments").glob("*.py"):
        texts[path] = ast.get_docstring(ast.parse(path.read_text()))
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        texts[path] = path.read_text()
    for path, text in sorted(texts.items()):
        for script, name, rest in TRAINS.findall(re.sub(r"\\\s+", "", text)):
            words = shlex.split(rest.partition("#")[0])
            overrides = tuple(word for word in words if "=" in word and not word.startswith("-"))
            devices, processes = MACHINES.get(script, (4, 1))
            if slice_ := re.search(r"--compile-only \w+:([\dx]+)", rest):
                devices = math.prod(map(int, slice_[1].split("x")))
            found.setdefault((name, overrides, devices, processes), []).append(path.name)
    return [
        pytest.param(*command, id=f"{', '.join(files)}: {command[0]} {' '.join(command[1])}")
        for command, files in found.items()
    ]


@functools.cache
def tokenizer():
    """With a template that reads what Qwen3's do."""
    made = make_tokenizer(TokenizerConfig(vocab_size=300), DataConfig(num_problems=50))
    made.chat_template += "{{ enable_thinking }}"
    return made


def mesh_of(config, devices: int) -> AbstractMesh:
    sizes = dataclasses.asdict(config)
    named = math.prod(size for size in sizes.values() if size != -1)
    return AbstractMesh(tuple(devices // named if size == -1 else size for size in sizes.values()), tuple(sizes))


def assert_it_starts(experiment, devices: int, processes: int) -> None:
    """On so many devices: its sources read the fields that are set, and its rows can be shared out."""
    assert experiment.data.parts
    experiment.check_batch(mesh_of(experiment.mesh, devices))
    built_in = {field.name: field.default for field in dataclasses.fields(SourceConfig)}
    drawn = dataclasses.replace(experiment.data, **built_in, mixture=(), self_generated=None, num_workers=0)
    J, rows = experiment.objective.block_size, experiment.train.batch_size
    batches(drawn, tokenizer(), J, rows, 0, process_count=processes)


@pytest.mark.parametrize(("name", "overrides", "devices", "processes"), documented())
def test_a_documented_command_gets_past_the_checks(name, overrides, devices, processes):
    found = load_named(name)
    if isinstance(found, Study):
        assert not overrides
        return
    if found.data.source == "chat" and not any(word.startswith(("data.path=", "data.source=")) for word in overrides):
        overrides = (*overrides, "data.path=unread")  # --compile-only
    assert_it_starts(load_named(name, overrides), devices, processes)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_slurm_example_runs_on_the_numbers_of_nodes_that_it_names(nodes):
    (example,) = [param for param in documented() if "slurm.sh" in param.id]
    name, overrides, *_ = example.values
    assert "on --nodes=1, 2 or 4" in (ROOT / "launch" / "slurm.sh").read_text()
    assert_it_starts(load_named(name, overrides), 8 * nodes, 8 * nodes)


def test_commands_are_found_in_every_place():
    ids = [param.id for param in documented()]
    for place in (
        "tpu_vm.sh",
        "gke.sh",
        "slurm.sh",
        "gpu.sh",
        "qwen25_7b_cpt.py",
        "qwen3_8b_sft.py",
        "README.md",
        "adapter.md",
    ):
        assert any(place in one for one in ids), place
    assert any("data.mixture= data.path=/mnt/bucket/corpus" in one for one in ids)
