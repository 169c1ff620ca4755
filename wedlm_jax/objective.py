"""The objective: what is learned, and of which masks."""

from __future__ import annotations

import dataclasses
from typing import Literal

from wedlm_jax.config_tree import check_choices
from wedlm_jax.diffusion.losses import Normalization
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig

# What a mask is to predict: the token of the data, or what the base says there (its memory stream, one place before).
Targets = Literal["data", "distill"]


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned."""

    block_size: int = 32  # J: tokens of a block, each with a mask ratio of its own
    in_block: Literal["causal", "bidirectional"] = "causal"  # how a prediction block sees itself (Figure 5c)
    streams: Literal["dual", "single"] = "dual"  # "single": a document is one block with one mask ratio (Eq. 7)
    # False: masks stay in their places, in standard order, and see nothing of their block to their right.
    reorder: bool = True
    normalization: Normalization = "weights"  # of the MLM loss: by the sum of the 1 / gamma, or by the learned tokens
    ar_loss_weight: float = 1.0  # w in (mlm + w * ar) / (1 + w)
    ar_steps: int = 0  # how many steps at the start train the AR loss alone; all of them for a base model
    mask_token_id: int | None = None  # None: the tokenizer's mask token, else the first free row of the vocabulary
    fully_masked: float = 0.0  # the share of blocks of which every token is masked, as of a fresh window
    suffix_masked: float = 0.0  # the share of blocks masked from some token on, as of a window that begins with drafts
    # "distill": the base's own distribution, for an adapter of mask rows. The loss is then `distillation_loss`, not `mlm_loss`;
    # on held-out data it stays the cross-entropy of what stands there, `validation_mlm_loss`.
    targets: Targets = "data"
    distill_temperature: float = 1.0  # that both distributions are divided by

    def __post_init__(self) -> None:
        check_choices(self, "objective")
        if self.block_size < 1:
            raise UserError(f"objective.block_size={self.block_size} must be at least 1")
        for name in ("ar_loss_weight", "ar_steps", "fully_masked", "suffix_masked"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"objective.{name}={getattr(self, name)} must be 0 or more and finite")
        if self.fully_masked + self.suffix_masked > 1:
            raise UserError(
                f"objective.fully_masked={self.fully_masked} and objective.suffix_masked={self.suffix_masked} are shares "
                "of the blocks; together they can be 1 at most"
            )
        if self.streams == "single" and self.fully_masked + self.suffix_masked > 0:
            raise UserError(
                f"objective.fully_masked={self.fully_masked} and objective.suffix_masked={self.suffix_masked} are shares "
                "of the blocks, and objective.streams=single masks whole documents; set them to 0"
            )
        if not 0 < self.distill_temperature < float("inf"):
            raise UserError(f"objective.distill_temperature={self.distill_temperature} must be above 0 and finite")
        if self.distill_temperature != 1 and self.targets != "distill":
            raise UserError(
                f"objective.distill_temperature={self.distill_temperature} is read with objective.targets=distill alone; "
                "set that, or leave it out"
            )

    def check_adapter(self, adapter: AdapterConfig | None) -> None:
        """Raises a `UserError` where this cannot be learned by this adapter."""
        if adapter is None or adapter.rows != "mask":
            if self.targets != "data":
                raise UserError(
                    f"objective.targets={self.targets} is for an adapter with rows=mask, beside whose base it learns; "
                    "set model.adapter, or choose data"
                )
            return
        wanted = {"ar_loss_weight": 0, "ar_steps": 0, "streams": "dual", "in_block": "causal", "reorder": True}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"objective.{name}={getattr(self, name)} has no meaning for an adapter with rows=mask, which leaves "
                    f"every row that is no mask as it is; set it to {value}"
                )
