"""The oracle's training batches, moved from its packing to ours.

The oracle packs documents end to end and doubles each on its own: [memory 1, prediction 1, memory 2, prediction 2, ...].
Here every document starts on a multiple of block_size, padding lies between, and all of the memory stream precedes all of the
prediction stream. `Case.rows` holds, for each row of the oracle's sequence, the row of ours.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parents[1] / "fixtures" / "oracle"
MODELS = ("wedlm_qwen3", "wedlm_qwen25", "wedlm_qwen3_tied_sharded")
ROW_LENGTH = 128  # room for every case at every block size, so that few shapes are compiled


class Case:
    def __init__(self, model: str, expected: dict, arrays: dict[str, np.ndarray], mask_token_id: int):
        self.model, self.expected, self.arrays, self.mask_token_id = model, expected, arrays, mask_token_id
        self.id, self.block_size = expected["id"], expected["block_size"]
        self.tokens, self.positions, self.segment_ids = (np.zeros((1, ROW_LENGTH), np.int32) for _ in range(3))
        self.loss_mask, self.masked = (np.zeros((1, ROW_LENGTH), bool) for _ in range(2))
        self.mask_ratio = np.full((1, ROW_LENGTH // self.block_size), 0.5, np.float32)  # blocks of padding keep this
        self._lay_out(arrays)

    def _lay_out(self, arrays: dict[str, np.ndarray]) -> None:
        bounds, ratios = arrays["doc_cum_lens"], iter(arrays["gamma_blocks"])
        rows, start = [], 0
        for segment, (first, last) in enumerate(itertools.pairwise(bounds), 1):
            length = last - first
            ours = slice(start, start + length)
            self.tokens[0, ours] = arrays["packed_tokens"][first:last]
            self.loss_mask[0, ours] = arrays["packed_labels"][first:last] != -100
            self.masked[0, ours] = arrays["masked_tokens"][first:last] == 1
            self.positions[0, ours] = np.arange(length)
            self.segment_ids[0, ours] = segment
            # Padding is physically last in its block, so a document's prediction rows are as contiguous as its memory rows.
            rows += [*range(start, start + length), *range(ROW_LENGTH + start, ROW_LENGTH + start + length)]
            for _ in range(arrays["blocks_per_doc"][segment - 1]):
                self.mask_ratio[0, start // self.block_size] = next(ratios)
                start += self.block_size
        assert next(ratios, None) is None
        self.rows = np.array(rows)

    def visible(self) -> np.ndarray:
        """The oracle's mask, bool [T, T], query by key."""
        length = len(self.rows)
        return np.unpackbits(self.arrays["attn_mask_packbits"], axis=1)[:, :length].astype(bool)

    def batch(self) -> tuple[jnp.ndarray, ...]:
        """The arguments of `build_dual_stream`, in its order."""
        packed = (self.tokens, self.loss_mask, self.positions, self.segment_ids, self.masked, self.mask_ratio)
        return tuple(map(jnp.asarray, packed))


@functools.cache
def cases(model: str) -> dict[str, Case]:
    described = json.loads((FIXTURES / model / "training.json").read_text())
    tensors = load_file(FIXTURES / model / "training.safetensors")
    by_id: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        case, _, key = name.partition(".")
        by_id.setdefault(case, {})[key] = array
    return {c["id"]: Case(model, c, by_id[c["id"]], described["mask_token_id"]) for c in described["cases"]}


ALL_CASES = [(model, case) for model in MODELS for case in cases(model)]
