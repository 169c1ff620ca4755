"""Trains an adapter of mask rows beside Qwen3-0.6B on your conversations: the same answers, in fewer forwards.

    python -m wedlm_jax.train --exp qwen3_0p6b_adapter data.path=chat.jsonl

5.05M parameters, 0.85 % of the base, which stays as it is, in bfloat16 (1.2 GB). Not run by us at this size.
"""

import dataclasses

from wedlm_jax.experiment import (
    AdapterConfig,
    Experiment,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    load_experiment,
)


def qwen3_0p6b_adapter() -> Experiment:
    sft = load_experiment("qwen3_0p6b_sft")
    return dataclasses.replace(
        sft,
        name="qwen3_0p6b_adapter",
        model=dataclasses.replace(sft.model, param_dtype="bfloat16", adapter=AdapterConfig(rank=8, alpha=16.0)),
        data=dataclasses.replace(sft.data, row_length=2048),
        objective=ObjectiveConfig(
            block_size=32, ar_loss_weight=0, fully_masked=0.3, suffix_masked=0.3, targets="distill"
        ),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_ratio=0.03, final_fraction=0.1, weight_decay=0.0),
        train=TrainConfig(steps=4000, batch_size=16, micro_batches=4, checkpoint_every=500),
    )
