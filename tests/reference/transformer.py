"""A Qwen2.5 / Qwen3 forward pass in numpy float64, one sequence, no cache, no batching, a loop over the heads.

Written from the papers (RoFormer, RMSNorm, SwiGLU, grouped-query attention); shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class ReferenceTransformer:
    """`params` by path, as `wedlm_jax.model.parameters.params_of` gives them; layers are stacked on axis 0."""

    def __init__(self, config, params: Mapping[str, np.ndarray]):
        self.config = config
        self.params = {name: np.asarray(value, np.float64) for name, value in params.items()}

    def logits(self, tokens: Sequence[int], positions: Sequence[int], visible: np.ndarray | None = None) -> np.ndarray:
        """Logits [T, V] of T tokens in physical order; `visible` bool [T, T] query by key, causal where it is None."""
        c, p, T = self.config, self.params, len(tokens)
        if visible is None:
            visible = np.tril(np.ones((T, T), bool))
        x = p["embed.embedding"][np.asarray(tokens, int)]
        for i in range(c.num_layers):
            layer = {name.removeprefix("layers."): v[i] for name, v in p.items() if name.startswith("layers.")}
            x = x + self._attention(self._norm(x, layer["input_norm.scale"]), layer, np.asarray(positions), visible)
            y = self._norm(x, layer["post_attention_norm.scale"])
            gate = y @ layer["mlp.gate_proj.kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.kernel"])) @ layer["mlp.down_proj.kernel"]
        x = self._norm(x, p["final_norm.scale"])
        return x @ p["embed.embedding" if c.tie_word_embeddings else "lm_head.kernel"].T

    def _attention(self, x: np.ndarray, layer: Mapping[str, np.ndarray], positions: np.ndarray, visible: np.ndarray):
        c = self.config
        out = np.zeros_like(x)
        for head in range(c.num_heads):
            kv_head = head // (c.num_heads // c.num_kv_heads)
            q = self._project(x, layer, "q", head, positions)
            k = self._project(x, layer, "k", kv_head, positions)
            v = self._project(x, layer, "v", kv_head, positions)
            scores = np.where(visible, q @ k.T / np.sqrt(c.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out += weights @ v @ layer["attention.o_proj.kernel"][head]
        return out

    def _project(self, x: np.ndarray, layer: Mapping[str, np.ndarray], which: str, head: int, positions: np.ndarray):
        y = x @ layer[f"attention.{which}_proj.kernel"][:, head]
        if self.config.qkv_bias:
            y = y + layer[f"attention.{which}_proj.bias"][head]
        if which == "v":
            return y
        if self.config.qk_norm:
            y = self._norm(y, layer[f"attention.{which}_norm.scale"])
        half = self.config.head_dim // 2
        angles = positions[:, None] * self.config.rope_theta ** -(np.arange(half) / half)
        first, second = y[:, :half], y[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    def _norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps) * scale
