"""Fine-tunes Qwen3-8B, or the result of qwen3_8b_cpt, on conversations: section 6.1 of the paper (3e-6, cosine, blocks of 32).

    python -m wedlm_jax.train --exp qwen3_8b_sft data.path=chat.jsonl
    python -m wedlm_jax.train --exp qwen3_8b_sft data.path=chat.jsonl init_from=runs/qwen3_8b_cpt \\
        model.max_position_embeddings=32768
    python -m wedlm_jax.train --exp qwen3_8b_sft --compile-only v5p:2x2x2

8 chips of v5p or more, by compiler and the computed rows of docs/scaling.md; not run by us at this size. All but the model is as
in qwen3_0p6b_sft.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, load_experiment


def qwen3_8b_sft() -> Experiment:
    sft = load_experiment("qwen3_0p6b_sft")
    return dataclasses.replace(
        sft,
        name="qwen3_8b_sft",
        init_from="Qwen/Qwen3-8B",
        model=dataclasses.replace(load_experiment("qwen3_8b_cpt").model, max_position_embeddings=40_960),
    )
