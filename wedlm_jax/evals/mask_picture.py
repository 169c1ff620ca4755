"""Draws who sees whom in the dual-stream batch (Eq. 8 and 9), from the very functions that training and its tests use.

python -m wedlm_jax.evals.mask_picture docs/dual_stream_mask.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from wedlm_jax.diffusion.dual_stream import DualStreamBatch, build_dual_stream, visibility
from wedlm_jax.errors import UserError, entry
from wedlm_jax.results import make_folder, save_figure

# One packed row of two documents, eleven and six tokens, each starting on a block.
BLOCK_SIZE = 4
LENGTHS = (11, 6)
MASKED_POSITIONS = ((1, 3, 4, 8, 10), (2, 5))
HIDDEN, PADDING, MEMORY, PREFIX, OBSERVED, MASK = range(6)  # what a cell of the picture says
COLOURS = ("white", "#ececec", "#5b8db8", "#7fbf8f", "#f2b84b", "#d1603d")
MEANING = (
    "sees nothing there",
    "padding",
    "memory token sees memory (causal, its own document)",
    "prediction token sees the clean memory before its block",
    "prediction token sees an observed token of its block",
    "prediction token sees a mask of its block",
)
MASK_TOKEN = 0


def example() -> DualStreamBatch:
    """The batch of the picture: one row, L = 20, J = 4."""
    padded = [-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in LENGTHS]
    inside = [np.arange(slots) < length for slots, length in zip(padded, LENGTHS, strict=True)]
    positions = np.concatenate([np.arange(len(real)) * real for real in inside])[None]
    segments = np.concatenate([(1 + i) * real for i, real in enumerate(inside)])[None]
    masked = np.concatenate(
        [np.isin(np.arange(len(real)), masks) for real, masks in zip(inside, MASKED_POSITIONS, strict=True)]
    )[None]
    ratio = np.full((1, sum(padded) // BLOCK_SIZE), 0.5, np.float32)
    arrays = (jnp.asarray(x) for x in (positions + 1, segments > 0, positions, segments, masked, ratio))
    return build_dual_stream(*arrays, mask_token_id=MASK_TOKEN, block_size=BLOCK_SIZE)


def classify(batch: DualStreamBatch, visible: np.ndarray) -> np.ndarray:
    """What to paint, int [2L, 2L], query by key, from visible bool [2L, 2L] of the batch's only row."""
    length = batch.segment_ids.shape[1]
    padding = np.tile(np.asarray(batch.segment_ids[0]) == 0, 2)
    masked = np.asarray(batch.masked[0])
    kind = np.full(visible.shape, MEMORY)
    kind[length:, :length] = PREFIX
    kind[length:, length:] = np.where(masked[length:], MASK, OBSERVED)[None]
    kind = np.where(visible, kind, HIDDEN)
    return np.where(padding[:, None] | padding[None, :], PADDING, kind)


def draw() -> Figure:
    batch = example()
    length = batch.segment_ids.shape[1]
    visible = np.asarray(visibility(batch.segment_ids, block_size=BLOCK_SIZE)[0])
    figure = Figure((10.5, 11.8), dpi=110)
    axes = figure.subplots()
    axes.imshow(classify(batch, visible), cmap=ListedColormap(COLOURS), vmin=0, vmax=len(COLOURS) - 1)
    _grid(axes, length)
    _label(axes, batch)
    figure.subplots_adjust(left=0.15, right=0.985, top=0.89, bottom=0.13)
    figure.suptitle("The dual-stream mask: which keys (columns) each query (row) sees", fontsize=15, y=0.985)
    handles = [Patch(facecolor=c, edgecolor="#888888", label=m) for c, m in zip(COLOURS, MEANING, strict=True)]
    figure.legend(handles=handles[2:] + handles[:2], loc="lower center", ncol=2, frameon=False, fontsize=10.5)
    caption = (
        f"Two documents packed into one row, blocks of {BLOCK_SIZE}. Numbers are logical positions, which RoPE reads; masks "
        "are boxed.\nIn each prediction block the observed tokens come first, so plain causal attention shows every mask "
        "all of them."
    )
    figure.text(0.5, 0.09, caption, ha="center", fontsize=10, color="#444444")
    return figure


def _grid(axes: Axes, length: int) -> None:
    edges = np.arange(2 * length + 1) - 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    for edge in edges[::BLOCK_SIZE]:
        for line in (axes.axvline, axes.axhline):
            line(edge, color="#777777", linewidth=0.9)
    for line in (axes.axvline, axes.axhline):
        line(length - 0.5, color="black", linewidth=2.4)


def _label(axes: Axes, batch: DualStreamBatch) -> None:
    """Logical positions on both axes, blocks and streams outside them."""
    length = batch.segment_ids.shape[1]
    padding = np.tile(np.asarray(batch.segment_ids[0]) == 0, 2)
    masked = np.asarray(batch.masked[0])
    names = ["·" if pad else str(n) for n, pad in zip(np.asarray(batch.positions[0]), padding, strict=True)]
    axes.xaxis.tick_top()
    axes.set_xticks(range(2 * length), names, fontsize=9)
    axes.set_yticks(range(2 * length), names, fontsize=9)
    axes.tick_params(which="major", length=0)
    box = {"boxstyle": "round,pad=0.12", "facecolor": COLOURS[MASK], "edgecolor": "none"}
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label in np.array(labels)[masked]:
            label.set(color="white", bbox=box)
    blocks = length // BLOCK_SIZE
    for block in range(2 * blocks):
        middle = (block + 0.5) * BLOCK_SIZE - 0.5
        start = block % blocks * BLOCK_SIZE
        text = f"doc {batch.segment_ids[0, start]}\nblock {batch.positions[0, start] // BLOCK_SIZE}"
        axes.text(middle, -1.7, text, ha="center", va="bottom", fontsize=9, color="#444444")
        axes.text(-2.1, middle, text, ha="right", va="center", fontsize=9, color="#444444")
    for stream, name in enumerate(("memory stream: clean", "prediction stream: reordered, with masks")):
        middle = (stream + 0.5) * length - 0.5
        axes.text(middle, -3.9, name, ha="center", fontsize=12, fontweight="bold")
        axes.text(-6.0, middle, name, rotation=90, ha="center", va="center", fontsize=12, fontweight="bold")


@entry
def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".png"):
        raise UserError("name the picture to write: python -m wedlm_jax.evals.mask_picture docs/dual_stream_mask.png")
    path = Path(sys.argv[1])
    make_folder(path.parent)
    save_figure(path, draw())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
