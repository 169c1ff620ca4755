"""What all processes of a run must have alike before it starts: each learns from its own settings and data, and one that differs
would train a wrong model, or wait for ever for steps and checkpoints that the others do not make."""

from __future__ import annotations

import json

import jax

from wedlm_jax.config_tree import differences
from wedlm_jax.data.pipeline import PackedBatches
from wedlm_jax.distributed import all_texts
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment
from wedlm_jax.version import __version__


def require_same_settings(experiment: Experiment) -> None:
    """Raises a `UserError`, in every process, where one was started with other settings than process 0; all must call it."""
    texts = all_texts(json.dumps({**experiment.to_dict(), "version of wedlm_jax": __version__}))
    for process, text in enumerate(texts):
        if changed := differences(json.loads(texts[0]), json.loads(text)):
            raise UserError(
                f"process {process} was started with other settings than process 0 (of 0 -> of {process}: {'; '.join(changed)}); "
                "start all of them with the same command"
            )


def require_same_data(stream: PackedBatches) -> None:
    """Raises a `UserError`, in every process, where a source holds other records for one than for process 0, as copies on
    disks of their own may; all must call it. Of the records a few are compared, and how many there are."""
    if jax.process_count() == 1:
        return
    first, *others = (json.loads(text) for text in all_texts(json.dumps(stream.fingerprints())))
    for process, other in enumerate(others, 1):
        for (name, expected, digest), (_, count, its_digest) in zip(first, other, strict=True):
            if count != expected:
                differ = f"has {count:,} records for process {process} and {expected:,} for process 0"
            elif its_digest != digest:
                differ = f"has other records for process {process} than for process 0"
            else:
                continue
            raise UserError(f"{name} {differ}; give all processes the same data")
