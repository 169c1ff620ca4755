"""Bad files and full disks, a case a row: checkpoints and what lies beside them, Hugging Face directories, outputs.

What every row must hold is in bad_input.py; bad config and data are in test_bad_input.py.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.bad_input import RESUME, TRAIN, Case, check, cut, edit, forbidden, full_disk, make_world
from tests.tiny_training import one_device_mesh
from wedlm_jax import train as train_module


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def removed(path: str):
    return lambda: shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def written(path: str, text: str):
    return lambda: Path(path).write_text(text)


def data_files() -> list[Path]:
    """The stored place in the data, whatever orbax calls its file."""
    files = [
        file for file in Path(CHECKPOINT, "data").rglob("*") if file.is_file() and "next_example" in file.read_text()
    ]
    assert files
    return files


GENERATE = "generate --prompt x --max-new-tokens 4"
CHECKPOINT = "stopped/checkpoints/2"

WORKDIR = {
    "experiment.json is lost": Case(
        RESUME, "stopped/experiment.json: no such file or directory; python -m wedlm_jax.train .* writes it",
        removed("stopped/experiment.json"),
    ),
    "experiment.json is cut off": Case(
        RESUME, "stopped/experiment.json:1: no JSON", lambda: cut("stopped/experiment.json", 1)
    ),
    "experiment.json is no text": Case(
        RESUME, "stopped/experiment.json: no JSON .*utf-8",
        lambda: Path("stopped/experiment.json").write_bytes(b'{"name": "\xff"}'),
    ),
    "experiment.json is nested without end": Case(
        RESUME, "stopped/experiment.json: no JSON .*recursion", written("stopped/experiment.json", "[" * 100_000)
    ),
    "experiment.json of a newer version": Case(
        RESUME, "stopped/experiment.json: unknown field train.stepz; did you mean train.steps?",
        lambda: edit("stopped/experiment.json", '"steps"', '"stepz"'),
    ),
    "model.json is lost": Case(RESUME, "stopped .*has no model.json", removed("stopped/model.json")),
    "model.json is cut off": Case(RESUME, "stopped/model.json: cannot be read", lambda: cut("stopped/model.json")),
    "the tokenizer is lost": Case(RESUME, "stopped/tokenizer is not a directory; name one that", removed("stopped/tokenizer")),
    "the tokenizer is cut off": Case(
        RESUME, "stopped/tokenizer: the tokenizer cannot be read .*; write its files again",
        lambda: cut("stopped/tokenizer/tokenizer.json"),
    ),
    "the only checkpoint is cut off": Case(
        RESUME, "checkpoints/2: the checkpoint cannot be read .*; remove .*checkpoints to start from the beginning",
        lambda: cut(f"{CHECKPOINT}/params"),
    ),
    "the optimizer is lost": Case(
        RESUME, "checkpoints/2: the checkpoint cannot be read .*; remove .*checkpoints", removed(f"{CHECKPOINT}/training")
    ),
    "the place in the data is lost": Case(
        RESUME, "checkpoints/2: the checkpoint cannot be read .*; remove .*checkpoints", removed(f"{CHECKPOINT}/data")
    ),
    "a checkpoint of another model": Case(
        RESUME, "checkpoints/2: the checkpoint cannot be read",
        lambda: edit("stopped/model.json", '"hidden_size": 16', '"hidden_size": 32'),
    ),
    "metrics that are damaged": Case(
        RESUME, "stopped/metrics.jsonl:2: no JSON .*; remove the line",
        written("stopped/metrics.jsonl", '{"step": 1}\nx\n{"step": 3}\n')
    ),
    "metrics that are no text": Case(
        RESUME, "stopped/metrics.jsonl:1: no JSON .*utf-8.*; remove the line",
        lambda: Path("stopped/metrics.jsonl").write_bytes(b'{"step": "\xff"}\n'),
    ),
    "metrics that are no object": Case(
        RESUME, "stopped/metrics.jsonl:1: no JSON object with its step; remove the line",
        written("stopped/metrics.jsonl", "[1]\n"),
    ),
    "the place in the data is another list": Case(
        RESUME, "the saved place in the data is of an earlier version or damaged .*; remove that checkpoint or start a new run",
        lambda: [file.write_text("[1]") for file in data_files()],
    ),
    "the place in the data is no number": Case(
        RESUME, "the saved place in the data is of an earlier version or damaged .*; remove that checkpoint or start a new run",
        lambda: [file.write_text('{"next_example": ["a"], "next_piece": [0], "skipped_records": [0]}') for file in data_files()],
    ),
    "metrics that are damaged, drawn": Case(
        "metrics stopped", "stopped/metrics.jsonl:1: no JSON .*; remove the line", written("stopped/metrics.jsonl", "x\n")
    ),
    "metrics that are texts, drawn": Case(
        "metrics stopped", 'stopped/metrics.jsonl:1: loss is "low", no number; remove the line',
        written("stopped/metrics.jsonl", '{"step": 1, "loss": "low"}\n'),
    ),
    "a workdir below a file": Case(
        "train --exp tiny.py --workdir tiny.py/run",
        r"tiny.py/run: cannot be written \(not a directory\); make room or choose another --workdir"
    ),
    "a workdir that may not be written": Case(
        "train --exp tiny.py --workdir texts/run",
        r"texts/run: cannot be written \(permission denied\); allow writing there or choose another --workdir",
        around=lambda: forbidden("texts", 0o500),
    ),
    "checkpoints that may not be written": Case(
        RESUME, "checkpoints/4: the checkpoint could not be written .*; the checkpoint of step 2 is kept; allow writing there,",
        changes="stopped/metrics.jsonl", around=lambda: forbidden("stopped/checkpoints", 0o500),
    ),
    "a workdir that may not be read": Case(
        RESUME, "stopped.*: permission denied", around=lambda: forbidden("stopped")
    ),
    "a workdir without a checkpoint": Case(
        f"{GENERATE} --model stopped", "stopped holds no checkpoint yet; go on with its python -m wedlm_jax.train",
        removed("stopped/checkpoints"),
    ),
    "a damaged checkpoint, loaded": Case(
        f"{GENERATE} --model stopped",
        "checkpoints/2: the checkpoint cannot be read .*; go on with its python -m wedlm_jax.train",
        lambda: cut(f"{CHECKPOINT}/params"),
    ),
    "a folder that is no model": Case(
        "convert --from texts --to out", r"texts: neither an HF directory \(no config.json\) nor a workdir with a model"
    ),
}  # fmt: skip


def tensors(change):
    """Rewrites the weights of the exported model."""

    def rewrite() -> None:
        held = {name: np.array(x) for name, x in load_file("exported/model.safetensors").items()}
        change(held)
        save_file(held, "exported/model.safetensors", metadata={"format": "pt"})

    return rewrite


def config(**fields):
    """Rewrites the config of the exported model."""

    def rewrite() -> None:
        file = Path("exported/config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return rewrite


NORM = "model.norm.weight"
LOAD = f"{GENERATE} --model exported"
HF = {
    "config.json is cut off": Case(LOAD, "exported/config.json", lambda: cut("exported/config.json")),
    "the weights are lost": Case(LOAD, "exported: .*safetensors", removed("exported/model.safetensors")),
    "the weights are cut off": Case(LOAD, "exported/model.safetensors", lambda: cut("exported/model.safetensors", 1000)),
    "a tensor is missing": Case(
        LOAD, f"exported: the tensors do not fit config.json: missing {NORM}", tensors(lambda held: held.pop(NORM))
    ),
    "a tensor too many": Case(
        LOAD, "exported: the tensors do not fit config.json: extra bias", tensors(lambda held: held.update(bias=np.ones(2)))
    ),
    "a tensor of another shape": Case(
        LOAD, rf"misshapen {NORM} \(is \[17\], needs \[16\]\)", tensors(lambda held: held.update({NORM: np.ones(17)})),
    ),
    "another vocabulary than the weights": Case(
        LOAD, r"misshapen .*embed_tokens.weight .*is \[320, 16\], needs \[400, 16\]", config(vocab_size=400)
    ),
    "an architecture that is not implemented": Case(LOAD, "exported/config.json: .*mistral", config(model_type="mistral")),
    "a rope that is not implemented": Case(
        LOAD, "exported/config.json: .*rope", config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}, rope_parameters=None)
    ),
    "no tokenizer for a text": Case(
        LOAD, "--prompt: this model has no tokenizer, and so reads no text; .* token ids",
        lambda: (removed("exported/tokenizer.json")(), removed("exported/tokenizer_config.json")()),
    ),
    "no tokenizer to train with": Case(
        f"{TRAIN} model=none init_from=exported tokenizer.path=none", "init_from=exported has no tokenizer; .* as tokenizer.path",
        lambda: (removed("exported/tokenizer.json")(), removed("exported/tokenizer_config.json")()),
    ),
    "a tokenizer of a larger vocabulary": Case(
        f"{TRAIN} model=none init_from=exported tokenizer.path=large",
        r"the tokenizer has token ids up to \d+ and the model has vocab_size=320",
        lambda: large_tokenizer("large"),
    ),
    "weights that may not be read": Case(
        LOAD, "exported/model.safetensors: permission denied; make it readable",
        around=lambda: forbidden("exported/model.safetensors")
    ),
    "an arch that does not fit": Case(
        "convert --from exported --to out --arch qwen2", "arch=qwen2 has a qkv bias and no qk norm",
    ),
}  # fmt: skip


def large_tokenizer(folder: str) -> None:
    shutil.copytree("tokenizer", folder)
    file = Path(folder) / "tokenizer.json"
    tree = json.loads(file.read_text())
    first = len(tree["model"]["vocab"])
    tree["added_tokens"] += [
        {"id": first + i, "content": f"<|extra_{i}|>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False} for i in range(100)
    ]  # fmt: skip
    file.write_text(json.dumps(tree))


OUTPUT = {
    "the disk is full at the first checkpoint": Case(
        TRAIN, "checkpoints/2: the checkpoint could not be written .*; there is no earlier one; make room, then start the same",
        around=lambda: full_disk(9000),
    ),
    "the disk is full at a later checkpoint": Case(
        RESUME, "checkpoints/4: the checkpoint could not be written .*; the checkpoint of step 2 is kept; make room, then start",
        changes="stopped/metrics.jsonl", around=lambda: full_disk(9000),
    ),
    "the disk is full at the start": Case(
        TRAIN, r"fresh/tokenizer: cannot be written \(file too large\); make room or choose another --workdir", around=full_disk,
    ),
    "the disk is full, converting": Case(
        "convert --from exported --to out", "out: writing failed .*; nothing is left of it", around=lambda: full_disk(9000)
    ),
    "the disk is full, converting over an earlier export": Case(
        "convert --from stopped --to exported", "exported: writing failed .*; nothing is left of it",
        around=lambda: full_disk(9000)
    ),
    "the disk is full, generating": Case(
        f"{LOAD} --output out.jsonl", r"out.jsonl: cannot be written \(file too large\); make room", written("out.jsonl",
        "old\n"), around=full_disk
    ),
    "the disk is full, drawing": Case(
        "metrics stopped", r"stopped/curves.png: cannot be written \(file too large\); make room", around=full_disk,
    ),
    "a directory of something else": Case(
        "convert --from exported --to texts", "texts: not empty and holds a.txt, so it is not replaced; choose another"
    ),
    "a file in the way": Case("convert --from exported --to tiny.py", "tiny.py: is a file; name a directory"),
    "a folder that may not be written": Case(
        "convert --from exported --to texts/out", "texts/out: writing failed .*[Pp]ermission denied",
        around=lambda: forbidden("texts", 0o500),
    ),
    "a folder as output": Case(f"{LOAD} --output texts", "--output texts: is a folder; name a file"),
    "results below a file": Case(
        "evaluate --model exported --task counting --limit 1 --max-new-tokens 4 --decoder ar --out tiny.py/out",
        r"tiny.py/out: cannot be written \(not a directory\)",
    ),
}  # fmt: skip

CASES = {f"{kind}: {name}": case for kind, table in
         {"workdir": WORKDIR, "hf": HF, "output": OUTPUT}.items() for name, case in table.items()}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves other reads unawaited
@pytest.mark.parametrize("name", CASES)
def test_bad_files_are_one_line_and_lose_nothing(name, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
    check(CASES[name], world, tmp_path, monkeypatch, capsys)
