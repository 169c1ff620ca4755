"""adapter_config.json of PEFT (huggingface/peft, 0.19) <-> AdapterConfig, for LoRA on all rows.

What PEFT can say and this forward pass cannot do is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import TARGETS, AdapterConfig

PEFT_FILE = "adapter_config.json"

# Fields that change what is computed, with the values that leave plain LoRA on whole projections of every layer. Initial values
# that also change the base (PiSSA, OLoRA, LoftQ and such) are among them: the adapter is then of another base than it names.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "modules_to_save": (None, []),
    "exclude_modules": (None, []),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),
    "loftq_config": (None, {}),
    "eva_config": (None, {}),
    "corda_config": (None, {}),
    "lora_ga_config": (None, {}),
    "arrow_config": (None, {}),
    "megatron_config": (None, {}),
    "ensure_weight_tying": (None, False),
}
# Fields that change nothing of what a trained adapter computes: names, and settings of training or of what is neutral above.
DESCRIPTIVE = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip


def to_peft(adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """The adapter_config.json of an adapter of all rows; `base` is what PEFT would load it on."""
    assert adapter.rows == "all"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapter.targets),
        "bias": "none",
    }


def from_peft(raw: Mapping[str, Any], file: Path, tensors: Iterable[str] = ()) -> AdapterConfig:
    """The adapter of an adapter_config.json. Its modules may be named by any end of their path, as PEFT matches them; that
    every layer has a pair for each is for who reads the tensors to see.

    Args:
      file: for the messages.
      tensors: the names of those that are stored, which say what a pattern has matched.

    Raises:
      UserError: a field is missing, unknown, or asks for what is not implemented.
    """
    for name, neutral in NEUTRAL.items():
        if name in raw and raw[name] not in neutral:
            raise UserError(f"{file}: {name}={raw[name]!r} is not implemented (only {' or '.join(map(repr, neutral))})")
    read = ("peft_type", "r", "lora_alpha", "target_modules")
    if missing := [name for name in read if name not in raw]:
        raise UserError(f"{file}: missing field {', '.join(missing)}; is it an adapter that PEFT wrote?")
    # Later versions write fields of their own, most of them as nothing.
    asked = {name for name, value in raw.items() if value not in (None, False, [], {})}
    if unknown := sorted(asked - NEUTRAL.keys() - DESCRIPTIVE - set(read)):
        raise UserError(
            f"{file}: {unknown[0]} is not a field of LoRA in PEFT 0.19, so what it asks for is not known here"
        )
    rank, alpha, targets = raw["r"], raw["lora_alpha"], raw["target_modules"]
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise UserError(f"{file}: r={rank!r} is not a whole number")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise UserError(f"{file}: lora_alpha={alpha!r} is not a number")
    if isinstance(targets, str):
        matched = sorted({name.partition(".lora_")[0] for name in tensors})
    elif isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        matched = targets
    else:
        raise UserError(f"{file}: target_modules={targets!r} is neither a list of names nor a pattern")
    projections = {module: module.rpartition(".")[2] for module in matched}
    if others := [module for module, projection in projections.items() if projection not in TARGETS]:
        raise UserError(f"{file}: target_modules holds {others[0]!r}, not implemented (only {', '.join(TARGETS)})")
    used = tuple(target for target in TARGETS if target in projections.values())
    try:
        return AdapterConfig(rank, float(alpha), used, "all")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
