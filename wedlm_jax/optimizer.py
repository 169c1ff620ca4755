"""AdamW with a learning-rate schedule, clipping by global norm and a decay mask, in float32 and in torch's order of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from wedlm_jax.config_tree import check_choices
from wedlm_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101)."""

    learning_rate: float = 1e-3  # the peak, after warm-up
    schedule: Literal["constant", "cosine", "linear"] = "cosine"  # after warm-up, down to final_fraction of the peak
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # instead of warmup_steps: int(ratio * steps) of them
    final_fraction: float = 0.0  # of the peak, where cosine and linear lead: one update after the last
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_mask: Literal["kernels", "official"] = "kernels"  # no norms, no biases; "official": only no biases
    clip_norm: float = 1.0  # of the gradient of all parameters together
    # bfloat16: 2 bytes a parameter less; the second moment stays as it is.
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_choices(self, "optimizer")
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"optimizer.{name}={getattr(self, name)} must be above 0 and finite")
        if not self.clip_norm > 0:  # inf: no clipping
            raise UserError(f"optimizer.clip_norm={self.clip_norm} must be above 0")
        for name in ("b1", "b2", "warmup_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"optimizer.{name}={getattr(self, name)} must be 0 or more and finite")
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optimizer.final_fraction={self.final_fraction} must be in [0, 1]")
        if self.warmup_steps and self.warmup_ratio:
            raise UserError(
                f"optimizer.warmup_steps={self.warmup_steps} and optimizer.warmup_ratio={self.warmup_ratio} are both set; add "
                "optimizer.warmup_ratio=0, or optimizer.warmup_steps=0"
            )


def learning_rate(config: OptimizerConfig, step: jax.Array, total_steps: int) -> jax.Array:
    """The rate of update number `step` (0, 1, ...): linear warm-up from 0, so that the very first one is 0, then the schedule."""
    warmup = config.warmup_steps or int(config.warmup_ratio * total_steps)
    step = step.astype(jnp.float32)
    progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    decay = {
        "constant": jnp.ones_like(progress),
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
    }[config.schedule]
    decay = config.final_fraction + (1.0 - config.final_fraction) * decay
    return config.learning_rate * jnp.where(step < warmup, step / max(warmup, 1), decay)


def clip_by_global_norm(gradients: Any, max_norm: float) -> tuple[Any, jax.Array]:
    """Scales gradients down to `max_norm` as torch's `clip_grad_norm_` does; returns them and their norm before."""
    norm = optax.tree.norm(gradients)
    scale = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda gradient: gradient * scale, gradients), norm


def decayed(config: OptimizerConfig, params: Mapping[str, Any]) -> dict[str, bool]:
    """Which parameters are decayed, by path: all but biases and the norms' scales; "official" decays the scales as well."""
    undecayed = (".bias",) if config.decay_mask == "official" else (".bias", ".scale")
    return {name: not name.endswith(undecayed) for name in params}


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` whose state stays as it is where the gradients are not `finite`.

    The direction is made of the moments that are kept. Made of new ones that are chosen or dropped later, XLA on CPU would hold
    both, and read and write the moments twice.
    """
    plain = optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.first_moment_dtype)

    def update(gradients, state, params=None, *, finite: jax.Array | bool = True):
        del params

        def kept(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)

        count = kept(optax.safe_increment(state.count), state.count)
        # In float32: beside a moment in bfloat16 its decay would be rounded to that too, 0.9 to 0.8984 and 0.99 to 0.9883.
        before = optax.tree.cast(state.mu, jnp.float32)
        mu = kept(optax.tree.update_moment(gradients, before, config.b1, 1), before)
        nu = kept(optax.tree.update_moment_per_elem_norm(gradients, state.nu, config.b2, 2), state.nu)
        mu_hat, nu_hat = (
            optax.tree.bias_correction(moment, decay, count) for moment, decay in ((mu, config.b1), (nu, config.b2))
        )
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.eps), mu_hat, nu_hat)
        return direction, optax.ScaleByAdamState(count, optax.tree.cast_like(mu, state.mu), nu)

    return optax.GradientTransformationExtraArgs(plain.init, update)


def make_adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW's direction, still to be multiplied by minus the learning rate. Its `update` takes `finite`, as `scale_by_adam`'s."""
    return optax.chain(
        scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, mask=lambda params: decayed(config, params)),
    )
