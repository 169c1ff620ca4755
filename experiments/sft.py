"""Fine-tunes any Qwen2.5, Qwen3, Llama or WeDLM model on your conversations: the one command that most people need.

    python -m wedlm_jax.train --exp sft model.path=DIR data.path=chat.jsonl

A line of chat.jsonl is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}; ShareGPT's
`conversations` and {"prompt", "completion"} are read too, .gz and .zst as well. `model.path` is a Hugging Face directory, a
workdir of ours or a hub id. An AR model becomes a WeDLM model, a WeDLM model stays one. Look at the data first:

    python -m wedlm_jax.data --exp sft model.path=DIR data.path=chat.jsonl

Hardware and time follow the model: `--compile-only` tells the memory of a TPU slice or of GPUs before you have them, and
docs/scaling.md has Qwen3-0.6B to 8B. Where memory is left, `model.remat=attention` takes less time. What is prompt runs in
one stream alone, for which the step is compiled four times over (docs/experiments.md, "Sources"). Settings follow section
6.1 of the paper: learning rate 3e-6, cosine, blocks of 32. Not run by us on a model of 0.6B or more.
"""

from wedlm_jax.experiment import (
    DataConfig,
    EvaluationConfig,
    Experiment,
    ModelOverrides,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
)


def sft() -> Experiment:
    return Experiment(
        name="sft",
        model=ModelOverrides(remat="full"),
        data=DataConfig(source="chat", row_length=2048, pack_together=4),
        objective=ObjectiveConfig(block_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-6, warmup_ratio=0.03, final_fraction=0.1),
        train=TrainConfig(steps=1000, batch_size=16, checkpoint_every=250, eval_every=250),
        evaluation=EvaluationConfig(tasks=(), text_prompts=4, masked_loss_rows=32),
    )
