"""What the parts of the method do for a small model: blocks, streams and the AR loss (Figures 5b and 5c in miniature).

    python -m wedlm_jax.train --exp ablations

Adapts the quickstart's base with eight settings and three training seeds, and measures each on held-out word problems
(n = 200): masked-token loss in blocks of 16, AR and streaming accuracy, p_cache and what verified decoding gains. Every run has
300 steps, the quickstart's adaptation 1,000. A stopped study goes on where it was. Table and plot land in runs/ablations.

Two CPU cores, about an hour. Expect (means of three seeds): without the AR loss AR accuracy falls from 96 to 8 %, and with it
what verified decoding gains, from 2.5 to 1.2 tokens per forward; with the single stream the masked-token loss is 0.62 nats
instead of 0.26; blocks of 4 give 0.83 nats, blocks of 8 and 32 give 0.45 and 0.34, a bidirectional block 0.30. The plot is
docs/ablations.png, all values are in benchmarks/RESULTS.md.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, Measure, Stage, Study, load_experiment

STEPS = 300
BASE = Stage("quickstart_base")


def ablations() -> Study:
    changes = {
        "quickstart (J = 16, causal, dual, w = 1)": (),
        "J = 4": ("objective.block_size=4",),
        "J = 8": ("objective.block_size=8",),
        "J = 32": ("objective.block_size=32",),
        "bidirectional in the block": ("objective.in_block=bidirectional",),
        "w = 0.3": ("objective.ar_loss_weight=0.3",),
        "w = 0": ("objective.ar_loss_weight=0",),
        "single stream, w = 0": ("objective.streams=single", "objective.ar_loss_weight=0"),
    }
    on_words = dict(task="word_problems")
    return Study(
        name="ablations",
        arms={label: (BASE, Stage("ablations:adapted", overrides)) for label, overrides in changes.items()},
        measures=(
            Measure("masked-token loss, nats", "masked_loss"),
            Measure("AR accuracy", "accuracy", **on_words, decoder="AR, adapted"),
            Measure("streaming accuracy, tau = 0.4", "accuracy", **on_words, decoder="streaming, tau=0.4"),
            Measure("streaming p_cache", "p_cache", **on_words, decoder="streaming, tau=0.4"),
            Measure("verified, tokens per forward", "tokens_per_forward", **on_words, decoder="verified"),
        ),
    )


def adapted() -> Experiment:
    """One adaptation of the study."""
    quickstart = load_experiment("quickstart")
    return dataclasses.replace(
        quickstart,
        name="ablations",
        train=dataclasses.replace(quickstart.train, steps=STEPS, checkpoint_every=STEPS),
        evaluation=dataclasses.replace(
            quickstart.evaluation,
            tasks=("word_problems",),
            entropy_thresholds=(0.4,),
            verified_windows=(),
            text_drafts=False,
            masked_loss_rows=64,
        ),
    )
