"""Weights out: shards and index, carried files, atomic replacement, special ids."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from wedlm_jax.errors import UserError
from wedlm_jax.hf import export
from wedlm_jax.hf.export import save_hf
from wedlm_jax.hf.weights import load_hf

from .conftest import ORACLE

MODEL = ORACLE / "wedlm_qwen3" / "model"


def names(directory) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_shards_stay_under_the_limit_and_the_index_lists_every_tensor(tmp_path):
    limit = 70_000  # the largest tensor has 65,536 bytes
    save_hf(load_hf(MODEL), tmp_path / "out", max_shard_size=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "out" / file)
        assert {name for name, at in index["weight_map"].items() if at == file} == tensors.keys()
        size = sum(t.nbytes for t in tensors.values())
        assert size <= limit
        total += size
    assert (
        index["metadata"]["total_size"]
        == total
        == sum(t.nbytes for t in load_file(MODEL / "model.safetensors").values())
    )
    count = len(set(index["weight_map"].values()))
    assert f"model-00001-of-{count:05d}.safetensors" in names(tmp_path / "out")
    assert "model.safetensors" not in names(tmp_path / "out")


def test_small_models_are_one_file_without_index(tmp_path):
    save_hf(load_hf(MODEL), tmp_path / "deep" / "out")
    assert names(tmp_path / "deep" / "out") == {"config.json", "generation_config.json", "model.safetensors"}
    assert names(tmp_path / "deep") == {"out"}


def test_config_keeps_ids_and_generation_config_keeps_what_was_there(copy_of, tmp_path):
    source = copy_of("wedlm_qwen3", bos_token_id=1, pad_token_id=2, eos_token_id=3)
    (source / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [3, 4]}')
    (source / "tokenizer_config.json").write_text('{"x": 1}')
    model = load_hf(source)
    assert model.eos_token_ids == (3, 4)
    save_hf(model, tmp_path / "out", "qwen3")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "pad", "eos", "mask")] == [1, 2, 3, 250]
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert kept == {"temperature": 0.7, "eos_token_id": [3, 4]}
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"x": 1}'
    again = load_hf(tmp_path / "out")
    assert (again.eos_token_ids, again.mask_token_id, again.config) == ((3, 4), 250, model.config)


def test_changed_end_ids_are_written(tmp_path):
    model = load_hf(MODEL)
    model.eos_token_ids = (9, 10)
    save_hf(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [9, 10]
    assert load_hf(tmp_path / "out").eos_token_ids == (9, 10)


def test_of_a_model_without_end_ids_no_file_names_one(copy_of, tmp_path):
    source = copy_of("wedlm_qwen3", eos_token_id=3)
    (source / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": [3, 4]}')
    save_hf(dataclasses.replace(load_hf(source), eos_token_ids=()), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.7}
    assert load_hf(tmp_path / "out").eos_token_ids == ()


def test_a_wedlm_export_always_states_bias_and_norm(oracle_model, tmp_path):
    model = load_hf(oracle_model)
    save_hf(model, tmp_path / "out", "wedlm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["attention_bias"], config["qk_norm"]) == (model.config.qkv_bias, model.config.qk_norm)
    assert config["model_type"] == "wedlm" and load_hf(tmp_path / "out").config == model.config


def test_an_arch_that_does_not_fit_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match="choose qwen3 or wedlm"):
        save_hf(load_hf(MODEL), tmp_path / "out", "qwen2")
    assert names(tmp_path) == set()


def test_an_earlier_export_is_replaced_whole(tmp_path):
    save_hf(load_hf(MODEL), tmp_path / "out", max_shard_size=70_000)
    save_hf(load_hf(tmp_path / "out"), tmp_path / "out")
    assert names(tmp_path / "out") == {"config.json", "generation_config.json", "model.safetensors"}
    assert names(tmp_path) == {"out"}
    load_hf(tmp_path / "out")


def test_an_export_that_was_calibrated_is_replaced_with_its_calibration(tmp_path):
    save_hf(load_hf(MODEL), tmp_path / "out")
    (tmp_path / "out" / "decoding.json").write_text("{}")
    save_hf(load_hf(MODEL), tmp_path / "out")
    assert names(tmp_path / "out") == {"config.json", "generation_config.json", "model.safetensors"}


def test_what_is_not_an_export_of_ours_is_not_replaced(copy_of, tmp_path):
    model = load_hf(MODEL)
    other = copy_of("qwen3_plain")
    with pytest.raises(UserError, match="not empty and is not an export of wedlm_jax"):
        save_hf(model, other)
    save_hf(model, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and holds notes.txt"):
        save_hf(model, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save_hf(model, tmp_path / "file")
    assert load_hf(other).config.vocab_size == 220


def test_an_empty_directory_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    save_hf(load_hf(MODEL), tmp_path / "out")
    load_hf(tmp_path / "out")


def test_a_failed_export_keeps_the_earlier_one(tmp_path, monkeypatch):
    save_hf(load_hf(MODEL), tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "copy_tokenizer_files", full)
    with pytest.raises(UserError, match="writing failed \\(No space left on device\\)"):
        save_hf(load_hf(MODEL), tmp_path / "out")
    assert names(tmp_path) == {"out"} and (tmp_path / "out" / "config.json").read_bytes() == before


def test_the_earlier_export_comes_back_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    save_hf(load_hf(MODEL), tmp_path / "out")
    rename = Path.rename

    def only_away(path, target):
        if path.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", only_away)
    with pytest.raises(UserError, match="writing failed \\(Input/output error\\)"):
        save_hf(load_hf(MODEL), tmp_path / "out")
    assert names(tmp_path) == {"out"}
    load_hf(tmp_path / "out")


def killed_export(monkeypatch, target, replacing=False):
    """What is left of one: nobody cleans up, and the lock goes with the process."""
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt), export.whole_directory(target) as staging:
        killed.setattr(export, "_put_back_and_remove", lambda written, target: None)
        (staging / "half").write_text("")
        if not replacing:
            raise KeyboardInterrupt
        rename = Path.rename
        killed.setattr(Path, "rename", lambda path, to: interrupt() if path == staging else rename(path, to))


def interrupt():
    raise KeyboardInterrupt


def test_what_a_killed_export_left_is_removed_by_the_next_one_and_what_another_process_writes_is_not(
    monkeypatch, tmp_path
):
    out, holds = (
        tmp_path / "out",
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, 2); print(flush=True)",
    )
    killed_export(monkeypatch, out)
    left = names(tmp_path)
    assert len(left) == 2
    [lock] = tmp_path.glob(".out.*.lock")
    with subprocess.Popen(
        [sys.executable, "-c", f"{holds}; sys.stdin.read()", lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with export.whole_directory(out):
            assert left < names(tmp_path)
        other.stdin.close()
    with export.whole_directory(tmp_path / "out.other"):
        pass
    assert names(tmp_path) == {"out", "out.other", *left}
    with export.whole_directory(out):
        assert not left & names(tmp_path)
    assert names(tmp_path) == {"out", "out.other"}


def test_an_export_that_was_moved_away_when_the_next_one_was_killed_is_put_back(monkeypatch, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "earlier").write_text("")
    killed_export(monkeypatch, out, replacing=True)
    assert not out.exists()
    with pytest.raises(KeyboardInterrupt), export.whole_directory(out):
        raise KeyboardInterrupt
    assert names(tmp_path) == {"out"} and names(out) == {"earlier"}


def test_every_chat_template_goes_along(copy_of, tmp_path):
    source = copy_of("wedlm_qwen3")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for _ in range(2):  # over an earlier one as well
        save_hf(load_hf(source), tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


def test_a_link_stays_one_and_the_folder_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "far" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "far" / "real")
    for _ in range(2):
        save_hf(load_hf(MODEL), tmp_path / "out")
        assert (
            (tmp_path / "out").is_symlink()
            and names(tmp_path) == {"out", "far"}
            and names(tmp_path / "far") == {"real"}
        )
    load_hf(tmp_path / "out")


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(export.os.path, "ismount", lambda path: path == tmp_path / "disk")
    monkeypatch.setattr(export, "whole_directory", lambda target: pytest.fail("wrote something"))
    with pytest.raises(UserError, match="disk: is a mount point, .*; name a folder inside it"):
        save_hf(load_hf(MODEL), tmp_path / "disk")


@pytest.mark.parametrize("path", [".", "../here"])
def test_the_current_folder_is_refused_before_anything_is_written(tmp_path, monkeypatch, path):
    """It would be replaced under who is in it, who would then see an empty one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(
        UserError, match="here: is the current folder, which cannot be replaced whole; name a folder inside"
    ):
        save_hf(load_hf(MODEL), path)
    assert names(tmp_path) == {"here"} and not any(tmp_path.joinpath("here").iterdir())
