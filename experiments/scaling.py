"""From what size on adapting costs no accuracy, and what breaks without RoPE (Figure 5c and the break condition in miniature).

    python -m wedlm_jax.train --exp scaling

Four sizes from 0.5M to 7.9M parameters, and the second of them once more with learned absolute positions, which are read by
physical index: reordering takes a token away from its position, and a mask cannot know which place it stands for. Each model is
trained from scratch (AR), adapted, and measured on held-out word problems (n = 200) before and after. The dashed line in the
plot of the differences is the threshold: to its left, adapting has cost accuracy.

Two CPU cores, about half an hour. Expect (seed 0): adapted minus base AR accuracy of -7.5, -1.5, -1.0 and +4.0 points from
0.5M to 7.9M parameters, so the threshold lies above 4M here (the largest base is trained for 600 updates and has not
converged: 81 %, and 85 % after its adaptation); a masked-token loss of 0.27, 0.27 and 0.20 nats from 1.4M up. With learned
absolute positions 1.78 nats, no problem streamed right, and 1.03 tokens per forward verified: mask recovery is broken. All
values are in benchmarks/RESULTS.md, the plot is docs/scaling_study.png.

One training seed: a difference of one or two points is noise. `seeds=(0, 1, 2)` below trains three, and plots their spread. A
stopped study goes on where it was. Table and plot land in runs/scaling.
"""

import dataclasses
import functools

from wedlm_jax.experiment import Experiment, Measure, Stage, Study, load_experiment

# Updates of the base by width D: a wider model learns in fewer, and each is to have learned its task before it is adapted.
BASE_STEPS = {96: 1500, 160: 1100, 256: 800, 384: 600}
ADAPTATION_STEPS = 300  # the same for all


def scaling() -> Study:
    on_words = dict(task="word_problems")
    after = dict(**on_words, decoder="AR, adapted")
    arms = {
        "0.5M (D = 96)": (Stage("scaling:base_96"), Stage("scaling:adapted_96")),
        "1.4M (D = 160)": (Stage("scaling:base_160"), Stage("scaling:adapted_160")),
        "3.6M (D = 256)": (Stage("scaling:base_256"), Stage("scaling:adapted_256")),
        "7.9M (D = 384)": (Stage("scaling:base_384"), Stage("scaling:adapted_384")),
        "D = 160, learned absolute": (
            Stage("scaling:base_160", ("model.position_embedding_type=learned_absolute",)),
            Stage("scaling:adapted_160"),
        ),
    }
    return Study(
        name="scaling",
        arms=arms,
        measures=(
            Measure("AR accuracy, base", "accuracy", **on_words, decoder="AR, base"),
            Measure("AR accuracy, adapted", "accuracy", **after),
            Measure("adapted minus base", "accuracy", **after, minus="AR, base", threshold=0.0),
            Measure("masked-token loss, nats", "masked_loss"),
            Measure("streaming accuracy, tau = 0.4", "accuracy", **on_words, decoder="streaming, tau=0.4"),
            Measure("verified, tokens per forward", "tokens_per_forward", **on_words, decoder="verified"),
        ),
        seeds=(0,),
    )


def learning_rate(width: int) -> float:
    """The quickstart's 3e-3 at its width of 192 and below, and inversely with the width above it."""
    return 3e-3 * min(1.0, 192 / width)


def base(width: int) -> Experiment:
    """Four layers of heads of 32, every head with its own keys and values, F = 3 D."""
    quickstart, steps = load_experiment("quickstart_base"), BASE_STEPS[width]
    assert quickstart.model is not None
    return dataclasses.replace(
        quickstart,
        name="scaling",
        model=dataclasses.replace(
            quickstart.model,
            hidden_size=width,
            intermediate_size=3 * width,
            num_heads=width // 32,
            num_kv_heads=width // 32,
        ),
        objective=dataclasses.replace(quickstart.objective, ar_steps=steps),
        optimizer=dataclasses.replace(quickstart.optimizer, learning_rate=learning_rate(width)),
        train=dataclasses.replace(quickstart.train, steps=steps, checkpoint_every=steps),
    )


def adapted(width: int) -> Experiment:
    """At two thirds of the base's learning rate, as in the quickstart."""
    quickstart, steps = load_experiment("quickstart"), ADAPTATION_STEPS
    return dataclasses.replace(
        quickstart,
        name="scaling",
        optimizer=dataclasses.replace(quickstart.optimizer, learning_rate=learning_rate(width) * 2 / 3),
        train=dataclasses.replace(quickstart.train, steps=steps, checkpoint_every=steps),
        evaluation=dataclasses.replace(
            quickstart.evaluation,
            tasks=("word_problems",),
            entropy_thresholds=(0.4,),
            verified_windows=(),
            text_drafts=False,
            masked_loss_rows=64,
            batch_size=20,
        ),
    )


base_96, base_160, base_256, base_384 = (functools.partial(base, width) for width in BASE_STEPS)
adapted_96, adapted_160, adapted_256, adapted_384 = (functools.partial(adapted, width) for width in BASE_STEPS)
