"""Trains an adapter of mask rows beside Qwen3-0.6B on your conversations: the same answers, in fewer forwards.

    python -m wedlm_jax.train --exp qwen3_0p6b_adapter data.path=chat.jsonl
    python -m wedlm_jax.train --exp qwen3_0p6b_adapter data.path=chat.jsonl data.self_generated.max_new_tokens=1024
    python -m wedlm_jax.train --exp qwen3_0p6b_adapter --compile-only v5e:2x2

The second learns from the base's own replies to the prompts of the file, which it writes first (greedily, by AR decoding); there
a conversation may end with a question. 5.05M parameters, 0.85 % of the base, which stays as it is, in bfloat16 (1.2 GB).

By compiler (the third command), on one TPU host of four v5e chips, 16 rows of 2,048 tokens a step, 4 at a time: 2.7 GB a chip at
the peak, 2.1 GB of them temporaries, and 0.54 s a step by the FLOPs of its largest program (rows that are masks throughout), so
36 minutes for 4,000 steps at the data sheet's rate. The memory stream's attention is the splash kernel's; that of the prediction
stream is XLA's, since splash takes no mask rows alone, and is counted over whole rows. Not run by us at this size.
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
        model=dataclasses.replace(
            sft.model, remat="full", param_dtype="bfloat16", adapter=AdapterConfig(rank=8, alpha=16.0)
        ),
        data=dataclasses.replace(sft.data, row_length=2048, pack_together=32),
        objective=ObjectiveConfig(
            block_size=32, ar_loss_weight=0, fully_masked=0.3, suffix_masked=0.3, targets="distill"
        ),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_ratio=0.03, final_fraction=0.1, weight_decay=0.0),
        train=TrainConfig(steps=4000, batch_size=16, micro_batches=4, checkpoint_every=500),
    )
