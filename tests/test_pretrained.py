"""`load` tells HF directories, hub ids and workdirs apart, and says what to do where there is nothing."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.errors import UserError
from wedlm_jax.pretrained import load, save

ORACLE = Path(__file__).parent / "fixtures" / "oracle"


def test_an_hf_directory_loads_and_saves(tmp_path):
    model = load(ORACLE / "wedlm_qwen3" / "model")
    save(model, tmp_path / "out")
    again = load(str(tmp_path / "out"), dtype="float32", mask_token_id=17)
    assert (again.config, again.mask_token_id, again.eos_token_ids) == (model.config, 17, (251,))
    tokens, positions = jnp.arange(12)[None], jnp.arange(12)[None]
    np.testing.assert_array_equal(model(tokens, positions=positions), again(tokens, positions=positions))


@pytest.mark.parametrize("path", ["runs/nothing", "/nowhere/at/all", "nothing"])
def test_a_missing_path_names_the_commands_that_make_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: no such directory; ") and "\n" not in message
    assert f"wedlm_jax.train --exp NAME --workdir {path}" in message and f"wedlm_jax.convert --from WORKDIR --to {path}" in message


def test_a_directory_that_is_neither_kind_says_so(tmp_path):
    with pytest.raises(UserError, match=r"neither an HF directory \(no config.json\) nor a workdir with a model \(no model.json\)"):
        load(tmp_path)


def test_a_file_says_so(tmp_path):
    shutil.copy(ORACLE / "qwen3_plain" / "model" / "model.safetensors", tmp_path)
    with pytest.raises(UserError, match="is a file; name the directory"):
        load(tmp_path / "model.safetensors")
