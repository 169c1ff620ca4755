"""Training or held out: decided by a hash of the document alone, so by no seed, order, file name or number of processes."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import numpy as np

Split = Literal["train", "held_out"]


def split_by_hash(content: bytes, held_out_share: float) -> Split:
    """`held_out` for the given share of all contents; a larger share holds out the same documents and more."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") < held_out_share * 2**64 else "train"


def content_of(raw: Any) -> bytes:
    """What is hashed of a record as it is stored: the same for the same record in another file or of another integer type."""
    if isinstance(raw, bytes):
        return raw
    if isinstance(raw, np.ndarray):
        return raw.astype(np.int64).tobytes()

    def text(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        plain = np.asarray(value).tolist()
        return str(value) if plain is value else plain  # a date or a decimal of a table

    return json.dumps(raw, sort_keys=True, default=text).encode()
