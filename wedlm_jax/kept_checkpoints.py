"""Which checkpoints of a run stay when one is added, by the metrics that lie beside each: a file of its own, and no part of the
state, so that a checkpoint is whole where that file is damaged or gone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint.checkpoint_managers import preservation_policy

SKIPPED_IN_ROW = "skipped_in_row"  # in a checkpoint's metrics: steps before it that were not finite
BEST_METRIC = "best_metric"  # beside it: the metric by which one checkpoint is kept as the best, or null
MEASURED_OF = "measured_of"  # beside it: of how many batches, and whether masks were learned; others are not compared


def metrics_of(checkpoint: Path) -> dict[str, Any] | None:
    """What is written beside the checkpoint in this folder; None where it cannot be read, or is nothing of ours: a machine that
    loses its power may leave the file empty."""
    try:
        metrics = json.loads((checkpoint / "metrics" / "metrics").read_text())
    except (OSError, ValueError):
        return None
    return metrics if isinstance(metrics, dict) else None


@dataclasses.dataclass(frozen=True)
class Kept(preservation_policy.PreservationPolicy):
    """`steps_to_keep` for orbax; those that could not be read are neither counted nor deleted."""

    last: int
    best_metric: str | None
    unreadable: set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        metrics = {info.step: info.metrics or {} for info in checkpoints if info.step not in self.unreadable}
        kept = steps_to_keep(metrics, last=self.last, best_metric=self.best_metric) | self.unreadable
        return [info.step in kept for info in checkpoints]


def steps_to_keep(metrics: Mapping[int, Mapping[str, Any]], *, last: int, best_metric: str | None) -> set[int]:
    """The newest `last` checkpoints, the last one saved while updates were finite, and the one with the lowest metric.

    Args:
      metrics: of each checkpoint, by step.
      last: how many of the newest.
      best_metric: a name in metrics; what lacks it, is not finite or is measured of other things than the newest is not the best.
    """
    steps = sorted(metrics)
    finite = [step for step in steps if not metrics[step].get(SKIPPED_IN_ROW)]
    best = best_of(metrics, best_metric)
    return {*steps[-last:], *finite[-1:], *([] if best is None else [best])}


def best_of(metrics: Mapping[int, Mapping[str, Any]], best_metric: str | None) -> int | None:
    """The step with the lowest metric, of those that `steps_to_keep` compares; None where there is none."""
    measured = {step: metrics[step].get(best_metric or "") for step in metrics}
    measured = {step: value for step, value in measured.items() if value is not None and math.isfinite(value)}
    of = metrics[max(measured)].get(MEASURED_OF) if measured else None
    alike = (step for step in measured if metrics[step].get(MEASURED_OF, of) == of)  # earlier versions did not say
    return min(alike, key=lambda step: (measured[step], step), default=None)
