"""config.json <-> ModelConfig: old and new keys, reference defaults, every field that is not implemented."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.one_line import message_of
from wedlm_jax.errors import UserError
from wedlm_jax.hf.config import default_arch, from_hf, read_json, to_hf
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.rope_scaling import RopeScaling

FILE = Path("somewhere/config.json")
RAW = {
    "model_type": "qwen3",
    "vocab_size": 220,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 777,
    "tie_word_embeddings": True,
}


def without(*names: str) -> dict:
    return {name: value for name, value in RAW.items() if name not in names}


def test_reads_every_field_that_the_forward_pass_needs():
    assert from_hf(RAW, FILE, "bfloat16") == ModelConfig(
        vocab_size=220,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=20,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        max_position_embeddings=777,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500000, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    ],
)
def test_old_and_new_rope_keys_say_the_same(fields):
    assert from_hf(without("rope_theta") | fields, FILE) == from_hf(RAW, FILE)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_old_and_new_rope_keys_that_differ_are_refused(name):
    with pytest.raises(UserError, match=f"rope_theta=500000.0 and {name}.rope_theta=1.0 differ; keep one"):
        from_hf(RAW | {name: {"rope_theta": 1.0}}, FILE)


YARN_FILE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
YARN = RopeScaling("yarn", 4.0, 512)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_scaling": YARN_FILE}, YARN),
        ({"rope_parameters": {**YARN_FILE, "rope_theta": 5e5, "truncate": True}, "rope_scaling": YARN_FILE}, YARN),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192}},
            RopeScaling("llama3", 8.0, 8192),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 256},
            RopeScaling("yarn", 2.0, 256),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "attention_factor": None}},
            RopeScaling("yarn", 2.0, RAW["max_position_embeddings"], beta_fast=16.0),
        ),
    ],
)  # fmt: skip
def test_a_stretched_rope_is_read_under_old_and_new_keys(fields, scaling):
    assert from_hf(RAW | fields, FILE).rope_scaling == scaling


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        RopeScaling("yarn", 2.0, 64, beta_slow=2.0, attention_factor=1.25),
        RopeScaling("linear", 3.0),
        RopeScaling("llama3", 8.0, 64, low_freq_factor=2.0),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_stretched_rope_is_written_under_both_keys(scaling, key):
    config = dataclasses.replace(from_hf(RAW, FILE), rope_scaling=scaling)
    raw = to_hf(config, "qwen3", mask_token_id=None, special_ids={})
    other = {"rope_scaling", "rope_parameters"} - {key}
    assert from_hf({name: value for name, value in raw.items() if name not in other}, FILE) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling={'rope_type': 'yarn'} lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": YARN_FILE | {"factor": "4"}}, "factor=4 is not a positive number"),
        ({"rope_scaling": YARN_FILE | {"factor": 0.5}}, "model.rope_scaling.factor=0.5 must be at least 1"),
        ({"rope_scaling": YARN_FILE | {"original_max_position_embeddings": 1.5}}, "is not a positive whole number"),
        ({"rope_scaling": YARN_FILE, "rope_parameters": YARN_FILE | {"factor": 2.0}}, "differ; keep one"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not an object"),
        (
            {"rope_scaling": YARN_FILE, "original_max_position_embeddings": 64},
            "rope_scaling.original_max_position_embeddings=512 and original_max_position_embeddings=64 differ; keep one",
        ),
    ],
)
def test_a_rope_that_cannot_be_read_is_named(fields, message):
    with pytest.raises(UserError, match=message) as error:
        from_hf(RAW | fields, FILE)
    assert str(error.value).startswith(f"{FILE}: ")


def test_a_file_without_rope_theta_means_ten_thousand():
    assert from_hf(without("rope_theta"), FILE).rope_theta == 10_000.0


def test_qwen2_always_has_the_bias_and_derives_its_head_dim():
    config = from_hf(without("head_dim") | {"model_type": "qwen2"}, FILE)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (True, False, 12)
    assert from_hf(RAW | {"model_type": "qwen2"}, FILE).head_dim == 20


def test_llama_has_neither_bias_nor_norm_and_another_default_context():
    raw = without("head_dim", "max_position_embeddings") | {"model_type": "llama", "attention_bias": False}
    config = from_hf(raw, FILE)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, False, 12)
    assert config.max_position_embeddings == 2048
    with pytest.raises(UserError, match="attention_bias=True is not implemented for model_type=llama"):
        from_hf(raw | {"attention_bias": True}, FILE)


def test_llama_without_a_number_of_kv_heads_has_as_many_as_heads():
    """As files from before there were grouped queries have it."""
    assert from_hf(without("num_key_value_heads") | {"model_type": "llama"}, FILE).num_kv_heads == 4


def test_qwen3_without_head_dim_means_128():
    assert from_hf(without("head_dim"), FILE).head_dim == 128


@pytest.mark.parametrize(
    ("fields", "bias", "norm"),
    [
        ({}, True, False),  # the defaults of the official class
        ({"attention_bias": False, "qk_norm": True}, False, True),
        ({"attention_bias": True, "qk_norm": False}, True, False),
        ({"qk_norm": True}, True, True),
    ],
)
def test_wedlm_reads_bias_and_norm_from_its_own_fields(fields, bias, norm):
    config = from_hf(RAW | {"model_type": "wedlm"} | fields, FILE)
    assert (config.qkv_bias, config.qk_norm) == (bias, norm)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.5}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
        {"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}}},
        {"rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}},
        {"partial_rotary_factor": 0.5},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"attention_bias": True},
        {"num_experts": 8},
        {"num_local_experts": 8},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"final_logit_softcapping": 30.0},
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        {"is_causal": False},
        {"model_type": "qwen3_moe"},
        {"model_type": "mistral"},
        {"rope_interleaved": True},
        {"model_type": ["qwen3"]},
        {"layer_types": [["full_attention"], 1]},
    ],
)
def test_what_is_not_implemented_is_refused_by_file_and_field(fields):
    message = message_of(from_hf, RAW | fields, FILE)
    assert message.startswith(f"{FILE}: ") and next(iter(fields)) in message and "not implemented" in message


def test_quantized_weights_are_refused_by_their_method_however_much_is_said_of_it():
    said = {"quant_method": "gptq", "modules_to_not_convert": [f"model.layers.{i}.mlp" for i in range(99)]}
    message = message_of(from_hf, RAW | {"quantization_config": said}, FILE)
    assert (
        message.startswith(f"{FILE}: quantization_config=gptq is not implemented; take the checkpoint that")
        and len(message) < 200
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1},
        {"layer_types": ["full_attention", "full_attention"]},
        {"attention_bias": False, "hidden_act": "silu", "num_experts": None, "quantization_config": {}},
    ],
)
def test_neutral_values_are_accepted(fields):
    assert from_hf(RAW | fields, FILE) == from_hf(RAW, FILE)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ],
)
def test_a_missing_field_is_named(name):
    with pytest.raises(UserError, match=f"config.json: missing field {name}$"):
        from_hf(without(name), FILE)


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(UserError, match="missing field vocab_size, hidden_size$"):
        from_hf(without("vocab_size", "hidden_size"), FILE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "220"),
        ("hidden_size", -1),
        ("num_hidden_layers", 2.0),
        ("rope_theta", "1e6"),
        ("rope_theta", 10**400),
        ("tie_word_embeddings", 1),
    ],
)
def test_a_field_of_the_wrong_type_is_named(name, value):
    with pytest.raises(UserError, match=f"config.json: {name}="):
        from_hf(RAW | {name: value}, FILE)


def test_layer_types_that_are_no_list_are_named():
    with pytest.raises(UserError, match="layer_types=5 is not a list"):
        from_hf(RAW | {"layer_types": 5}, FILE)


def test_an_impossible_shape_names_the_file():
    with pytest.raises(UserError, match="config.json: .*num_kv_heads=3"):
        from_hf(RAW | {"num_key_value_heads": 3}, FILE)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "[" * 100_000, '{"vocab_size": %s}' % ("9" * 5000)])
def test_an_unreadable_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json: "):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("arch", "bias", "norm"),
    [
        ("wedlm", True, False),
        ("wedlm", False, True),
        ("qwen3", False, True),
        ("qwen2", True, False),
        ("llama", False, False),
    ],
)
def test_export_and_reading_back_is_the_identity(arch, bias, norm):
    config = dataclasses.replace(from_hf(RAW, FILE), qkv_bias=bias, qk_norm=norm)
    raw = json.loads(
        json.dumps(to_hf(config, arch, mask_token_id=7, special_ids={"eos_token_id": 3, "bos_token_id": None}))
    )
    assert from_hf(raw, FILE) == config
    assert (raw["mask_token_id"], raw["eos_token_id"], "bos_token_id" in raw) == (7, 3, False)
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 5e5
    assert raw["dtype"] == raw["torch_dtype"] == "float32"
    assert raw["transformers_version"] == "4.51.0"  # a later one or none: a false warning about the tokenizer


@pytest.mark.parametrize(
    ("arch", "bias", "norm", "mend"),
    [
        ("qwen2", False, True, "choose qwen3 or wedlm"),
        ("qwen3", True, False, "choose qwen2 or wedlm"),
        ("llama", False, True, "choose qwen3 or wedlm"),
        ("wedlm", True, True, "this model a qkv bias and a qk norm; choose no arch; train with one of the two"),
        # The official engine would take it for Qwen3.
        ("wedlm", False, False, "this model no qkv bias and no qk norm; choose llama"),
        ("mistral", False, True, "choose one of wedlm, qwen3, qwen2, llama"),
    ],
)
def test_an_arch_that_would_run_another_forward_pass_is_refused(arch, bias, norm, mend):
    config = dataclasses.replace(from_hf(RAW, FILE), qkv_bias=bias, qk_norm=norm)
    with pytest.raises(UserError, match=mend):
        to_hf(config, arch, mask_token_id=None, special_ids={})


@pytest.mark.parametrize(
    ("declared", "bias", "norm", "arch"),
    [
        ("qwen3", False, True, "qwen3"),
        ("wedlm", False, True, "wedlm"),
        ("llama", False, False, "llama"),
        (None, True, False, "wedlm"),
        (None, False, False, "llama"),
        ("wedlm", False, False, "llama"),
        (None, True, True, "choose no arch; train with one of the two"),
    ],
)
def test_an_export_declares_what_the_model_was_read_as_else_wedlm_else_what_fits(declared, bias, norm, arch):
    config = dataclasses.replace(from_hf(RAW, FILE), qkv_bias=bias, qk_norm=norm)
    if "choose" not in arch:
        assert default_arch(config, declared) == arch
        return
    with pytest.raises(UserError, match=arch):
        default_arch(config, declared)


def test_learned_absolute_positions_have_no_hf_form():
    config = dataclasses.replace(from_hf(RAW, FILE), position_embedding_type="learned_absolute")
    with pytest.raises(
        UserError, match="arch=wedlm has RoPE, this model learned_absolute positions; it has no HF form"
    ):
        to_hf(config, "wedlm", mask_token_id=None, special_ids={})
