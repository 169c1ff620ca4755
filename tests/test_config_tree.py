"""Trees of fields: how they are read, and how two of them differ."""

import dataclasses
import functools
import json
import re
from typing import Literal

import pytest

from tests.tiny_training import MODEL
from wedlm_jax.config_tree import differences, read_value
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import (
    AdapterConfig,
    EvaluationConfig,
    ModelOverrides,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
)


def test_differences_name_the_fields():
    saved = {"a": {"b": 1, "c": [1, 2]}, "free": {"d": 0}, "model": None, "same": 1}
    current = {"a": {"b": 2, "c": [1, 2]}, "free": {"d": 9}, "model": {"x": 1}, "same": 1, "new": 5}
    assert differences(saved, current, free=("free",)) == ["a.b: 1 -> 2", "model: None -> {'x': 1}", "new: None -> 5"]
    parts, weighed = ([{"path": "a", "weight": weight}, {"path": "b", "weight": 1}] for weight in (3.0, 1.0))
    assert differences({"mixture": parts}, {"mixture": weighed}) == ["mixture[0].weight: 3.0 -> 1.0"]
    assert differences({"mixture": parts[:1]}, {"mixture": weighed}) == [f"mixture: {parts[:1]} -> {weighed}"]
    assert differences(json.loads(json.dumps(saved)), saved) == []


@pytest.mark.parametrize(
    ("kind", "expected"), [(Literal["none", "full"] | None, "none"), (Literal["full"] | None, None), (str | None, None)]
)
def test_none_is_none_unless_it_is_a_value_of_the_field(kind, expected):
    assert read_value(kind, "remat", "none") == expected


@pytest.mark.parametrize(
    ("section", "of", "name", "choices"),
    [
        ("model", functools.partial(dataclasses.replace, MODEL), "dtype", "float32 or bfloat16"),
        ("model", functools.partial(dataclasses.replace, MODEL), "kernel_dtype", "int8 or None"),
        ("model", functools.partial(dataclasses.replace, MODEL), "matmul_precision", "default, high or highest"),
        ("model", ModelOverrides, "remat", "none, dots, attention, full or None"),
        ("adapter", AdapterConfig, "rows", "mask or all"),
        ("objective", ObjectiveConfig, "streams", "dual or single"),
        ("objective", ObjectiveConfig, "in_block", "causal or bidirectional"),
        ("objective", ObjectiveConfig, "normalization", "weights or tokens"),
        ("objective", ObjectiveConfig, "targets", "data or distill"),
        ("optimizer", OptimizerConfig, "schedule", "constant, cosine or linear"),
        ("optimizer", OptimizerConfig, "decay_mask", "kernels or official"),
        ("evaluation", EvaluationConfig, "match", "number, choice, formula or text"),
        ("train", TrainConfig, "best_metric", "validation_ar_loss, validation_mlm_loss or None"),
    ],
)
def test_an_unknown_word_is_refused_in_a_config_made_in_python(section, of, name, choices):
    with pytest.raises(UserError, match=re.escape(f"{section}.{name}='sinlge' is unknown; choose {choices}")):
        of(**{name: "sinlge"})
