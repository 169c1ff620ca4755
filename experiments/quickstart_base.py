"""A small Qwen3-style AR model, trained from scratch on word problems, counting and copying.

    python -m wedlm_jax.train --exp quickstart_base

Two CPU cores, about 3 minutes. Expect 98 to 100 % exact match on held-out word problems, 100 % on counting, and anything
from 26 to 99 % on copying, which is learned last. Measured by `python -m wedlm_jax.evaluate --exp quickstart` (26 % with
seed 0, docs/quickstart.md) and `python -m benchmarks.quickstart_seeds` (36 % on average over three seeds, 30, 30 and 99 % of
an earlier version; n = 200).
"""

from wedlm_jax.experiment import (
    DataConfig,
    Experiment,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)

STEPS = 1300


def quickstart_base() -> Experiment:
    return Experiment(
        name="quickstart_base",
        model=ModelConfig(
            vocab_size=576,
            hidden_size=192,
            intermediate_size=576,
            num_layers=4,
            num_heads=6,
            num_kv_heads=2,
            head_dim=32,
            rope_theta=10_000.0,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        ),
        tokenizer=TokenizerConfig(vocab_size=576),
        data=DataConfig(source="quickstart_tasks", row_length=128, num_end_tokens=1),
        objective=ObjectiveConfig(block_size=1, ar_steps=STEPS),  # AR alone: blocks of one token waste no row
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100, final_fraction=0.05, b2=0.98),
        train=TrainConfig(steps=STEPS, batch_size=8, checkpoint_every=STEPS // 2),
    )
