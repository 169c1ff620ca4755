"""What we export, stock transformers loads, and computes the same: logits, and greedy AR token for token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wedlm_jax
from wedlm_jax.hf.config import ARCHITECTURES, stock_arch
from wedlm_jax.hf.export import save_hf
from wedlm_jax.hf.weights import load_hf
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.rope_scaling import RopeScaling

from .conftest import ORACLE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # the models are tiny, and the cores are shared with the other test processes

EXPORTS = {
    "qwen3": dict(qkv_bias=False, qk_norm=True, head_dim=24, tie_word_embeddings=True, rope_theta=1e6),
    "qwen2": dict(qkv_bias=True, qk_norm=False, head_dim=16, tie_word_embeddings=False, rope_theta=1e4),
    # Contexts of 8 and 16 tokens before, so that the 40 of the tests are beyond them.
    "qwen3, YaRN": dict(
        qkv_bias=False, qk_norm=True, head_dim=24, rope_theta=1e6, rope_scaling=RopeScaling("yarn", 4.0, 16)
    ),
    "llama, as of 3.1": dict(
        qkv_bias=False, qk_norm=False, head_dim=16, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 8)
    ),
    "qwen2, interpolated": dict(
        qkv_bias=True, qk_norm=False, head_dim=16, rope_theta=1e4, rope_scaling=RopeScaling("linear", 2.0)
    ),
    "llama": dict(qkv_bias=False, qk_norm=False, head_dim=16, tie_word_embeddings=True, rope_theta=1e5),
}


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request, tmp_path_factory):
    """A model with random weights (biases and norms too), and the directory of its export."""
    config = ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        matmul_precision="highest",
        **EXPORTS[request.param],
    )
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    centre = {name: float(name.endswith("scale")) for name in shapes}
    params = {name: jnp.asarray(rng.normal(centre[name], 0.15, x.shape), x.dtype) for name, x in shapes.items()}
    model = Model(transformer_from(config, params), config)
    directory = tmp_path_factory.mktemp("export") / "out"
    arch = request.param.partition(",")[0]
    save_hf(model, directory, arch)
    return model, directory, arch


def test_auto_model_reads_the_export_and_gives_our_logits(exported):
    model, directory, arch = exported
    other = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert type(other).__name__ == ARCHITECTURES[arch]
    tokens = np.random.default_rng(1).integers(0, 300, (2, 40))
    with torch.no_grad():
        expected = other(torch.from_numpy(tokens)).logits.numpy()
    ours = model(jnp.asarray(tokens), positions=jnp.broadcast_to(jnp.arange(40), (2, 40)))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


def test_no_field_of_the_exported_config_is_lost_on_transformers(exported):
    model, directory, _ = exported
    config = transformers.AutoConfig.from_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    for name in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "layer_types",
    ):
        assert getattr(config, name) == raw[name]
    assert config.rope_parameters == raw["rope_parameters"]
    assert config.rope_parameters["rope_theta"] == model.config.rope_theta
    assert config.dtype == torch.float32


@pytest.mark.parametrize("name", ["wedlm_qwen3", "wedlm_qwen25", "wedlm_qwen3_tied_sharded"])
def test_greedy_ar_of_transformers_equals_ours_token_for_token(name, tmp_path):
    model = load_hf(ORACLE / name / "model", "float32")
    save_hf(model, tmp_path / "out", stock_arch(model.config))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    prompt = [int(token) for token in np.random.default_rng(2).integers(7, 200, 12)]
    config = wedlm_jax.DecodeConfig(decoder="ar", max_new_tokens=24, stop_ids=(), ban_mask=False)
    [completion] = wedlm_jax.generate(model, [prompt], config)
    with torch.no_grad():
        ids = other.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=24, min_new_tokens=24, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert completion.ids == ids[0, len(prompt) :].tolist()
