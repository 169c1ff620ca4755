"""What several tests of the engine ask for by name."""

from __future__ import annotations

import pytest

from wedlm_jax.engine import row_counts


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for fewer rows is compiled behind the first run that it would have made cheaper."""
    monkeypatch.setattr(row_counts, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(row_counts.RowCounts, "compiled", lambda counts, seconds: None)
