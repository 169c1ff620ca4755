"""Real text: a model of the Python standard library's source, first AR, then WeDLM, in one run.

    python -m wedlm_jax.train --exp stdlib_code
    python -m wedlm_jax.evaluate --exp stdlib_code

The text is the library of the running Python, without tests (about 10 MB in Python 3.11); a twentieth of the files is
held out, by a hash of the path. The evaluation prints bits per byte on held-out files, tokens per forward, and
completions of AR and streaming side by side. The model is small and sees little text (1,000 steps of 2,048 tokens): its
completions look like Python and mean nothing.

Two CPU cores: 17 minutes of processor time to train (32 of the clock, beside other work), 1 to evaluate. Expect 1.58 bits
per byte (AR, 8 held-out files of 98,473 bytes), a masked-token loss of 3.6 nats at a mask ratio of 0.1 and 5.3 at 0.9, and
next to no parallel decoding by its masks: 0.93 tokens per forward streaming at tau 0.1, 0.4 and 1, where no mask is sure
enough to be filled beside another (2026-11-21, Python 3.11.7, jax 0.10.2; the commands above). Verified decoding drafts text as
well: 3.2 tokens per forward, 1.1 by masks alone (benchmarks/RESULTS.md, "Lookup and verified decoding on code").
"""

from wedlm_jax.experiment import (
    DataConfig,
    EvaluationConfig,
    Experiment,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def stdlib_code() -> Experiment:
    return Experiment(
        name="stdlib_code",
        model=ModelConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=768,
            num_layers=4,
            num_heads=8,
            num_kv_heads=2,
            head_dim=32,
            rope_theta=10_000.0,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
        tokenizer=TokenizerConfig(vocab_size=2048),
        data=DataConfig(source="stdlib_code", row_length=256),
        objective=ObjectiveConfig(block_size=16, ar_steps=600),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100, final_fraction=0.05, b2=0.98),
        train=TrainConfig(steps=1000, batch_size=8),
        evaluation=EvaluationConfig(
            tasks=(),
            held_out_files=8,
            masked_loss_rows=32,
            text_prompts=4,
            max_new_tokens=64,
            block_size=16,
            in_place=True,
        ),
    )
