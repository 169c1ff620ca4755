"""Fake engines in place of the real ones, which need torch."""

import shutil
from pathlib import Path

from wedlm_jax.baselines import process

HERE = Path(__file__).parent


def with_fake_engines(monkeypatch, folder: Path) -> None:
    """Every engine's script becomes `fake_engine.py`."""
    shutil.copy(process.HERE / "answers.py", folder)
    for name in ("transformers", "vllm", "official"):
        shutil.copy(HERE / "fake_engine.py", folder / f"{name}_engine.py")
    monkeypatch.setattr(process, "HERE", folder)
