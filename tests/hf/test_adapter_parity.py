"""The promise of an adapter of mask rows, held against another implementation: its text is that of the base in transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax import DecodeConfig, generate, load, save, save_adapter
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import init_params, transformer_from

from .adapters import with_noise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # the models are tiny, and the cores are shared with the other test processes

PROMPTS, NEW_TOKENS = 50, 24


def test_verified_text_with_an_adapter_is_greedy_text_of_the_exported_base_in_transformers(tmp_path):
    config = ModelConfig(24, 32, 48, 2, 4, 2, 12, tie_word_embeddings=True)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    params = {n: jnp.asarray(rng.normal(n.endswith("scale"), 0.25, x.shape), x.dtype) for n, x in shapes.items()}
    base = Model(transformer_from(config, params), config)
    save(base, tmp_path / "base", "qwen3")
    save_adapter(with_noise(base, AdapterConfig(rank=4)), tmp_path / "adapter")
    model = load(tmp_path / "base", "float32", adapter=tmp_path / "adapter")
    prompts = [[int(t) for t in rng.integers(0, 24, rng.integers(4, 17))] for _ in range(PROMPTS)]

    settings = DecodeConfig("verified", max_new_tokens=NEW_TOKENS, window_size=8, entropy_threshold=9.0, stop_ids=())
    ours = generate(model, prompts, dataclasses.replace(settings, ban_mask=False))
    drafted = sum(completion.stats.generated_tokens - completion.stats.forwards for completion in ours)
    assert drafted > PROMPTS  # drafts of the adapter were taken, and not AR's tokens alone

    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])  # padded on the left
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        expected = other.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert [completion.ids for completion in ours] == expected[:, longest:].tolist()
