"""Every command that loads a model takes --adapter, and says what is wrong with it before anything runs; --dtype, and --mesh."""

import dataclasses
import importlib
import json
import re

import numpy as np
import pytest

from tests.conftest import FULL
from tests.evals.models import tiny_model
from tests.hf.adapters import with_noise
from wedlm_jax import calibrate, load, pretrained, save, save_adapter
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.data.tokenizer import save_tokenizer
from wedlm_jax.decode.calibration import Calibration
from wedlm_jax.decode.prompts import prompt_text
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment
from wedlm_jax.model.adapter import AdapterConfig, split_adapter
from wedlm_jax.model.handle import CALIBRATION_FILE
from wedlm_jax.model.parameters import params_of
from wedlm_jax.model_file import ModelFile
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.sharding import MeshConfig
from wedlm_jax.train_state import new_state
from wedlm_jax.workdir import base_of

COMMANDS = {
    "generate.__main__": ["--prompt", "Anna has"],
    "chat.__main__": ["--plain"],
    "serve.__main__": ["--port", "0"],
    "evaluate": ["--task", "counting", "--limit", "1"],
    "bench": ["--tasks", "counting", "--batches", "1", "--prompts", "8", "--outputs", "4"],
    "tradeoff": ["--limit", "1"],
    "cacheability": [],
    "open_ended": [],
    "calibrate": ["--data", "in.jsonl"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """base and adapter, as directories; the working directory."""
    monkeypatch.chdir(tmp_path)
    save(tiny_model(), "base")
    save_adapter(with_noise(load("base"), AdapterConfig(rank=2)), "adapter")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Anna has 3 apples."}) + "\n")
    return tmp_path


def run(monkeypatch, command, *flags):
    module = importlib.import_module(f"wedlm_jax.{command}")
    monkeypatch.setattr("sys.argv", [command, *map(str, flags)])
    try:
        module.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_passes_it_on(command, folder, monkeypatch, capsys):
    file = folder / "adapter" / "adapter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_revision": "0" * 32}))
    assert run(monkeypatch, command, "--model", "base", "--adapter", "adapter", *COMMANDS[command]) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert printed.startswith("error: adapter: trained on base of revision 00000000")


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"evaluate"}))  # which measures in float32 alone
def test_every_command_loads_its_model_in_the_dtype_that_is_given(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt": "Anna"}\n')
    asked = []

    def load(path, dtype=None, **_):
        asked.append((path, dtype))
        raise UserError("enough")

    monkeypatch.setattr(pretrained, "load", load)
    # What is measured of rounded weights would be stored beside those that they were rounded from.
    dtypes = ["bfloat16"] if command == "calibrate" else ["bfloat16", "int8"]
    for flags in ([], *(["--dtype", dtype] for dtype in dtypes)):
        assert run(monkeypatch, command, "--model", "base", *flags, *COMMANDS[command]) == 2
    assert asked == [("base", dtype) for dtype in (None, *dtypes)], capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_decodes_over_the_devices_that_are_given(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt": "Anna"}\n')
    asked = []

    def load(path, dtype=None, *, mesh, **_):
        asked.append(mesh)
        raise UserError("enough")

    monkeypatch.setattr(pretrained, "load", load)
    for flags in ([], ["--mesh.tensor", "2", "--mesh.data", "-1"]):
        assert run(monkeypatch, command, "--model", "base", *flags, *COMMANDS[command]) == 2
    assert asked == [MeshConfig(data=1), MeshConfig(data=-1, tensor=2)]


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"bench"}))  # whose prompts are plain text
def test_every_command_that_reads_messages_takes_variables_of_their_template(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt": "Anna"}\n')
    asked = []

    def load(path, dtype=None, *, chat_template_kwargs, **_):
        asked.append(chat_template_kwargs)
        raise UserError("enough")

    monkeypatch.setattr(pretrained, "load", load)
    messages = {"generate.__main__": ["--message", "Anna has"], "chat.__main__": []}.get(command, COMMANDS[command])
    for flags in ([], ["--chat-template-kwargs", '{"enable_thinking": false}'], ["--chat-template-kwargs", "false"]):
        assert run(monkeypatch, command, "--model", "base", *flags, *messages) == 2
    assert asked == [None, {"enable_thinking": False}]
    assert "error: --chat-template-kwargs='false': must be an object" in capsys.readouterr().err


@pytest.mark.skipif(not FULL, reason="compiles two decoders; launch/test.sh --full")
def test_verified_generation_with_it_prints_the_text_of_the_base(folder, monkeypatch, capsys):
    texts = []
    for flags in (["--decoder", "ar"], ["--decoder", "verified", "--adapter", "adapter"]):
        flags = [*flags, "--max-new-tokens", "8", "--prompt", "Anna has"]
        assert run(monkeypatch, "generate.__main__", "--model", "base", *flags) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_calibration_is_stored_beside_the_adapter(folder, monkeypatch):
    found = Calibration(0.3, 0.1, 16, 0.01, 0.005, 100, 2.0)
    monkeypatch.setattr(calibrate, "measure_thresholds", lambda *_: [found])
    flags = ["--data", "in.jsonl", "--max-disagreement", "0.01"]
    assert run(monkeypatch, "calibrate", "--model", "base", "--adapter", "adapter", *flags) == 0
    assert not (folder / "base" / CALIBRATION_FILE).exists()
    assert load("base", adapter="adapter").calibration == found


def test_convert_merges_an_adapter_of_all_rows_or_writes_it_alone(folder, monkeypatch, capsys):
    model = with_noise(load("base"), AdapterConfig(rank=2, rows="all"))
    save_adapter(model, "lora")
    convert = ["convert", "--from", "base", "--adapter"]
    assert run(monkeypatch, *convert, "lora", "--to", "merged", "--arch", "qwen3") == 0
    merged = load("merged")
    assert merged.config == dataclasses.replace(model.config, adapter=None)
    capsys.readouterr()
    assert run(monkeypatch, *convert, "lora", "--only-adapter", "--to", "again") == 0
    assert capsys.readouterr().out.startswith("wrote again: an adapter of all rows, rank 2, ")
    for name in ("adapter_model.safetensors", "adapter_config.json", "adapter.json"):
        assert (folder / "again" / name).read_bytes() == (folder / "lora" / name).read_bytes()
    assert run(monkeypatch, *convert, "adapter", "--to", "out") == 2
    assert "error: an adapter of mask rows (rows=mask) cannot be merged" in capsys.readouterr().err
    assert run(monkeypatch, "convert", "--from", "base", "--only-adapter", "--to", "out") == 2
    assert "error: the model has no adapter to save" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_mask_rows_are_refused_before_any_weights_are_read(folder, monkeypatch, capsys):
    """Of a workdir, and beside a base."""
    config = dataclasses.replace(load("base").config, adapter=AdapterConfig(rank=2))
    monkeypatch.setattr(pretrained, "load", lambda *_, **__: pytest.fail("loaded it"))
    for flags in (["--adapter", "adapter"], []):
        assert run(monkeypatch, "convert", "--from", "base", "--to", "out", *flags) == 2
        assert "error: an adapter of mask rows (rows=mask) cannot be merged" in capsys.readouterr().err
        monkeypatch.setattr(pretrained, "config_of", lambda path: config)


def test_an_adapter_that_convert_writes_beside_a_model_of_the_hub_names_that_and_no_folder_of_its_cache(
    folder, monkeypatch
):
    save_adapter(with_noise(load("base"), AdapterConfig(rank=2, rows="all")), "lora")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder / "base"))
    assert (
        run(monkeypatch, "convert", "--from", "owner/name", "--adapter", "lora", "--only-adapter", "--to", "out") == 0
    )
    assert json.loads((folder / "out" / "adapter.json").read_text())["base"] == "owner/name"
    assert json.loads((folder / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "owner/name"


def begun(workdir, rows="mask"):
    """A workdir that trained an adapter beside `base`, named so; the model of both."""
    model = with_noise(load("base"), AdapterConfig(rank=2, rows=rows))
    base, own = split_adapter(params_of(model.transformer))
    workdir.mkdir(parents=True)
    beside = base_of(Experiment(name="adapter", init_from="base"), model, model.config)
    ModelFile(model.config, 3, (5,), beside, "base").write(workdir)
    with Checkpoints(workdir, keep=1) as checkpoints:
        checkpoints.save(new_state(base | own, OptimizerConfig()), 1, {}, {})
    return model


def test_the_base_is_found_from_any_folder_and_where_it_was_moved_with_the_workdir(folder, monkeypatch):
    begun(folder / "runs" / "a")
    file, elsewhere = folder / "runs" / "a" / "model.json", folder / "elsewhere"
    written = ModelFile.read(file.parent)
    assert written.base.path == str(folder / "base")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load("../runs/a").config.adapter is not None
    for name in ("base", "runs"):
        (folder / name).rename(elsewhere / name)
    earlier = dataclasses.replace(written, base=dataclasses.replace(written.base, path="base"), init_from=None)
    for described in (written, earlier):
        described.write(elsewhere / "runs" / "a")
        monkeypatch.chdir(elsewhere)
        assert load("runs/a").source == "base"
        monkeypatch.chdir("/")
        assert load(elsewhere / "runs" / "a").source == "base"


def test_an_adapter_whose_base_is_gone_says_so(folder):
    begun(folder / "run")
    (folder / "base").rename(folder / "renamed")
    message = f"run: an adapter beside {folder}/base, which is not there; bring it back, or name the base: --model BASE"
    with pytest.raises(UserError, match=f"^{re.escape(message)} --adapter run$"):
        load("run")
    assert load("renamed", adapter="run").config.adapter is not None


def test_a_base_of_the_hub_keeps_its_name(folder):
    model = with_noise(load("base"), AdapterConfig(rank=2))
    assert base_of(Experiment(name="adapter", init_from="owner/name"), model, model.config).path == "owner/name"


def test_a_workdir_that_trained_one_is_taken_as_it_is_and_its_adapter_is_taken_out(folder, monkeypatch, capsys):
    """From the workdir itself, from it as --adapter, and from the directory that convert writes, comes the same model."""
    model = begun(folder / "run")
    flags = ["--from", "run", "--only-adapter", "--to", "taken"]
    assert run(monkeypatch, "convert", *flags) == 0
    for found in (load("run"), load("base", adapter="run"), load("base", adapter="taken")):
        assert (found.config.adapter, found.mask_token_id, found.eos_token_ids) == (model.config.adapter, 3, (5,))
        for name, x in params_of(found.transformer).items():
            np.testing.assert_array_equal(x, params_of(model.transformer)[name], err_msg=name)
    assert json.loads((folder / "taken" / "adapter.json").read_text())["base"] == "base"
    save(tiny_model(1), "other")
    with pytest.raises(UserError, match="other is of revision .* the adapter was trained beside it at revision"):
        load("other", adapter="run")
    ModelFile(load("base").config, 3, (5,)).write(folder / "run")
    with pytest.raises(UserError, match="run: a whole model and no adapter; load it as the model itself"):
        load("base", adapter="run")


@pytest.mark.parametrize("rows", ["mask", "all"])
def test_an_adapter_brings_the_chat_template_that_it_was_trained_with(folder, rows):
    """Beside its base as from its workdir, and merged into it."""
    begun(folder / "run", rows)
    trained, asked = load("base").tokenizer, [{"role": "user", "content": "How many?"}]
    trained.chat_template = "{{ messages[0]['content'] }} Think not."
    save_tokenizer(trained, folder / "run" / "tokenizer")
    (folder / "run" / "tokenizer" / "generation_config.json").write_text('{"temperature": 0.7}')
    save_adapter(load("run"), "taken")
    save_adapter(load("base", adapter="taken"), "taken")  # over itself, from whose files it comes
    models = [load("run"), load("base", adapter="run"), load("base", adapter="taken")]
    if rows == "all":
        save(models[-1], "merged")
        models.append(load("merged"))
        assert json.loads((folder / "merged" / "generation_config.json").read_text())["temperature"] == 0.7
    for model in models:
        assert prompt_text(model, asked, "prompt") == "How many? Think not."
    assert prompt_text(load("base"), asked, "prompt") != "How many? Think not."


def test_an_experiment_has_its_own(monkeypatch, capsys):
    for flag, value in (("--adapter", "x"), ("--chat-template-kwargs", "{}")):
        assert run(monkeypatch, "evaluate", "--exp", "quickstart", flag, value) == 2
        assert f"error: {flag} goes with --model DIR; an experiment has its own" in capsys.readouterr().err
