"""Hugging Face config.json <-> ModelConfig, for the model types `wedlm`, `qwen3`, `qwen2` and `llama`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from wedlm_jax.errors import UserError, shown
from wedlm_jax.hf.fields import flag, real, whole
from wedlm_jax.hf.rope_parameters import read_rope, rope_parameters
from wedlm_jax.model.config import DType, ModelConfig

Arch = Literal["wedlm", "qwen3", "qwen2", "llama"]
ARCHITECTURES: dict[Arch, str] = {
    "wedlm": "WeDLMForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
# (qkv_bias, qk_norm) of the forward passes that each runs, whatever a file of a stock architecture says. The official engine
# takes "no bias" to mean "a norm", and would skip one or make one up without a word.
FORWARD_PASSES: dict[Arch, tuple[tuple[bool, bool], ...]] = {
    "qwen3": ((False, True),),
    "qwen2": ((True, False),),
    "llama": ((False, False),),
    "wedlm": ((False, True), (True, False)),
}

# Where a file leaves a field out, the reference implementation takes these; a field without a default must be there.
DEFAULT_MAX_POSITION_EMBEDDINGS = 32_768
DEFAULT_RMS_NORM_EPS = 1e-6
QWEN3_DEFAULT_HEAD_DIM = 128
LLAMA_DEFAULT_MAX_POSITION_EMBEDDINGS = 2048
FULL_ATTENTION = "full_attention"

# The first release with Qwen3. Releases around 4.57 are said to warn of a wrong pattern in any large tokenizer beside a
# config.json that names a later one or none, and advise a setting that would change its tokens (huggingface/transformers,
# issue 42591).
TRANSFORMERS_VERSION = "4.51.0"

# Fields that change the forward pass and that we do not implement, with the values that leave it alone.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "use_mrope": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "dual_chunk_attention_config": (None,),
    "quantization_config": (None, {}),
    "quantization": (None, {}),  # as MLX has it
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_intermediate_size": (None, 0),
}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`; a `UserError` names the file where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not readable as JSON ({error}); download or copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def write_hf_json(file: Path, value: Mapping[str, Any]) -> None:
    """As the files of Hugging Face models are written: indented, in UTF-8."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def from_hf(raw: Mapping[str, Any], file: Path, dtype: DType = "float32") -> ModelConfig:
    """The ModelConfig of a config.json.

    Args:
      raw: the parsed file. Old and new keys are read: `rope_theta` and `rope_scaling`, or `rope_parameters`.
      file: where it came from, for the messages.
      dtype: compute and parameter dtype; the file's own `dtype` only says how the weights are stored.

    Raises:
      UserError: a field is missing, has the wrong type, or asks for a forward pass that is not implemented.
    """
    arch = raw.get("model_type")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UserError(f"{file}: model_type={arch!r} is not implemented; known are {', '.join(ARCHITECTURES)}")
    _refuse_unimplemented(raw, file)
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        *(("num_key_value_heads",) if arch != "llama" else ()),  # Llama files of before grouped queries have none
    )
    missing = [name for name in required if name not in raw]
    if missing:
        raise UserError(f"{file}: missing field {', '.join(missing)}")
    heads = whole(raw, "num_attention_heads", file)
    hidden = whole(raw, "hidden_size", file)
    if arch == "wedlm":  # the defaults of the official class
        qkv_bias, qk_norm = flag(raw, "attention_bias", True, file), flag(raw, "qk_norm", False, file)
    else:
        qkv_bias, qk_norm = FORWARD_PASSES[arch][0]
    theta, scaling = read_rope(raw, file)
    longest = LLAMA_DEFAULT_MAX_POSITION_EMBEDDINGS if arch == "llama" else DEFAULT_MAX_POSITION_EMBEDDINGS
    fields: dict[str, Any] = dict(
        vocab_size=whole(raw, "vocab_size", file),
        hidden_size=hidden,
        intermediate_size=whole(raw, "intermediate_size", file),
        num_layers=whole(raw, "num_hidden_layers", file),
        num_heads=heads,
        num_kv_heads=heads if raw.get("num_key_value_heads") is None else whole(raw, "num_key_value_heads", file),
        head_dim=_head_dim(raw, file, hidden, heads),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=real(raw, "rms_norm_eps", DEFAULT_RMS_NORM_EPS, file),
        max_position_embeddings=whole(raw, "max_position_embeddings", file, longest),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", False, file),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        dtype=dtype,
        param_dtype=dtype,
    )
    try:
        return ModelConfig(**fields)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def to_hf(
    config: ModelConfig, arch: Arch, *, mask_token_id: int | None, special_ids: Mapping[str, Any]
) -> dict[str, Any]:
    """The complete config.json of an export, under old and new keys, so that tools of either age read it.

    Args:
      special_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` as far as they are known.

    Raises:
      UserError: the weights do not fit `arch`.
    """
    require_fit(config, arch)
    rope = rope_parameters(config.rope_scaling)
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        **({} if config.rope_scaling is None else {"rope_scaling": rope}),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "layer_types": [FULL_ATTENTION] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        "transformers_version": TRANSFORMERS_VERSION,
    }
    if arch != "qwen2":  # Qwen2 has no such field: it always has the bias
        raw["attention_bias"] = config.qkv_bias
    if arch == "wedlm":
        raw["qk_norm"] = config.qk_norm
    if mask_token_id is not None:
        raw["mask_token_id"] = mask_token_id
    return raw | {name: value for name, value in special_ids.items() if value is not None}


def require_fit(config: ModelConfig, arch: Arch) -> None:
    """Raises `UserError` where tools that read `arch` would run a forward pass other than ours. (The official engine stops at a
    stretched RoPE, which the official model class reads.)"""
    if arch not in ARCHITECTURES:
        raise UserError(f"arch={arch!r} is unknown; choose one of {', '.join(ARCHITECTURES)}")
    if config.position_embedding_type != "rope":
        raise UserError(
            f"arch={arch} has RoPE, this model {config.position_embedding_type} positions; it has no HF form"
        )
    has = config.qkv_bias, config.qk_norm
    if has not in FORWARD_PASSES[arch]:
        theirs, mend = " or ".join(map(_in_words, FORWARD_PASSES[arch])), " or ".join(_fitting(config))
        raise UserError(
            f"arch={arch} has {theirs}, this model {_in_words(has)}; choose {mend or 'no arch; train with one of the two'}"
        )


def default_arch(config: ModelConfig, declared: Any) -> Arch:
    """What an export declares where nobody says: what was `declared` (None: nothing), else wedlm, each where it fits; else what
    stock tools call this forward pass. A `UserError` where there is none."""
    fitting = _fitting(config)
    return next((arch for arch in (declared, "wedlm") if arch in fitting), None) or stock_arch(config)


def stock_arch(config: ModelConfig) -> Arch:
    """The architecture of stock tools that runs this forward pass; a `UserError` where there is none."""
    arch: Arch = next(iter(_fitting(config)), "wedlm")
    require_fit(config, arch)
    return arch


def _fitting(config: ModelConfig) -> list[Arch]:
    return [arch for arch, passes in FORWARD_PASSES.items() if (config.qkv_bias, config.qk_norm) in passes]


def _in_words(has: tuple[bool, bool]) -> str:
    bias, norm = ("a" if x else "no" for x in has)
    return f"{bias} qkv bias and {norm} qk norm"


def _refuse_unimplemented(raw: Mapping[str, Any], file: Path) -> None:
    for name, neutral in NEUTRAL.items():
        if name not in raw or raw[name] in neutral:
            continue
        if name.startswith("quantization"):
            how = raw[name].get("quant_method") if isinstance(raw[name], Mapping) else None
            raise UserError(
                f"{file}: {name}={how or shown(raw[name])} is not implemented; take the checkpoint that is not quantized"
            )
        raise UserError(f"{file}: {name}={raw[name]!r} is not implemented (only {' or '.join(map(repr, neutral))})")
    if raw["model_type"] in ("qwen3", "llama") and raw.get("attention_bias"):
        # There the flag puts a bias on the output projection too.
        raise UserError(
            f"{file}: attention_bias=True is not implemented for model_type={raw['model_type']} (only False)"
        )
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise UserError(f"{file}: layer_types={layer_types!r} is not a list")
    others = dict.fromkeys(str(kind) for kind in layer_types if kind != FULL_ATTENTION)
    if others:
        raise UserError(
            f"{file}: layer_types holds {', '.join(map(repr, others))}, not implemented (only {FULL_ATTENTION!r})"
        )


def _head_dim(raw: Mapping[str, Any], file: Path, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return whole(raw, "head_dim", file)
    if raw["model_type"] == "qwen3" and "head_dim" not in raw:
        return QWEN3_DEFAULT_HEAD_DIM
    if hidden % heads:
        raise UserError(
            f"{file}: head_dim is missing and hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads
