"""The decoding part of the oracle: its models, and its cases by name."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.pretrained import load

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
WEDLM_MODELS = ("wedlm_qwen3", "wedlm_qwen25", "wedlm_qwen3_tied_sharded")
MODELS = (*WEDLM_MODELS, "qwen3_plain", "qwen2_plain")


@functools.cache
def oracle_model(name: str) -> Model:
    """Loaded from its files, float32 as real float32."""
    model = load(ORACLE / name / "model", "float32")
    config = dataclasses.replace(model.config, matmul_precision="highest")
    return dataclasses.replace(model, config=config, transformer=transformer_from(config, params_of(model.transformer)))


@functools.cache
def cases(name: str, section: str) -> list[dict]:
    return json.loads((ORACLE / name / f"{section}.json").read_text())["cases"]


@functools.cache
def sampler_units() -> dict[str, list[dict]]:
    return json.loads((ORACLE / "sampler.json").read_text())
