"""Adapters on disk: what is saved comes back on its own base, in every form of it, and on no other."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.one_line import message_of
from wedlm_jax import load, save, save_adapter
from wedlm_jax.decode.calibration import Calibration, write_calibration
from wedlm_jax.errors import UserError
from wedlm_jax.hf.adapter import ADAPTER_FILE, WEIGHTS_FILE, with_adapter
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.parameters import params_of
from wedlm_jax.sharding import MeshConfig, make_mesh

from .adapters import BASE, ON_ALL, ON_MASKS, adapted
from .conftest import ORACLE


def same_parameters(model, other):
    ours, theirs = params_of(model.transformer), params_of(other.transformer)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(theirs[name]), err_msg=name)


@pytest.fixture
def saved(tmp_path):
    """An adapter of mask rows in a directory that a test may break."""
    save_adapter(adapted(ON_MASKS), tmp_path / "adapter")
    return tmp_path / "adapter"


def refusal(directory, base=BASE) -> str:
    message = message_of(load, base, "float32", adapter=directory)
    assert str(directory) in message
    return message


def change(directory, name=ADAPTER_FILE, **fields):
    file = directory / name
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


@pytest.mark.parametrize("base", ["wedlm_qwen3", "wedlm_qwen25", "qwen3_plain"])
@pytest.mark.parametrize(
    "adapter", [ON_MASKS, ON_ALL, AdapterConfig(rank=2, alpha=1.5, targets=("down_proj", "k_proj"), rows="mask")]
)
def test_what_is_saved_is_loaded(base, adapter, tmp_path):
    model = adapted(adapter, ORACLE / base / "model")
    save_adapter(model, tmp_path / "adapter")
    again = load(ORACLE / base / "model", "float32", adapter=tmp_path / "adapter")
    same_parameters(model, again)
    ours = dataclasses.replace(again.config.adapter, targets=adapter.targets)
    assert (ours, set(again.config.adapter.targets)) == (adapter, set(adapter.targets))
    assert (again.mask_token_id, again.eos_token_ids) == (model.mask_token_id, model.eos_token_ids)
    assert (tmp_path / "adapter" / "adapter_config.json").exists() == (adapter.rows == "all")


def test_the_file_says_what_it_is(saved):
    described = json.loads((saved / ADAPTER_FILE).read_text())
    assert len(described.pop("base_revision")) == 32
    assert described == {
        "base": str(BASE), "rank": 3, "alpha": 6.0, "targets": list(ON_MASKS.targets), "rows": "mask", "dtype": "float32",
        "mask_token_id": 250, "eos_token_ids": [251],
    }  # fmt: skip
    size = sum(file.stat().st_size for file in saved.iterdir())
    assert size < 0.2 * (BASE / "model.safetensors").stat().st_size


def test_the_ids_that_it_was_trained_with_come_along(tmp_path):
    model = dataclasses.replace(adapted(ON_ALL), mask_token_id=17, eos_token_ids=(3, 5))
    save_adapter(model, tmp_path, base="Qwen/Qwen3-0.6B")
    again = load(BASE, adapter=tmp_path)
    assert (again.mask_token_id, again.eos_token_ids) == (17, (3, 5))
    assert load(BASE, mask_token_id=18, adapter=tmp_path).mask_token_id == 18
    assert json.loads((tmp_path / ADAPTER_FILE).read_text())["base"] == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("arch", ["wedlm", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_export_of_the_base_takes_it(saved, arch, dtype, tmp_path):
    save(load(BASE, dtype), tmp_path / "export", arch)
    for loaded in ("float32", "bfloat16"):
        assert load(tmp_path / "export", loaded, adapter=saved).config.adapter == ON_MASKS


def test_pairs_stay_in_float32_whatever_the_base_is_in(saved):
    params = params_of(load(BASE, "bfloat16", adapter=saved).transformer)
    dtypes = {name: x.dtype.name for name, x in params.items()}
    assert {dtype for name, dtype in dtypes.items() if "lora" in name or "mask" in name} == {"float32"}
    assert dtypes["layers.mlp.up_proj.kernel"] == "bfloat16"


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_over_a_mesh_it_is_cut_as_its_kernels_are(saved):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    model = load(BASE, "float32", adapter=saved, mesh=mesh)
    same_parameters(model, adapted(ON_MASKS))
    assert params_of(model.transformer)["layers.mlp.up_proj.lora_b"].sharding.shard_shape((3, 3, 128)) == (3, 3, 64)
    save_adapter(model, saved)  # the revision of a base that is cut is that of the whole
    assert load(BASE, adapter=saved).config.adapter == ON_MASKS


def test_its_calibration_takes_the_place_of_the_bases(tmp_path):
    calibration = Calibration(0.3, 0.1, 16, 0.01, 0.005, 100, 2.0)
    save_adapter(dataclasses.replace(adapted(ON_MASKS), calibration=calibration), tmp_path / "adapter")
    assert load(BASE, adapter=tmp_path / "adapter").calibration == calibration
    (tmp_path / "adapter" / "decoding.json").unlink()
    base = shutil.copytree(BASE, tmp_path / "base")
    write_calibration(base, calibration, load(base))
    assert load(base).calibration == calibration and load(base, adapter=tmp_path / "adapter").calibration is None


def test_a_model_without_an_adapter_has_none_to_save(tmp_path):
    with pytest.raises(UserError, match="the model has no adapter to save; wedlm_jax.save writes a whole model"):
        save_adapter(load(BASE), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_an_earlier_adapter_is_replaced_and_anything_else_is_not(saved, tmp_path):
    save_adapter(adapted(ON_ALL), saved)
    assert load(BASE, adapter=saved).config.adapter == ON_ALL
    (saved / "README.md").write_text("mine")
    with pytest.raises(UserError, match="adapter: not empty and holds README.md, so it is not replaced"):
        save_adapter(adapted(ON_MASKS), saved)
    with pytest.raises(UserError, match="not empty and holds config.json"):
        save_adapter(adapted(ON_MASKS), shutil.copytree(BASE, tmp_path / "base"))
    assert load(BASE, adapter=saved).config.adapter == ON_ALL


def test_a_whole_export_of_mask_rows_is_refused_and_one_of_all_rows_is_merged(tmp_path):
    with pytest.raises(UserError, match=r"adapter of mask rows \(rows=mask\) cannot be merged"):
        save(adapted(ON_MASKS), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model = adapted(ON_ALL)
    save(model, tmp_path / "out")
    tokens = jnp.arange(20)[None]
    merged = load(tmp_path / "out", "float32")
    assert merged.config.adapter is None
    ours, theirs = (np.asarray(m(tokens, positions=tokens)) for m in (model, merged))
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    before, after = (
        params_of(m.transformer)["layers.attention.o_proj.kernel"] for m in (load(BASE, "float32"), merged)
    )
    assert np.abs(after - before).max() > 0.1


def test_another_base_is_refused(saved, copy_of):
    base = copy_of("wedlm_qwen3")
    tensors = {name: np.array(x) for name, x in load_file(base / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.1
    save_file(tensors, base / "model.safetensors")
    message = refusal(saved, base)
    assert (
        f"trained on {BASE} of revision " in message
        and "load the adapter on the base that it was trained on" in message
    )
    assert "trained on" in refusal(saved, ORACLE / "wedlm_qwen25" / "model")
    assert "trained on" in refusal(saved, copy_of("qwen3_plain"))


def test_a_second_adapter_is_refused(saved):
    with pytest.raises(UserError, match="the model has an adapter already; load its base and one of them"):
        with_adapter(adapted(ON_ALL), saved)


def test_a_wrong_rank_is_one_short_line(saved):
    change(saved, rank=4)
    assert refusal(saved).endswith(f"rank=4, but the pairs of {WEIGHTS_FILE} have rank 3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "adapter.json: rank=0 must be at least 1"),
        ({"rank": "three"}, "adapter.json: rank: "),
        ({"rank": ...}, "adapter.json: rank: field required"),
        ({"alpha": ...}, "adapter.json: alpha: field required"),
        ({"base_revision": ...}, "adapter.json: base_revision: field required"),
        ({"rows": "some"}, "adapter.json: rows: "),
        ({"targets": ["q_proj", "head"]}, "adapter.json: targets"),
        ({"dropout": 0.1}, "adapter.json: unknown field dropout; the fields are base, "),
        ({"mask_token_id": 10**6}, "adapter.json: token id 1000000 is not in the vocabulary"),
        ({"eos_token_ids": [-1]}, "adapter.json: token id -1 is not in the vocabulary"),
        ({"dtype": "bfloat16"}, "adapter.json says dtype=bfloat16, adapter_model.safetensors holds float32"),
        (
            {"targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]},
            "extra base_model.model.model.layers.",
        ),
        ({"rows": "all"}, "extra mask_embedding"),
    ],
)
def test_a_wrong_description_names_its_field(saved, fields, message):
    change(saved, **fields)
    assert message in refusal(saved)


def test_damaged_tensors_are_named(saved):
    tensors = load_file(saved / WEIGHTS_FILE)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    save_file({other: x for other, x in tensors.items() if other != name}, saved / WEIGHTS_FILE)
    assert f"missing {name}" in refusal(saved)
    save_file(tensors | {name: tensors[name][:-1]}, saved / WEIGHTS_FILE)
    assert f"misshapen {name} (is [95, 3], needs [96, 3])" in refusal(saved)
    save_file(tensors | {"extra": tensors[name]}, saved / WEIGHTS_FILE)
    assert "extra extra" in refusal(saved)
    save_file(tensors | {name: np.ones((96, 3), np.int8)}, saved / WEIGHTS_FILE)
    assert "I8" in refusal(saved)
    tensors[name][5, 1] = np.nan
    save_file(tensors, saved / WEIGHTS_FILE)
    assert f"NaN or infinity among the weights of {name};" in refusal(saved)


@pytest.mark.parametrize("keep", [4, 900, -1])
def test_a_truncated_file_is_named(saved, keep):
    file = saved / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{WEIGHTS_FILE}: truncated or not safetensors" in refusal(saved)


@pytest.mark.parametrize("name", [ADAPTER_FILE, WEIGHTS_FILE])
def test_a_pointer_of_git_lfs_is_named(saved, name):
    (saved / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert f"{name}: a pointer of Git LFS" in refusal(saved)


def test_missing_files_are_named(saved, tmp_path):
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(saved / ADAPTER_FILE)
    assert "a whole model and no adapter" in refusal(ORACLE / "wedlm_qwen25" / "model")
    (saved / WEIGHTS_FILE).rename(saved / "adapter_model.bin")
    assert f"no {WEIGHTS_FILE} (adapter_model.bin is pickled, never read here)" in refusal(saved)
    (saved / "adapter_model.bin").unlink()
    assert f"no {WEIGHTS_FILE}; copy or save" in refusal(saved)
    (saved / ADAPTER_FILE).unlink()
    assert "no adapter.json and no adapter_config.json" in refusal(saved)


def test_two_descriptions_that_differ_are_refused(tmp_path):
    save_adapter(adapted(ON_ALL), tmp_path)
    change(tmp_path, "adapter_config.json", lora_alpha=7)
    assert "adapter.json and adapter_config.json describe two adapters" in refusal(tmp_path)
