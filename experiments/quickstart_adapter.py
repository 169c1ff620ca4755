"""Trains an adapter of mask rows beside the model of quickstart_base, which answers as before, in fewer forwards."""

import dataclasses

from wedlm_jax.experiment import (
    AdapterConfig,
    Experiment,
    ModelOverrides,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    load_experiment,
)

STEPS = 1200


def quickstart_adapter() -> Experiment:
    return dataclasses.replace(
        load_experiment("quickstart"),
        name="quickstart_adapter",
        model=ModelOverrides(adapter=AdapterConfig(rank=12, alpha=24.0)),
        objective=ObjectiveConfig(
            block_size=16, ar_loss_weight=0, fully_masked=0.3, suffix_masked=0.3, targets="distill"
        ),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50, final_fraction=0.05, b2=0.98, weight_decay=0.0),
        train=TrainConfig(steps=STEPS, batch_size=8, checkpoint_every=STEPS // 3),
    )
