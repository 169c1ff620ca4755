"""Continued pretraining of Qwen3-8B into a WeDLM model: section 6.1 of the paper, 100B tokens.

    python -m wedlm_jax.train --exp qwen3_8b_cpt
    python -m wedlm_jax.train --exp qwen3_8b_cpt data.source=text data.mixture= data.path=corpus/
    python -m wedlm_jax.train --exp qwen3_8b_cpt --compile-only v5p:4x4x4

A batch is 256 rows of 4096 tokens, 1.05M, so 95,368 steps are 100B tokens; learning rate 3e-6 to 3e-7, cosine, blocks of 32.
The paper does not give its batch size, and its corpus is internal; here it is an open one, by documents 70 % FineWeb-Edu, 15 %
OpenWebMath and 15 % Python code, read with the `datasets` extra (several hundred GB, fetched once; its licences are its own).
The second command takes a folder of yours instead. 64 chips of v5p or 256 of v5e; memory and least times, by compiler and not
by a run of ours, are in docs/scaling.md.
"""

from wedlm_jax.experiment import (
    DataConfig,
    Experiment,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    WeightedSource,
)


def qwen3_8b_cpt() -> Experiment:
    return Experiment(
        name="qwen3_8b_cpt",
        init_from="Qwen/Qwen3-8B-Base",
        model=ModelConfig(
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=12_288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=32_768,
            dtype="bfloat16",
            remat="attention",
        ),
        data=DataConfig(
            source="mixture",
            mixture=(
                WeightedSource(
                    "hf_dataset", "HuggingFaceFW/fineweb-edu", subset="sample-100BT", text_column="text", weight=0.70
                ),
                WeightedSource("hf_dataset", "open-web-math/open-web-math", text_column="text", weight=0.15),
                WeightedSource("hf_dataset", "codeparrot/codeparrot-clean", text_column="content", weight=0.15),
            ),
            row_length=4096,
            num_groups=64,  # any number of hosts that divides it
            pack_together=16,
            num_workers=8,
        ),
        objective=ObjectiveConfig(block_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-6, warmup_steps=500, final_fraction=0.1),
        train=TrainConfig(steps=95_368, batch_size=256, checkpoint_every=500),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
