"""Random packed batches from a fixed pool of shapes, for property tests: our arrays, and the documents that lie in them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.reference.diffusion import Document, blocks, sees

MASK_TOKEN_ID = 99
VOCABULARY = 90  # tokens lie below, so that no token is the mask by accident
SHAPES = ((1, 2, 1), (2, 3, 4), (1, 4, 8))  # rows B, blocks a row M, block size J


@dataclasses.dataclass
class PackedRows:
    block_size: int
    tokens: np.ndarray  # int32 [B, L], as are positions, segment_ids and document_ids
    loss_mask: np.ndarray  # bool [B, L]
    positions: np.ndarray
    segment_ids: np.ndarray
    document_ids: np.ndarray
    masked: np.ndarray  # bool [B, L]
    mask_ratio: np.ndarray  # float32 [B, M]
    documents: list[Document]
    places: list[tuple[int, int]]  # (row, first slot) of each document

    def batch(self) -> tuple[jnp.ndarray, ...]:
        """The arguments of `build_dual_stream`, in its order."""
        arrays = (self.tokens, self.loss_mask, self.positions, self.segment_ids, self.masked, self.mask_ratio)
        return tuple(map(jnp.asarray, arrays))

    def of_document(self, array: np.ndarray, index: int) -> np.ndarray:
        """The part of an array [B, L, ...] that belongs to one document."""
        row, start = self.places[index]
        return np.asarray(array)[row, start : start + len(self.documents[index].tokens)]

    def visible(self, in_block: str = "causal") -> np.ndarray:
        """Eq. 9 entry by entry, bool [B, 2L, 2L]. Padding sees only itself: what it computes is nobody's business."""
        rows, length = self.tokens.shape
        dense = np.broadcast_to(np.eye(2 * length, dtype=bool), (rows, 2 * length, 2 * length)).copy()
        for (row, start), document in zip(self.places, self.documents, strict=True):
            n = len(document.tokens)
            physical = [*range(start, start + n), *range(length + start, length + start + n)]
            for query in range(2 * n):
                for key in range(2 * n):
                    seen = sees(query, key, n, block_size=self.block_size, in_block=in_block)
                    dense[row, physical[query], physical[key]] = seen
        return dense

    @property
    def real(self) -> np.ndarray:
        """bool [B, 2L]: the rows of both streams that are not padding."""
        return np.concatenate([self.segment_ids, self.segment_ids], axis=1) > 0


def lay_out(rows: list[list[Document]], *, length: int, block_size: int, first_id: int = 1) -> PackedRows:
    """Puts documents into rows, each on a multiple of block_size; document ids count on from `first_id`."""
    shape = (len(rows), length)
    tokens, positions, segment_ids, document_ids = (np.zeros(shape, np.int32) for _ in range(4))
    loss_mask, masked = np.zeros(shape, bool), np.zeros(shape, bool)
    mask_ratio = np.full((len(rows), length // block_size), 0.5, np.float32)
    documents, places = [], []
    for row, in_row in enumerate(rows):
        start = 0
        for segment, document in enumerate(in_row, 1):
            ours = (row, slice(start, start + len(document.tokens)))
            tokens[ours], loss_mask[ours], masked[ours] = document.tokens, document.learned, document.masked
            positions[ours] = range(len(document.tokens))
            segment_ids[ours], document_ids[ours] = segment, first_id + len(documents)
            documents.append(document)
            places.append((row, start))
            for ratio in document.mask_ratios:
                mask_ratio[row, start // block_size] = ratio
                start += block_size
    return PackedRows(
        block_size, tokens, loss_mask, positions, segment_ids, document_ids, masked, mask_ratio, documents, places
    )


def make_document(random: np.random.Generator, length: int, block_size: int) -> Document:
    """Tokens, flags and mask ratios at random; often with a prompt in front, sometimes with nothing to learn or all masked."""
    learned = np.arange(length) >= random.integers(0, length + 1) * random.integers(0, 2)
    masked = learned & (random.random(length) < random.choice([0.0, 0.3, 0.7, 1.0]))
    ratios = np.maximum(random.random(len(blocks(length, block_size))), 1e-3).astype(np.float32)
    tokens = random.integers(0, VOCABULARY, length)
    return Document(tokens.tolist(), learned.tolist(), masked.tolist(), ratios.tolist())


@st.composite
def packed_rows(draw, shapes=SHAPES) -> PackedRows:
    """Rows of ragged documents: full rows, empty rows, one-token documents and rows with padding all occur."""
    rows, row_blocks, block_size = draw(st.sampled_from(shapes))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    filled = []
    for _ in range(rows):
        left, in_row = row_blocks, []
        while left and draw(st.integers(0, 3)):
            length = draw(st.integers(1, left * block_size))
            in_row.append(make_document(random, length, block_size))
            left -= len(blocks(length, block_size))
        filled.append(in_row)
    return lay_out(filled, length=row_blocks * block_size, block_size=block_size)
