"""Trees of fields: how two of them differ."""

import json

from wedlm_jax.config_tree import differences


def test_differences_name_the_fields():
    saved = {"a": {"b": 1, "c": [1, 2]}, "free": {"d": 0}, "model": None, "same": 1}
    current = {"a": {"b": 2, "c": [1, 2]}, "free": {"d": 9}, "model": {"x": 1}, "same": 1, "new": 5}
    assert differences(saved, current, free=("free",)) == ["a.b: 1 -> 2", "model: None -> {'x': 1}", "new: None -> 5"]
    assert differences(json.loads(json.dumps(saved)), saved) == []
