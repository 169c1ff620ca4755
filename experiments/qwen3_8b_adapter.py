"""Trains an adapter of mask rows beside Qwen3-8B on your conversations: the same answers, in fewer forwards.

    python -m wedlm_jax.train --exp qwen3_8b_adapter data.path=chat.jsonl
    python -m wedlm_jax.train --exp qwen3_8b_adapter data.path=chat.jsonl data.self_generated.max_new_tokens=1024
    python -m wedlm_jax.train --exp qwen3_8b_adapter --compile-only v5e:2x2

43.7M parameters, 0.53 % of the base, which stays as it is, in bfloat16 (16.4 GB); all but model and rank is as in
qwen3_0p6b_adapter.

By compiler (the third command), on one TPU host of four v5e chips, 16 rows of 2,048 tokens a step, 4 at a time: 9.8 GB a chip of
its 17 at the peak, and 3.7 s a step by its FLOPs, so 4.1 hours for 4,000 steps at the data sheet's rate; on four of v5p
(v5p:2x2x1) 9.9 GB a chip, 1.6 s and 1.8 hours.
Attention is as in qwen3_0p6b_adapter. Not run by us at this size.
"""

import dataclasses

from wedlm_jax.experiment import AdapterConfig, Experiment, load_experiment


def qwen3_8b_adapter() -> Experiment:
    small, large = load_experiment("qwen3_0p6b_adapter"), load_experiment("qwen3_8b_sft")
    return dataclasses.replace(
        small,
        name="qwen3_8b_adapter",
        init_from=large.init_from,
        model=dataclasses.replace(
            large.model, remat="full", param_dtype="bfloat16", adapter=AdapterConfig(rank=16, alpha=32.0)
        ),
        data=dataclasses.replace(large.data, row_length=2048),
    )
