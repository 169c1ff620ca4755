"""The training loop's own settings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from wedlm_jax.config_tree import check_choices
from wedlm_jax.errors import UserError

# Tokens of the shortest rows of which blocks are left out unasked: in shorter ones that saves less time than compiling takes.
LEAST_LENGTH = 512


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    batch_size: int = 16  # rows of a step, over all devices
    micro_batches: int = 1  # gradient accumulation: the rows of a step are run in this many parts
    # Blocks without a mask, as of prompts, do not run; None: in rows of LEAST_LENGTH tokens and more of data with prompts
    skip_unread: bool | None = None
    seed: int = 0  # of the parameters, the order of the data and the corruption
    log_every: int = 10  # steps
    checkpoint_every: int = 500  # steps; the last step is always saved
    keep_checkpoints: int = 2  # the newest ones; the last one saved while updates were finite stays in any case
    best_metric: Literal["validation_ar_loss", "validation_mlm_loss"] | None = None  # its lowest is WORKDIR@best
    max_skipped_in_row: int = 10  # stop after so many steps with a loss or gradient that is not finite
    eval_every: int = 0  # steps between two looks at held-out data; 0 = none
    eval_batches: int = 4  # held-out batches, the same ones each time; fixed where best_metric compares them
    eval_samples: int = 2  # held-out prompts that are completed and shown each time
    profile_steps: tuple[int, ...] = ()  # steps whose profiler trace goes to WORKDIR/profile
    tensorboard: bool = True  # event files in WORKDIR/tensorboard
    wandb: str | None = None  # project of Weights & Biases that the metrics are sent to as well

    def __post_init__(self) -> None:
        check_choices(self, "train")
        for name in ("seed", "eval_every", "eval_samples"):
            if getattr(self, name) < 0:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 0")
        positive = (
            "steps", "batch_size", "micro_batches", "log_every", "checkpoint_every", "keep_checkpoints",
            "max_skipped_in_row", "eval_batches",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 1")
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"train.batch_size={self.batch_size} is not a multiple of train.micro_batches={self.micro_batches}"
            )
        if self.best_metric is not None and (not self.eval_every or self.checkpoint_every % self.eval_every):
            raise UserError(
                f"train.best_metric={self.best_metric} is measured every train.eval_every={self.eval_every} steps; set that to a "
                f"divisor of train.checkpoint_every={self.checkpoint_every}"
            )
        if self.wandb is not None and not self.wandb.strip():
            raise UserError("train.wandb is empty; name a project, or set train.wandb=None")
        for step in self.profile_steps:
            if not 1 <= step <= self.steps:
                raise UserError(f"train.profile_steps={step} is not a step; choose from 1 to train.steps={self.steps}")
