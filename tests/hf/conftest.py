"""What the interchange tests share: the oracle's model directories, and copies of them to break."""

import json
import shutil
from pathlib import Path

import pytest

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
MODELS = ("wedlm_qwen3", "wedlm_qwen25", "wedlm_qwen3_tied_sharded", "qwen3_plain", "qwen2_plain")


@pytest.fixture(params=MODELS)
def oracle_model(request) -> Path:
    return ORACLE / request.param / "model"


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(name, field=value, ...): a copy of an oracle model with these config fields (`...` removes one)."""

    def copy(name: str, **fields) -> Path:
        directory = tmp_path / name
        shutil.copytree(ORACLE / name / "model", directory)
        file = directory / "config.json"
        raw = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
        return directory

    return copy
