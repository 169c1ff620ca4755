"""Weights straight into shards: the same parameters as by the plain load, and no byte read that no device of ours holds."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wedlm_jax.errors import UserError
from wedlm_jax.hf.sharded import same_tensors
from wedlm_jax.hf.shards import StoredTensors
from wedlm_jax.hf.weights import load_hf
from wedlm_jax.model.parameters import params_of
from wedlm_jax.pretrained import load
from wedlm_jax.sharding import MeshConfig, make_mesh

from .conftest import ORACLE

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")
MESHES = [MeshConfig(data=1, fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=2, tensor=4)]


@pytest.mark.parametrize("mesh_config", MESHES[:2], ids=str)
def test_the_shards_are_those_of_the_plain_load(oracle_model, mesh_config):
    mesh = make_mesh(mesh_config)
    plain = params_of(load(oracle_model, "float32").transformer)
    sharded = params_of(load(oracle_model, "float32", mesh=mesh).transformer)
    assert plain.keys() == sharded.keys()
    for name, value in plain.items():
        assert len(sharded[name].sharding.device_set) == 8
        np.testing.assert_array_equal(sharded[name], value, err_msg=name)


@pytest.mark.parametrize("mesh_config", MESHES, ids=str)
def test_no_read_is_larger_than_its_shard_and_nothing_is_read_twice(mesh_config, monkeypatch):
    directory = ORACLE / "qwen3_plain" / "model"
    held = params_of(load_hf(directory, "float32", mesh=make_mesh(mesh_config)).transformer)
    largest = {name: value.addressable_shards[0].data.nbytes for name, value in held.items()}
    reads: dict[str, list[int]] = {}
    read_part = StoredTensors.read_part

    def counted(self, name, part):
        assert part, f"{name} is read whole"
        array = read_part(self, name, part)
        reads.setdefault(name, []).append(array.size * 4)
        return array

    monkeypatch.setattr(StoredTensors, "read_part", counted)
    load_hf(directory, "float32", mesh=make_mesh(mesh_config))
    tensors = StoredTensors(directory)
    assert max(max(sizes) for sizes in reads.values()) <= max(largest.values())
    for name, sizes in reads.items():
        assert sum(sizes) == 4 * np.prod(tensors.shapes[name]), f"{name}: not each element once"
        assert len(sizes) in (1, mesh_config.fsdp, mesh_config.tensor, mesh_config.fsdp * mesh_config.tensor), name


def test_a_tied_head_that_differs_is_found_without_reading_it_whole(tmp_path):
    source = ORACLE / "qwen3_plain" / "model"
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({"a": embedding, "b": embedding.copy(), "c": embedding + 1}, tmp_path / "model.safetensors")
    stored = StoredTensors(tmp_path)
    assert same_tensors(stored, "a", "b", rows_at_a_time=7)
    assert not same_tensors(stored, "a", "c", rows_at_a_time=7)


def test_a_truncated_file_is_named_before_anything_is_placed(tmp_path):
    source = ORACLE / "qwen3_plain" / "model"
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model.safetensors: truncated or not safetensors"):
        load(tmp_path, "float32", mesh=make_mesh(MESHES[0]))


def test_a_mesh_that_does_not_divide_the_model_is_named():
    with pytest.raises(UserError, match="mesh.tensor=8 does not divide vocab=220 of embed.embedding"):
        load(ORACLE / "qwen3_plain" / "model", "float32", mesh=make_mesh(MeshConfig(data=1, tensor=8)))
