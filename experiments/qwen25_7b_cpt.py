"""Continued pretraining of Qwen2.5-7B into a WeDLM model: section 6.1 of the paper, 100B tokens.

    python -m wedlm_jax.train --exp qwen25_7b_cpt
    python -m wedlm_jax.train --exp qwen25_7b_cpt data.source=text data.mixture= data.path=corpus/
    python -m wedlm_jax.train --exp qwen25_7b_cpt --compile-only v5p:4x4x4

Corpus, batch, schedule and hardware as in qwen3_8b_cpt; not run by us at this size, see docs/scaling.md.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, ModelConfig, load_experiment


def qwen25_7b_cpt() -> Experiment:
    return dataclasses.replace(
        load_experiment("qwen3_8b_cpt"),
        name="qwen25_7b_cpt",
        init_from="Qwen/Qwen2.5-7B",
        model=ModelConfig(
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18_944,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            max_position_embeddings=131_072,
            qkv_bias=True,
            qk_norm=False,
            dtype="bfloat16",
            remat="attention",
        ),
    )
