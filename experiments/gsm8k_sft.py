"""Fine-tunes a model on GSM8K from tensorflow_datasets: 7,473 grade-school problems with worked solutions.

    tfds build gsm8k --file_format=array_record
    python -m wedlm_jax.train --exp gsm8k_sft model.path=DIR

The first command downloads and prepares the data (it needs TensorFlow, once; the training does not). 400 steps of 16 rows of
1,024 tokens. Problems of the `test` split are not read; a file of them (docs/measuring.md, "Questions of your own") is scored by
AR of the model before, and by every decoder after:

    python -m wedlm_jax.evaluate --exp gsm8k_sft evaluation.questions=gsm8k.jsonl evaluation.max_new_tokens=512

Settings otherwise as `sft`; run by us on a dataset of this form that a test makes, never on GSM8K itself.
"""

import dataclasses

from wedlm_jax.experiment import DataConfig, Experiment, load_experiment


def gsm8k_sft() -> Experiment:
    sft = load_experiment("sft")
    return dataclasses.replace(
        sft,
        name="gsm8k_sft",
        data=DataConfig(
            source="tfds", path="gsm8k", prompt_column="question", completion_column="answer", row_length=1024
        ),
        train=dataclasses.replace(sft.train, steps=400, checkpoint_every=100, eval_every=100),
    )
