"""The convert command: any arch that fits, exact weights, proof in torch, one clear line otherwise."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.hf.adapters import ON_ALL, adapted
from wedlm_jax import convert as command
from wedlm_jax.convert import Convert, convert, verify
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.pretrained import load, save, save_adapter
from wedlm_jax.version import __version__

ORACLE = Path(__file__).parent / "fixtures" / "oracle"
QWEN3 = ORACLE / "wedlm_qwen3" / "model"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def run(monkeypatch, *arguments) -> int:
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    try:
        command.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("arch", ["wedlm", "qwen3"])
def test_writes_the_arch_with_identical_tensors(monkeypatch, capsys, tmp_path, arch):
    assert run(monkeypatch, "--from", QWEN3, "--to", tmp_path / "out", "--arch", arch) == 0
    assert f"wrote {tmp_path / 'out'}: {arch}, float32, 0.6 MB" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == arch
    before, after = load_file(QWEN3 / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_keeps_bfloat16_weights_as_they_are_stored(monkeypatch, capsys, tmp_path):
    save(load(QWEN3, "bfloat16"), tmp_path / "half")
    assert run(monkeypatch, "--from", tmp_path / "half", "--to", tmp_path / "out") == 0
    assert "bfloat16" in capsys.readouterr().out
    assert (tmp_path / "half" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_writes_the_dtype_that_is_asked_for(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--from", QWEN3, "--to", tmp_path / "out", "--dtype", "bfloat16") == 0
    assert f"wrote {tmp_path / 'out'}: wedlm, bfloat16, 0.3 MB" in capsys.readouterr().out
    stored, written = (load_file(folder / "model.safetensors") for folder in (QWEN3, tmp_path / "out"))
    for name, x in written.items():
        np.testing.assert_array_equal(x, stored[name].astype(x.dtype))
        assert x.dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", QWEN3, "--to", "out", "--arch", "qwen2"], "error: arch=qwen2 has a qkv bias and no qk norm"),
        (["--from", "runs/none", "--to", "out"], "error: runs/none: no such directory; python -m wedlm_jax.train"),
        (["--from", QWEN3, "--to", "taken"], "error: "),
        (
            ["--from", QWEN3, "--to", "out", "--only-adapter", "--verify"],
            "error: --verify is for whole models and --only-adapter writes none; leave one of the two out",
        ),
        (
            ["--from", QWEN3, "--to", "out", "--only-adapter", "--dtype", "bfloat16"],
            "error: --dtype bfloat16 is for whole models and --only-adapter writes none",
        ),
        (
            ["--from", QWEN3, "--to", "out", "--only-adapter", "--arch", "qwen3"],
            "error: --arch qwen3 is for whole models and --only-adapter writes none",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    assert run(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message) and printed.count("\n") == 1
    assert not (tmp_path / "out").exists() and (tmp_path / "taken" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", QWEN3, "--to", "out", "--arch", "llama"], "arch=llama has no qkv bias and no qk norm"),
        (["--from", "owner/name", "--to", "taken"], "taken: not empty and holds thesis.tex"),
    ],
)
def test_what_cannot_be_written_is_told_before_weights_are_fetched_or_read(
    monkeypatch, capsys, tmp_path, arguments, message
):
    for name in ("locate", "load") if arguments[1] != QWEN3 else ("load",):
        monkeypatch.setattr(command.pretrained, name, lambda *given, **named: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    assert run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_the_arch_is_that_of_the_directory_unless_one_is_named(monkeypatch, capsys, tmp_path):
    plain = ORACLE / "qwen3_plain" / "model"
    for named, declared in (((), "qwen3"), (("--arch", "wedlm"), "wedlm")):
        assert run(monkeypatch, "--from", plain, "--to", tmp_path / "out", *named) == 0
        assert f"wrote {tmp_path / 'out'}: {declared}, float32" in capsys.readouterr().out
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == declared


@pytest.mark.parametrize(
    ("stored", "written", "adapter", "read"),
    [
        ("bfloat16", "bfloat16", False, "bfloat16"),
        ("float32", "bfloat16", False, "bfloat16"),
        ("bfloat16", "float32", False, "float32"),
        ("bfloat16", "bfloat16", True, "bfloat16"),  # sums are of float32, and rounded once, in any case
        ("float32", "bfloat16", True, "float32"),  # else its weights would be rounded too
        ("bfloat16", "float32", True, "float32"),
    ],
)
def test_weights_are_read_no_wider_than_they_are_written_where_they_are_rounded_once(
    monkeypatch, tmp_path, stored, written, adapter, read
):
    asked = []

    def load_nothing(source, dtype, adapter):
        asked.append(dtype)
        raise UserError("enough")

    monkeypatch.setattr(command.pretrained, "load", load_nothing)
    monkeypatch.setattr(command.pretrained, "exact_dtype", lambda directory: stored)
    monkeypatch.setattr(command.pretrained, "adapter_of", lambda path: AdapterConfig(rows="all"))
    with pytest.raises(UserError, match="enough"):
        convert(Convert(str(QWEN3), tmp_path / "out", dtype=written, adapter="adapter" if adapter else None))
    assert asked == [read]


def test_an_unknown_arch_is_refused(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--from", QWEN3, "--to", tmp_path / "out", "--arch", "llama") == 2
    assert "llama" in capsys.readouterr().err


def test_version_is_told_without_any_other_flag(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"wedlm_jax {__version__}\n"


def test_verify_without_torch_says_how_to_get_it_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--verify needs torch, .*pip install torch$"):
        convert(Convert(str(QWEN3), tmp_path / "out", verify=True))
    assert not (tmp_path / "out").exists()


@needs_torch
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("wedlm_qwen3", "wedlm"),
        ("wedlm_qwen25", "wedlm"),
        ("wedlm_qwen25", "qwen2"),
        ("wedlm_qwen3_tied_sharded", "qwen3"),
    ],
)
def test_verify_compares_both_sides_in_torch(capsys, tmp_path, name, arch):
    source = ORACLE / name / "model"
    convert(Convert(str(source), tmp_path / "out", arch, verify=True))
    printed = capsys.readouterr().out
    assert f"verified {tmp_path / 'out'}: logits of torch and wedlm_jax differ by at most" in printed
    assert f"verified {source}: " in printed


@needs_torch
def test_a_merged_adapter_is_verified_too(capsys, tmp_path):
    save_adapter(adapted(ON_ALL), tmp_path / "adapter")
    convert(Convert(str(QWEN3), tmp_path / "out", "qwen3", verify=True, adapter=str(tmp_path / "adapter")))
    printed = capsys.readouterr().out
    assert (
        f"verified {tmp_path / 'out'}: logits of torch and wedlm_jax" in printed and f"verified {QWEN3}" not in printed
    )


@needs_torch
def test_of_another_dtype_what_was_written_is_verified_alone(capsys, tmp_path):
    convert(Convert(str(QWEN3), tmp_path / "out", "qwen3", "bfloat16", verify=True))
    printed = capsys.readouterr().out
    assert f"verified {tmp_path / 'out'}: logits of torch" in printed and f"verified {QWEN3}" not in printed


@needs_torch
def test_verify_fails_where_the_export_differs(tmp_path):
    save(load(QWEN3, "float32"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = {name: np.array(value) for name, value in load_file(file).items()}
    tensors["model.layers.1.self_attn.k_norm.weight"][0] *= 1.05
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="out: logits of torch and wedlm_jax differ by at most .* \\(allowed"):
        verify(load(QWEN3, "float32"), tmp_path / "out")
