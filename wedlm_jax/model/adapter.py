"""AdapterConfig: trained low-rank pairs beside the projections of a frozen base (LoRA, arXiv 2106.09685), on every row or on
mask rows alone.

On mask rows alone the base is left as it is: whatever a row that is no mask computes, its keys, values and logits, is what it
computes without the adapter, bit for bit. So AR decoding is the base's own, and verified decoding returns the base's text.

(Bit for bit of a call of the same shape. On a CPU heads of 8 dimensions and less with qk-norm are an exception, in the last bit:
the sum of squares is compiled into one loop with what makes its input, which is another with an adapter.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from wedlm_jax.config_tree import check_choices
from wedlm_jax.errors import UserError

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Rows = Literal["mask", "all"]
TARGETS: tuple[Target, ...] = get_args(Target)

MASK_EMBEDDING = "mask_embedding"  # the parameter [D] that mask rows are fed as, with rows="mask"
PAIR = ("lora_a", "lora_b")  # the last name of a parameter of a low-rank pair


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Every target W of every layer becomes W + (alpha / rank) A B, A [inputs, rank] and B [rank, outputs]; B starts at 0.

    With `rows="mask"` that holds for mask rows alone, and they are fed a learned embedding: the base needs no mask token.
    With `rows="all"` it is ordinary LoRA, which can be merged into the base.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[Target, ...] = TARGETS
    rows: Rows = "mask"

    def __post_init__(self) -> None:
        check_choices(self, "adapter")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise UserError(f"adapter.rank={self.rank!r} must be a whole number")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise UserError(f"adapter.alpha={self.alpha!r} must be a number")
        if not isinstance(self.targets, tuple | list):
            raise UserError(f"adapter.targets={self.targets!r} must be a tuple of projections")
        object.__setattr__(self, "targets", tuple(self.targets))  # programs are compiled for it, so it has a hash
        if self.rank < 1:
            raise UserError(f"adapter.rank={self.rank} must be at least 1")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UserError(f"adapter.alpha={self.alpha} must be above 0 and finite")
        if unknown := [target for target in self.targets if target not in TARGETS]:
            raise UserError(f"adapter.targets: {unknown[0]} is unknown; choose of {', '.join(TARGETS)}")
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise UserError("adapter.targets must name at least one projection, and each of them once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter_parameter(path: str) -> bool:
    """Whether a parameter by path ("layers.mlp.up_proj.lora_a") belongs to an adapter and not to its base."""
    return path == MASK_EMBEDDING or path.rpartition(".")[2] in PAIR


def split_adapter(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters by path as (those of the base, those of the adapter)."""
    base, adapter = (
        {name: x for name, x in params.items() if is_adapter_parameter(name) == own} for own in (False, True)
    )
    return base, adapter
