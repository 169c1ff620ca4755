"""Fine-tunes Qwen3-8B, or the result of qwen3_8b_cpt, on conversations: section 6.1 of the paper (3e-6, cosine, blocks of 32).

    python -m wedlm_jax.train --exp qwen3_8b_sft data.path=chat.jsonl
    python -m wedlm_jax.train --exp qwen3_8b_sft data.path=chat.jsonl init_from=runs/qwen3_8b_cpt \\
        model.max_position_embeddings=32768
    python -m wedlm_jax.train --exp qwen3_8b_sft --compile-only v5p:2x2x2

8 chips of v5p or more; not run by us at this size: memory and least times, by compiler, are in docs/scaling.md.
"""

import dataclasses

from wedlm_jax.experiment import DataConfig, Experiment, OptimizerConfig, TrainConfig, load_experiment


def qwen3_8b_sft() -> Experiment:
    cpt = load_experiment("qwen3_8b_cpt")
    return dataclasses.replace(
        cpt,
        name="qwen3_8b_sft",
        init_from="Qwen/Qwen3-8B",
        model=dataclasses.replace(cpt.model, max_position_embeddings=40_960),
        data=DataConfig(source="chat", row_length=4096, num_groups=8),
        optimizer=OptimizerConfig(learning_rate=3e-6, warmup_ratio=0.03, final_fraction=0.1),
        train=TrainConfig(steps=2000, batch_size=64, micro_batches=8, checkpoint_every=250),
    )
