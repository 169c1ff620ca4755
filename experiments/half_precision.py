"""What computing in bfloat16 costs in training: the quickstart's base and its adaptation, beside the same in float32.

    python -m wedlm_jax.train --exp half_precision

An accelerator's default is bfloat16 (`model.dtype`): products and activations, while parameters, their gradients' sums, losses
and the optimizer stay in float32. Each arm changes one thing more, and all are measured in float32 on held-out word problems
(n = 200), so that what differs was learned. Three training seeds; 300 steps of adaptation, as in `ablations`. A stopped study
goes on where it was. Table and plot land in runs/half_precision.

Two CPU cores, about an hour. Expect no difference beside that between the seeds. Values: benchmarks/RESULTS.md.
"""

from wedlm_jax.experiment import Measure, Stage, Study

BFLOAT16 = "model.dtype=bfloat16"
FIRST_MOMENT = "optimizer.first_moment_dtype=bfloat16"
BASE, BASE_IN_BFLOAT16 = Stage("quickstart_base"), Stage("quickstart_base", (BFLOAT16,))


def half_precision() -> Study:
    on_words = dict(task="word_problems")
    return Study(
        name="half_precision",
        arms={
            "float32": (BASE, Stage("ablations:adapted")),
            "adapted in bfloat16": (BASE, Stage("ablations:adapted", (BFLOAT16,))),
            "and Adam's first moment": (BASE, Stage("ablations:adapted", (BFLOAT16, FIRST_MOMENT))),
            "base and adapted in bfloat16": (BASE_IN_BFLOAT16, Stage("ablations:adapted", (BFLOAT16,))),
        },
        measures=(
            Measure("masked-token loss, nats", "masked_loss"),
            Measure("AR accuracy", "accuracy", **on_words, decoder="AR, adapted"),
            Measure("streaming accuracy, tau = 0.4", "accuracy", **on_words, decoder="streaming, tau=0.4"),
            Measure("streaming p_cache", "p_cache", **on_words, decoder="streaming, tau=0.4"),
            Measure("verified, tokens per forward", "tokens_per_forward", **on_words, decoder="verified"),
        ),
    )
