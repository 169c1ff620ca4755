"""The one table between tensor names of Hugging Face checkpoints and our parameters, read in both directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from wedlm_jax.model.adapter import MASK_EMBEDDING
from wedlm_jax.model.config import ModelConfig


def _always(config: ModelConfig) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: names, and axes in the letters of the legend (`NH` is N and H flattened, as in einops)."""

    hf: str  # `{layer}` where there is one tensor a layer; ours stacks these on a first axis
    hf_axes: str  # torch keeps linear weights as [out, in]
    ours: str
    our_axes: str
    when: Callable[[ModelConfig], bool] = _always

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.hf

    def names(self, config: ModelConfig) -> list[str]:
        """The Hugging Face tensor names of this row, in layer order."""
        return [self.hf.format(layer=i) for i in range(config.num_layers)] if self.stacked else [self.hf]

    def hf_shape(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(math.prod(_sizes(axis, config)) for axis in self.hf_axes.split())

    def our_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of one layer's part, without the stacking axis."""
        return _sizes(self.our_axes, config)

    def from_hf(self, tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
        return self.part_from_hf(tensor, self.our_shape(config))

    def hf_part(self, part: tuple[slice, ...], config: ModelConfig) -> tuple[slice, ...]:
        """Where in the stored tensor of one layer `part` lies, which has a slice for each of our axes.

        Of axes that are stored as one (`NH`) only the first may be cut: then the part is one piece of the file's rows.
        """
        cuts = dict(zip(self.our_axes.replace(" ", ""), part, strict=True))
        found = []
        for axis in self.hf_axes.split():
            inner = math.prod(_sizes(axis[1:], config))
            assert all(
                cuts[a].stop - cuts[a].start == n for a, n in zip(axis[1:], _sizes(axis[1:], config), strict=True)
            )
            found.append(slice(cuts[axis[0]].start * inner, cuts[axis[0]].stop * inner))
        return tuple(found)

    def part_from_hf(self, tensor: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """As `from_hf`, of a part whose axes of ours have these sizes."""
        letters, ours = self.hf_axes.replace(" ", ""), self.our_axes.replace(" ", "")
        size = dict(zip(ours, sizes, strict=True))
        return tensor.reshape([size[axis] for axis in letters]).transpose([letters.index(axis) for axis in ours])

    def to_hf(self, array: np.ndarray, config: ModelConfig) -> np.ndarray:
        letters = self.our_axes.replace(" ", "")
        order = [letters.index(axis) for axis in self.hf_axes.replace(" ", "")]
        return array.transpose(order).reshape(self.hf_shape(config))


def _has_bias(config: ModelConfig) -> bool:
    return config.qkv_bias


def _has_qk_norm(config: ModelConfig) -> bool:
    return config.qk_norm


def _is_untied(config: ModelConfig) -> bool:
    return not config.tie_word_embeddings


HEAD = Row("lm_head.weight", "V D", "lm_head.kernel", "V D", _is_untied)
EMBEDDING = Row("model.embed_tokens.weight", "V D", "embed.embedding", "V D")

TABLE: tuple[Row, ...] = (
    EMBEDDING,
    Row("model.layers.{layer}.input_layernorm.weight", "D", "layers.input_norm.scale", "D"),
    Row("model.layers.{layer}.self_attn.q_proj.weight", "NH D", "layers.attention.q_proj.kernel", "D N H"),
    Row("model.layers.{layer}.self_attn.k_proj.weight", "KH D", "layers.attention.k_proj.kernel", "D K H"),
    Row("model.layers.{layer}.self_attn.v_proj.weight", "KH D", "layers.attention.v_proj.kernel", "D K H"),
    Row("model.layers.{layer}.self_attn.q_proj.bias", "NH", "layers.attention.q_proj.bias", "N H", _has_bias),
    Row("model.layers.{layer}.self_attn.k_proj.bias", "KH", "layers.attention.k_proj.bias", "K H", _has_bias),
    Row("model.layers.{layer}.self_attn.v_proj.bias", "KH", "layers.attention.v_proj.bias", "K H", _has_bias),
    Row("model.layers.{layer}.self_attn.q_norm.weight", "H", "layers.attention.q_norm.scale", "H", _has_qk_norm),
    Row("model.layers.{layer}.self_attn.k_norm.weight", "H", "layers.attention.k_norm.scale", "H", _has_qk_norm),
    Row("model.layers.{layer}.self_attn.o_proj.weight", "D NH", "layers.attention.o_proj.kernel", "N H D"),
    Row("model.layers.{layer}.post_attention_layernorm.weight", "D", "layers.post_attention_norm.scale", "D"),
    Row("model.layers.{layer}.mlp.gate_proj.weight", "F D", "layers.mlp.gate_proj.kernel", "D F"),
    Row("model.layers.{layer}.mlp.up_proj.weight", "F D", "layers.mlp.up_proj.kernel", "D F"),
    Row("model.layers.{layer}.mlp.down_proj.weight", "D F", "layers.mlp.down_proj.kernel", "F D"),
    Row("model.norm.weight", "D", "final_norm.scale", "D"),
    HEAD,
)


def rows(config: ModelConfig) -> Iterator[Row]:
    """The rows that a model of this config has."""
    return (row for row in TABLE if row.when(config))


def adapter_rows(config: ModelConfig) -> Iterator[Row]:
    """The rows of the adapter of this config, under PEFT's names; the mask embedding, which PEFT has not, under ours."""
    assert config.adapter is not None
    for row in rows(config):
        target = row.ours.removesuffix(".kernel")
        if target != row.ours and target.rpartition(".")[2] in config.adapter.targets:
            hf, (outputs, inputs) = "base_model.model." + row.hf.removesuffix(".weight"), row.hf_axes.split()
            yield Row(f"{hf}.lora_A.weight", f"R {inputs}", f"{target}.lora_a", " ".join([*inputs, "R"]))
            yield Row(f"{hf}.lora_B.weight", f"{outputs} R", f"{target}.lora_b", " ".join(["R", *outputs]))
    if config.adapter.rows == "mask":
        yield Row(MASK_EMBEDDING, "D", MASK_EMBEDDING, "D")


def _sizes(letters: str, config: ModelConfig) -> tuple[int, ...]:
    size = {
        "R": 0 if config.adapter is None else config.adapter.rank,
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }
    return tuple(size[letter] for letter in letters if letter != " ")
