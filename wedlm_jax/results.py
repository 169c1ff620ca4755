"""Results on disk: a file is there whole, and one that cannot be written leaves the one before it as it was."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wedlm_jax.errors import writing


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Around what writes `path`, to the partial file that is yielded: it takes the place of `path` at the end.

    Raises:
      UserError: it cannot be written.
    """
    # It ends as `path` does: a picture's format is read from that.
    partial = path.with_name(f".partial.{os.getpid()}.{path.name}")
    try:
        with writing(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, results: Any) -> None:
    """Dicts, lists, numbers and text as a JSON file, with null where a number is NaN or infinite: JSON has neither.

    Raises:
      UserError: it cannot be written.
    """
    with replacing(path) as partial:
        text = json.dumps(_finite(results), indent=2, ensure_ascii=False, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
