"""Weights in: identity of the round trip, dtypes, hub ids, one clear line for every way a directory can be broken."""

import json
import shutil
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wedlm_jax.errors import UserError
from wedlm_jax.hf import weights
from wedlm_jax.hf.export import save_hf
from wedlm_jax.hf.weight_map import TABLE, rows
from wedlm_jax.hf.weights import load_hf
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.parameters import init_params, params_of, transformer_from
from wedlm_jax.sharding import MeshConfig, mesh_of_first

from .conftest import ORACLE


def tensors_of(directory) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("max_shard_size", [10**9, 60_000])
def test_hf_to_params_to_hf_is_the_identity(oracle_model, tmp_path, max_shard_size):
    arch = json.loads((oracle_model / "config.json").read_text())["model_type"]
    save_hf(load_hf(oracle_model, "float32"), tmp_path / "out", arch, max_shard_size)
    before, after = tensors_of(oracle_model), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and value.shape == after[name].shape
        assert value.tobytes() == after[name].tobytes(), name


def test_bfloat16_weights_survive_the_round_trip_bit_for_bit(tmp_path):
    model = load_hf(ORACLE / "wedlm_qwen3" / "model", "bfloat16")
    save_hf(model, tmp_path / "a")
    save_hf(load_hf(tmp_path / "a", jnp.bfloat16), tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert load_file(tmp_path / "a" / "model.safetensors")["model.norm.weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", jnp.float32, jnp.bfloat16, np.dtype("float32")])
def test_dtype_sets_parameters_and_compute(dtype):
    model = load_hf(ORACLE / "qwen3_plain" / "model", dtype)
    name = jnp.dtype(dtype).name
    assert model.config.dtype == model.config.param_dtype == name
    assert {p.dtype.name for p in params_of(model.transformer).values()} == {name}


def test_default_dtype_on_cpu_is_float32():
    assert load_hf(ORACLE / "qwen3_plain" / "model").config.dtype == "float32"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ({"platform": "tpu"}, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "7.5"}, "float32"),  # a T4
        ({"platform": "gpu", "compute_capability": "8.0"}, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "12.0"}, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, "bfloat16"),  # AMD's
    ],
)
def test_default_dtype_on_accelerators_is_bfloat16_where_they_multiply_it(monkeypatch, device, dtype):
    monkeypatch.setattr(weights.jax, "devices", lambda: [SimpleNamespace(**device)])
    assert weights.resolve_dtype(None) == dtype


def test_unknown_dtype_is_refused():
    with pytest.raises(
        UserError, match="dtype=float16 is not implemented; choose float32, bfloat16 or, for decoding, int8"
    ):
        load_hf(ORACLE / "qwen3_plain" / "model", "float16")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True), (True, True)])
def test_the_table_names_every_parameter_once_with_its_shape(tied, bias, norm):
    config = ModelConfig(40, 12, 20, 3, 4, 2, 6, tie_word_embeddings=tied, qkv_bias=bias, qk_norm=norm)
    params = jax.eval_shape(lambda: init_params(config, 0))
    shapes = {row.ours: ((config.num_layers,) if row.stacked else ()) + row.our_shape(config) for row in rows(config)}
    assert shapes == {name: value.shape for name, value in params.items()}
    assert len({row.hf for row in TABLE}) == len(TABLE)


def test_parameters_that_do_not_fit_the_config_are_named():
    config = ModelConfig(40, 12, 20, 3, 4, 2, 6)
    params = jax.eval_shape(lambda: init_params(config, 0))
    params["layers.extra"] = params.pop("final_norm.scale")
    with pytest.raises(UserError, match="final_norm.scale, layers.extra"):
        transformer_from(config, params)


def test_missing_extra_and_misshapen_tensors_come_in_one_message(copy_of):
    directory = copy_of("wedlm_qwen3")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    for layer in range(3):
        del tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(96, np.float32)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_hf(directory)
    message = one_line(error)
    assert str(directory) in message
    assert "missing model.layers.{0,1,2}.self_attn.q_norm.weight, model.norm.weight" in message
    assert "extra model.layers.1.self_attn.q_proj.bias" in message
    assert "misshapen model.embed_tokens.weight (is [255, 64], needs [256, 64])" in message


def test_too_many_layers_are_extra_tensors(copy_of):
    with pytest.raises(UserError, match=r"extra model.layers.2.input_layernorm.weight"):
        load_hf(copy_of("wedlm_qwen3", num_hidden_layers=2, layer_types=...))


@pytest.mark.parametrize("keep", [4, 1000, -1])
def test_truncated_file_is_named(copy_of, keep):
    file = copy_of("qwen3_plain") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="model.safetensors: truncated or not safetensors") as error:
        load_hf(file.parent)
    one_line(error)


def test_truncated_shard_is_named(copy_of):
    file = copy_of("wedlm_qwen3_tied_sharded") / "model-00003-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="model-00003-of-00004.safetensors: truncated"):
        load_hf(file.parent)


def test_missing_shard_is_named(copy_of):
    directory = copy_of("wedlm_qwen3_tied_sharded")
    (directory / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(UserError, match="missing shard model-00002-of-00004.safetensors") as error:
        load_hf(directory)
    one_line(error)


def test_weights_that_are_a_link_to_nowhere_are_named(copy_of):
    file = copy_of("wedlm_qwen3") / "model.safetensors"
    file.unlink()
    file.symlink_to("../../blobs/abc")
    with pytest.raises(
        UserError, match="model.safetensors: leads to ../../blobs/abc, which is not there; copy"
    ) as error:
        load_hf(file.parent)
    one_line(error)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_only_points_at_its_contents_is_named(copy_of, name):
    file = copy_of("qwen3_plain") / name
    file.unlink(missing_ok=True)
    file.symlink_to("../../blobs/abc")
    with pytest.raises(UserError, match=f"{name}: leads to ../../blobs/abc, which is not there; copy"):
        load_hf(file.parent)
    file.unlink()
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 1192135096\n")
    with pytest.raises(
        UserError, match=f"{name}: a pointer of Git LFS in the place of the file; git lfs pull"
    ) as error:
        load_hf(file.parent)
    one_line(error)


def test_missing_index_is_named(copy_of):
    directory = copy_of("wedlm_qwen3_tied_sharded")
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="model.safetensors.index.json is not; copy the index too"):
        load_hf(directory)


def test_missing_index_entry_is_named(copy_of):
    directory = copy_of("wedlm_qwen3_tied_sharded")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"index.json: has no entry for model.norm.weight of {shard}") as error:
        load_hf(directory)
    one_line(error)


def test_index_that_places_a_tensor_wrongly_is_named(copy_of):
    directory = copy_of("wedlm_qwen3_tied_sharded")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00004.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match="places model.norm.weight in model-00001-of-00004.safetensors, which does not hold"
    ):
        load_hf(directory)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": 1}}'])
def test_unreadable_index_is_named(copy_of, text):
    directory = copy_of("wedlm_qwen3_tied_sharded")
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="model.safetensors.index.json: "):
        load_hf(directory)


def test_directory_without_weights_and_pickled_weights_are_named(copy_of):
    directory = copy_of("qwen3_plain")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no model.safetensors and no model.safetensors.index.json"):
        load_hf(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="only pickled weights"):
        load_hf(directory)


def test_missing_config_is_named(copy_of):
    directory = copy_of("qwen3_plain")
    (directory / "config.json").unlink()
    with pytest.raises(UserError, match="config.json: no such file"):
        load_hf(directory)


@pytest.mark.parametrize("mesh", [None, MeshConfig(tensor=2)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(copy_of, value, mesh):
    file = copy_of("qwen3_plain") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"NaN or infinity among the weights of model.layers\..*mlp.up_proj.weight"
    ) as error:
        load_hf(file.parent, mesh=None if mesh is None else mesh_of_first(mesh))
    one_line(error)


def test_quantised_tensors_are_refused_by_name(copy_of):
    directory = copy_of("qwen3_plain")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(48, np.int8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match="tensor model.norm.weight is stored as I8"):
        load_hf(directory)


def test_a_tied_head_may_be_stored_too_but_only_as_the_same_matrix(copy_of):
    directory = copy_of("wedlm_qwen25")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, directory / "model.safetensors")
    assert load_hf(directory).transformer.lm_head is None
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        UserError, match="ties the head to the embedding, but lm_head.weight and model.embed_tokens.weight differ"
    ):
        load_hf(directory)


def test_an_untied_head_must_be_there(copy_of):
    with pytest.raises(UserError, match="missing lm_head.weight"):
        load_hf(copy_of("wedlm_qwen25", tie_word_embeddings=False))


def test_a_derived_buffer_of_old_checkpoints_is_no_mismatch(copy_of):
    directory = copy_of("qwen2_plain")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    save_file(tensors, directory / "model.safetensors")
    load_hf(directory)


def test_a_hub_id_is_fetched_only_where_no_local_path_can_be_meant(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def fake(repo, allow_patterns, **options):
        asked.append((repo, "*.safetensors" in allow_patterns))
        assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in allow_patterns)
        assert "decoding.json" in allow_patterns  # what `calibrate` found
        return str(ORACLE / "qwen3_plain" / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    assert load_hf("owner/name").config.vocab_size == 220
    (tmp_path / "exports").mkdir()
    for local in ("exports/none", "runs/none", "./owner/name", "/owner/name", "name", "a/b/c", tmp_path / "owner"):
        with pytest.raises(UserError, match="no such directory"):
            load_hf(local)
    assert asked == [("owner/name", False), ("owner/name", True)]  # config.json and the like before the weights
    shutil.copytree(ORACLE / "qwen2_plain" / "model", tmp_path / "owner" / "name")
    assert load_hf("owner/name").config.vocab_size == 212
    assert asked == [("owner/name", False), ("owner/name", True)]  # config.json and the like before the weights


def test_a_hub_failure_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"owner/name: no such directory, and not fetched .*\(no route\)") as error:
        load_hf("owner/name")
    one_line(error)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "accept terms: do so at https://huggingface.co/owner/name, then log in by hf auth login"),
        ("RepositoryNotFoundError", "no such repository of the Hugging Face hub that you may read; mend the name, or"),
    ],
)
def test_a_repository_that_may_not_be_read_is_told_with_the_mend(kind, message, monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise getattr(huggingface_hub.errors, kind)("401 Client Error", response=mock.Mock())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=f"^owner/name: .*{message}") as error:
        load_hf("owner/name")
    one_line(error)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "owner/name: no config.json, as in repositories of GGUF files; name the repository of the original"),
        ({"model_type": "qwen3_moe"}, "owner/name/config.json: model_type='qwen3_moe' is not implemented"),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}, "quantization_config=.* is not impl"),
    ],
)
def test_no_weights_of_a_hub_model_are_fetched_before_its_config_is_accepted(monkeypatch, tmp_path, config, message):
    import huggingface_hub

    def fake(repo, allow_patterns, **options):
        assert "*.safetensors" not in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as error:
        load_hf("owner/name")
    one_line(error)


def test_weights_in_folders_of_a_hub_model_are_not_fetched(monkeypatch, tmp_path):
    """Checkpoints that a trainer left there, or the same weights in another format."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    held = ["model.safetensors", "checkpoint-500/model.safetensors", "additional_chat_templates/rag.jinja", "README.md"]
    fetched = []

    def fake(repo, **patterns):
        fetched.append(list(filter_repo_objects(held, **patterns)))
        return str(ORACLE / "qwen3_plain" / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    load_hf("owner/name")
    assert fetched[-1] == ["model.safetensors", "additional_chat_templates/rag.jinja"]


def test_an_adapter_of_the_hub_is_told_to_be_one(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **patterns: str(tmp_path))
    with pytest.raises(
        UserError, match="^owner/name: an adapter and no model; .* hf download owner/name --local-dir DIR"
    ):
        load_hf("owner/name")


def test_a_hub_model_without_safetensors_is_told(monkeypatch, tmp_path):
    import huggingface_hub

    shutil.copy(ORACLE / "qwen3_plain" / "model" / "config.json", tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **patterns: str(tmp_path))
    with pytest.raises(UserError, match=r"owner/name: no safetensors \(GGUF, pickled or, offline, never fetched\)"):
        load_hf("owner/name")
