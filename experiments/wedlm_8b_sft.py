"""Fine-tunes Tencent's WeDLM-8B on conversations; it has the shape of Qwen3-8B, a context of 16,384, and stays a WeDLM model.

    python -m wedlm_jax.train --exp wedlm_8b_sft data.path=chat.jsonl

Tencent's licence applies to these weights and to what you make of them; it excludes use in the European Union. 8 chips of
v5p or more, memory and least times as of Qwen3-8B in docs/scaling.md. The weights cannot be had where this was written, so
this experiment was never run; loading of the format is tested on small models.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, load_experiment


def wedlm_8b_sft() -> Experiment:
    sft = load_experiment("qwen3_8b_sft")
    return dataclasses.replace(
        sft,
        name="wedlm_8b_sft",
        init_from="tencent/WeDLM-8B-Instruct",
        model=dataclasses.replace(sft.model, max_position_embeddings=16_384),
    )
