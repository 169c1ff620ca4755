"""How far a run has come in its data: the place for a checkpoint, the epoch, and the records that were left out."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from wedlm_jax.data.pipeline import FIRST_SKIPPED, RECORDS, PackedBatches
from wedlm_jax.distributed import all_gather, is_main
from wedlm_jax.resuming import DIGESTS


class DataProgress:
    """Of one stream, over all processes.

    Args:
      stream: this process's.
      shares: as `row_shares` gives them.
      digests: as `digests_of` gives them.
      skips: whether bad records are left out.
    """

    def __init__(self, stream: PackedBatches, shares: dict[int, int], digests: list[str], *, skips: bool):
        self._stream, self._shares, self._digests, self._skips = stream, shares, digests, skips
        self._has_told = False

    @property
    def an_epoch(self) -> str:
        """What it is, for people."""
        records = zip(self._stream.names, self._stream.records, strict=True)
        return f"an epoch is {', '.join(f'{count:,} records of {name}' for name, count in records)}"

    def place(self) -> dict[str, Any]:
        """The iterators' states of all groups, in their order, the number of records of each source, the digests of some, and the
        first bad one that was left out, as the process knows it that writes this down; all processes must call it."""
        places = {name: self._of_shares(x).reshape(-1).tolist() for name, x in self._stream.get_state().items()}
        first = {} if (skipped := self._stream.first_skipped) is None else {FIRST_SKIPPED: skipped}
        return {**places, RECORDS: self._stream.records, DIGESTS: self._digests, **first}

    def numbers(self, *, last: bool = False) -> dict[str, float | int]:
        """`epoch`, and where bad records may be left out `skipped_records`, those of all groups; then all processes must call it,
        and wait. Of the first ones a line tells, and at the `last` step of all."""
        numbers: dict[str, float | int] = {"epoch": round(max(self._stream.epochs), 4)}
        if not self._skips:
            return numbers
        skipped, read = self._of_shares([self._stream.skipped_records, self._stream.records_read]).sum(axis=0).tolist()
        if skipped and (last or not self._has_told) and is_main():
            first = f", the first: {self._stream.first_skipped}" if self._stream.first_skipped else ""
            print(f"warning: {skipped:,} of the {read:,} records read so far are left out{first}", file=sys.stderr)
            self._has_told = True
        return numbers | {"skipped_records": skipped}

    def _of_shares(self, x: Any) -> np.ndarray:
        """What one process of every share of the rows has as `x`, in the order of the shares; all processes must call it."""
        feeders = {share: process for process, share in self._shares.items()}
        return all_gather(np.asarray(x))[[feeders[share] for share in sorted(feeders)]]
