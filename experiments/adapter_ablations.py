"""What an adapter of mask rows learns best from, how blocks are masked for it, and how large it must be.

    python -m wedlm_jax.train --exp adapter_ablations

Trains adapters beside the quickstart's base, 300 steps for each setting (one training seed), and decodes held-out word problems
and counting (n = 200 each) by verified decoding: tokens per forward, and the share of forwards that accepted
the draft 1, 2, ... slots ahead. The decoded text is the base's in every arm, so nothing else can differ. One choice differs from
`quickstart_adapter` in each arm, two where the base wrote the training text and its distribution is the target. A stopped study
goes on where it was. Table and plot land in runs/adapter_ablations.
"""

import dataclasses

from wedlm_jax.experiment import Curve, Experiment, Measure, Stage, Study, load_experiment

STEPS = 300
BASE = Stage("quickstart_base")
RANKS = (4, 8, 16, 32, 64)
SELF_GENERATED = 4000  # training prompts that the base answers itself: as many documents as 300 steps read


def adapter_ablations() -> Study:
    default = load_experiment("quickstart_adapter")
    assert default.adapter is not None
    targets = {"data": "targets: the data", "distill": "targets: what the base says there"}
    own_text = f"data.self_generated.num_prompts={SELF_GENERATED}"
    here = default.objective.targets
    changes: dict[str, tuple[str, ...]] = {
        f"quickstart_adapter ({targets[here]}, rank {default.adapter.rank})": (),
        **{label: (f"objective.targets={name}",) for name, label in targets.items() if name != here},
        "targets: self-generated text": (own_text, "objective.targets=data"),
        "self-generated text, and what the base says there": (own_text, "objective.targets=distill"),
        "uniform mask ratios alone": ("objective.fully_masked=0", "objective.suffix_masked=0"),
        "no suffix-masked blocks": ("objective.suffix_masked=0",),
        "no fully masked blocks": ("objective.fully_masked=0",),
        "every block fully masked": ("objective.suffix_masked=0", "objective.fully_masked=1"),
    }
    for rank in RANKS:  # with alpha, so that the scale of the pairs is the same
        alpha = default.adapter.scale * rank
        changes[f"rank {rank}"] = (f"model.adapter.rank={rank}", f"model.adapter.alpha={alpha:g}")
    words, counting = (dict(task=task, decoder="verified") for task in ("word_problems", "counting"))
    return Study(
        name="adapter_ablations",
        arms={label: (BASE, Stage("adapter_ablations:adapter", overrides)) for label, overrides in changes.items()},
        measures=(
            Measure("word problems, tokens per forward", "tokens_per_forward", **words),
            Measure("counting, tokens per forward", "tokens_per_forward", **counting),
        ),
        seeds=(0,),
        curves=(Curve("word problems: share of forwards that accept", "accepted", **words, x_label="slots ahead"),),
    )


def adapter() -> Experiment:
    """One adapter of the study."""
    default = load_experiment("quickstart_adapter")
    return dataclasses.replace(
        default,
        name="adapter_ablations",
        train=dataclasses.replace(default.train, steps=STEPS, checkpoint_every=STEPS),
        # Every row of a batch has the counters that it has alone, and nothing is timed.
        evaluation=dataclasses.replace(
            default.evaluation,
            tasks=("word_problems", "counting"),
            entropy_thresholds=(),
            verified_windows=(),
            text_drafts=False,
            batch_size=50,
        ),
    )
