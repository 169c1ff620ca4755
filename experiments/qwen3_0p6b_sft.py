"""Fine-tunes Qwen3-0.6B on your conversations into a WeDLM model.

    python -m wedlm_jax.train --exp qwen3_0p6b_sft data.path=chat.jsonl
    python -m wedlm_jax.train --exp qwen3_0p6b_sft mesh.data=1 mesh.fsdp=8 --compile-only v5e:2x4

Settings follow section 6.1 of the paper (learning rate 3e-6, cosine, blocks of 32). A v5e slice of 8 chips holds it, by
compiler (docs/scaling.md); parameters, gradients and optimizer are 16 bytes a parameter, 10 GB, on a single accelerator. Not run
by us at this size.
"""

from wedlm_jax.experiment import (
    DataConfig,
    Experiment,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
)


def qwen3_0p6b_sft() -> Experiment:
    return Experiment(
        name="qwen3_0p6b_sft",
        init_from="Qwen/Qwen3-0.6B",
        model=ModelConfig(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
            dtype="bfloat16",
            remat="attention",
        ),
        data=DataConfig(source="chat", row_length=4096, num_groups=8, pack_together=8),
        objective=ObjectiveConfig(block_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-6, warmup_ratio=0.03, final_fraction=0.1),
        train=TrainConfig(steps=2000, batch_size=64, micro_batches=8, checkpoint_every=250),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
