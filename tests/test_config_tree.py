"""Trees of fields: how they are read, and how two of them differ."""

import json
from typing import Literal

import pytest

from wedlm_jax.config_tree import differences, read_value


def test_differences_name_the_fields():
    saved = {"a": {"b": 1, "c": [1, 2]}, "free": {"d": 0}, "model": None, "same": 1}
    current = {"a": {"b": 2, "c": [1, 2]}, "free": {"d": 9}, "model": {"x": 1}, "same": 1, "new": 5}
    assert differences(saved, current, free=("free",)) == ["a.b: 1 -> 2", "model: None -> {'x': 1}", "new: None -> 5"]
    assert differences(json.loads(json.dumps(saved)), saved) == []


@pytest.mark.parametrize(
    ("kind", "expected"), [(Literal["none", "full"] | None, "none"), (Literal["full"] | None, None), (str | None, None)]
)
def test_none_is_none_unless_it_is_a_value_of_the_field(kind, expected):
    assert read_value(kind, "remat", "none") == expected
