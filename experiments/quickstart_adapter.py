"""Trains an adapter of mask rows beside the model of quickstart_base, which answers as before, in fewer forwards.

    python -m wedlm_jax.train --exp quickstart_base
    python -m wedlm_jax.train --exp quickstart_adapter
    python -m wedlm_jax.evaluate --exp quickstart_adapter

0.17M parameters, 9.4 % of the base; two CPU cores, under 4 minutes. Beside the bases of three training seeds verified decoding
returned the base's own text on all of 1,800 held-out prompts, at 3.9 tokens per forward on word problems, 9.5 on counting and
2.9 on copying (`python -m benchmarks.quickstart_seeds`, benchmarks/RESULTS.md).
"""

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

STEPS = 1600


def quickstart_adapter() -> Experiment:
    full = load_experiment("quickstart")
    return dataclasses.replace(
        full,
        name="quickstart_adapter",
        model=ModelOverrides(adapter=AdapterConfig(rank=12, alpha=24.0)),
        objective=ObjectiveConfig(block_size=16, ar_loss_weight=0, fully_masked=0.5, suffix_masked=0.4),
        optimizer=OptimizerConfig(learning_rate=8e-3, warmup_steps=50, final_fraction=0.05, b2=0.98, weight_decay=0.0),
        train=TrainConfig(steps=STEPS, batch_size=8, checkpoint_every=STEPS // 4),
        evaluation=dataclasses.replace(full.evaluation, verified_entropy_threshold=1.0),
    )
