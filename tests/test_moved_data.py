"""A run goes on with its data, wherever they lie and however that is written: they are told by their records."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.data.tiny import sentence, tokenizer, write_lines
from tests.tiny_training import EXPERIMENT, one_device_mesh
from wedlm_jax import train as train_module
from wedlm_jax.data.tokenizer import save_tokenizer
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment, override
from wedlm_jax.train import train

LINES = [{"text": sentence(number)} for number in range(9)]
OTHERS = [{"text": sentence(number)} for number in range(20, 29)]
FIELDS = (
    "data.source=text", "data.path=texts.jsonl", "data.held_out_share=0", "tokenizer.path=tokenizer", "train.steps=1",
)  # fmt: skip
MIXED = (
    'data.mixture=[{{"source": "text", "path": "{0}"}}, {{"source": "text", "path": "{1}"}}]', "data.source=mixture",
    "data.path=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Texts, the same in another place, others there, and runs that have learned from the first."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "elsewhere").mkdir()
    write_lines(folder / "texts.jsonl", LINES)
    write_lines(folder / "elsewhere" / "texts.jsonl", LINES)
    write_lines(folder / "elsewhere" / "others.jsonl", OTHERS)
    save_tokenizer(tokenizer(), folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
        train(override(EXPERIMENT, *FIELDS), folder / "run")
        train(
            override(EXPERIMENT, *FIELDS, MIXED[0].format("texts.jsonl", "texts.jsonl"), *MIXED[1:]), folder / "mixed"
        )
    return folder


@pytest.fixture
def again(world, tmp_path, monkeypatch, capsys):
    """Runs once more, in a copy of the world, with other fields; returns what is said on stderr."""
    folder = shutil.copytree(world, tmp_path / "world")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())

    def run(*fields: str, workdir: str = "run") -> str:
        capsys.readouterr()
        assert train(override(EXPERIMENT, *FIELDS, *fields), folder / workdir)
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("path", ["./texts.jsonl", "{here}/texts.jsonl", "elsewhere/texts.jsonl"])
def test_the_same_data_may_lie_in_another_place(again, path):
    path = path.format(here=os.getcwd())
    assert again(f"data.path={path}") == ""
    assert Experiment.load("run").data.path == path, "an evaluation reads them there"


def test_the_tokenizer_is_the_same_however_its_path_is_written(again):
    assert again("tokenizer.path=./tokenizer/") == again(f"tokenizer.path={os.getcwd()}/tokenizer") == ""
    with pytest.raises(
        UserError, match=r"holds a run of another experiment \(tokenizer.path: .*/tokenizer -> .*/other"
    ):
        again("tokenizer.path=other")


def test_other_data_in_another_place_are_refused(again):
    with pytest.raises(
        UserError, match=r"run holds a run of other data \(data.path: texts.jsonl -> elsewhere/others.jsonl\); choose"
    ):
        again("data.path=elsewhere/others.jsonl")
    assert Experiment.load("run").data.path == "texts.jsonl"


def test_a_part_of_a_mixture_may_lie_in_another_place_if_it_is_the_same(again):
    assert again(MIXED[0].format("texts.jsonl", "elsewhere/texts.jsonl"), *MIXED[1:], workdir="mixed") == ""
    with pytest.raises(UserError, match=r"other data \(data.path: elsewhere/texts.jsonl -> elsewhere/others.jsonl\)"):
        again(MIXED[0].format("texts.jsonl", "elsewhere/others.jsonl"), *MIXED[1:], workdir="mixed")


def test_data_that_were_mended_in_their_place_are_told_in_a_line(again):
    write_lines(Path("texts.jsonl"), [*LINES[:-1], OTHERS[0]])
    for path in ("texts.jsonl", "./texts.jsonl"):
        said = again(f"data.path={path}")
        assert (
            said.startswith(f"warning: {path}: the first, middle or last record is another than")
            and said.count("\n") == 1
        )


def test_a_checkpoint_of_an_earlier_version_goes_on_with_data_in_their_place_alone(again):
    file = Path("run/checkpoints/1/data/metadata")
    state = json.loads(file.read_text())
    assert len(state.pop("digests")) == 1
    file.write_text(json.dumps(state))
    assert again() == again("data.path=./texts.jsonl") == ""
    with pytest.raises(UserError, match=re.escape("(data.path: ./texts.jsonl -> elsewhere/texts.jsonl)")):
        again("data.path=elsewhere/texts.jsonl")
