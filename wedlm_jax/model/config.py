"""ModelConfig: the shape and the numerics of one transformer as Qwen2.5, Qwen3 or Llama have it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import pydantic

from wedlm_jax.config_tree import check_choices
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.ops.attention import Implementation

DType = Literal["float32", "bfloat16"]

# What the backward pass finds instead of computing it again: "none" recomputes nothing and keeps all; "full" keeps the input of
# each layer alone; "attention" also what attention puts out; "dots" also the products with the parameters.
Remat = Annotated[
    Literal["none", "dots", "attention", "full"],
    pydantic.BeforeValidator(lambda x: {False: "none", True: "full"}[x] if isinstance(x, bool) else x),  # older files
]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every field changes the forward pass, its memory or its precision.

    Qwen2.5 is `qkv_bias=True, qk_norm=False`; Qwen3 is `qkv_bias=False, qk_norm=True` with a `head_dim` of its own; Llama has
    neither.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H; not hidden_size / num_heads in general (Qwen3-0.6B and 4B)
    # "learned_absolute" is GPT-2's table by place in memory: it breaks the method, and is here to show that it does.
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768  # the context: prompt + generated tokens; mask slots may pass it
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = True
    dtype: DType = "float32"  # activations and matmuls
    param_dtype: DType = "float32"
    # "int8": the layers' kernels, rounded, with a float32 scale for every output (`model.int8`); for decoding alone
    kernel_dtype: Literal["int8"] | None = None
    # Of float32, which "highest" makes float32 on accelerators too (`precision`)
    matmul_precision: Literal["default", "high", "highest"] = "default"
    attention: Implementation = "auto"  # "auto": splash on TPU and tokamax on GPU where they can, else "xla"
    remat: Remat = "none"  # what of each layer the backward pass computes again
    # One program for all layers; False: where there is no cache each has its own, which takes longer to compile.
    scan_layers: bool = True
    mlp_tile: int | None = None  # tokens of a row in the MLP at once, which the backward pass computes again; None: all
    adapter: AdapterConfig | None = None  # trained beside these parameters, which stay as they are

    def __post_init__(self) -> None:
        check_choices(self, "model")
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.rope_theta < float("inf"):
            raise UserError(f"model.rope_theta={self.rope_theta} must be above 0 and finite")
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise UserError(
                f"model.rope_theta={self.rope_theta} must be above 1 where model.rope_scaling stretches RoPE"
            )
        if not 0 <= self.rms_norm_eps < float("inf"):
            raise UserError(f"model.rms_norm_eps={self.rms_norm_eps} must be 0 or more and finite")
        if self.mlp_tile is not None and self.mlp_tile < 1:
            raise UserError(
                f"model.mlp_tile={self.mlp_tile} is no number of tokens; give 1 or more, or none for all at once"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim} is odd; RoPE rotates pairs, so make it even")

    @property
    def needs_mask_token(self) -> bool:
        """Whether mask rows are fed as a token of the vocabulary: not where an adapter has an embedding for them."""
        return self.adapter is None or self.adapter.rows != "mask"

    @property
    def precision(self) -> str:
        """Of every product. In bfloat16 the default one is exact, and the only one that a TPU's kernels compile at."""
        return self.matmul_precision if self.dtype == "float32" else "default"


@dataclasses.dataclass(frozen=True)
class ModelOverrides:
    """How the model that an experiment starts from is computed; None leaves a field as it is there. Its shape stays."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    dtype: DType | None = None  # None: what the device computes fastest in, `fastest_dtype`
    param_dtype: DType | None = None  # None: float32; bfloat16 is for the base of an adapter
    matmul_precision: Literal["default", "high", "highest"] | None = None
    remat: Literal["none", "dots", "attention", "full"] | None = None
    scan_layers: bool | None = None
    mlp_tile: int | None = None
    attention: Implementation | None = None
    adapter: AdapterConfig | None = None  # to train beside it; all of its own parameters then stay as they are

    def __post_init__(self) -> None:
        check_choices(self, "model")

    def over(self, config: ModelConfig, dtype: DType) -> ModelConfig:
        """`config` with all that is set here, computed in `dtype` where none is."""
        chosen = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(config, **{"dtype": dtype, **chosen})


# How a training step computes what it computes, in which time and memory.
MEANS = ("attention", "remat", "scan_layers", "mlp_tile")


def by_means_of(asked: ModelConfig | ModelOverrides | None, config: ModelConfig) -> ModelConfig:
    """`config` by the `MEANS` of `asked`; None leaves one as it is there, but in a whole `ModelConfig`, where it is a value."""
    chosen = {name: getattr(asked, name) for name in MEANS} if asked is not None else {}
    whole = isinstance(asked, ModelConfig)
    return dataclasses.replace(config, **{name: value for name, value in chosen.items() if whole or value is not None})
