"""What topological reordering is worth: masks moved behind what is observed, or left in their places (standard order).

    python -m wedlm_jax.train --exp reordering

Adapts the quickstart's base as it is, and with `objective.reorder=false`: masks then keep their places in every block, and under
the same causal mask each sees what lies to its left alone. Both models are measured both ways on held-out word problems
(n = 200): the share of masked tokens recovered in blocks of 16 (mean over mask ratios from 0.1 to 0.9), and p_cache and exact
match of decoding. So the first model tells what standard order costs with the same weights, the second what is left of the
cost after training for it. Three training seeds, 300 steps each. A stopped study goes on where it was. Table and plot land in
runs/reordering.

Two CPU cores, about half an hour. Expect (seed 0) no cost: 90.8 % of the masks recovered reordered, 90.9 % in place, 91.3 % by
the model that was trained in place; p_cache 0.09 everywhere. These tasks are written from left to right. On source code standard
order loses a sixth of the recovered masks: python -m wedlm_jax.evaluate --exp stdlib_code. Values: benchmarks/RESULTS.md.

In decoding, standard order commits the same leading run of filled tokens: nothing before it is masked, so its keys and values
are final. A token that was filled right of an open mask has seen that mask, and is computed again once it is filled, in either
order; what reordering changes is that open masks see such tokens.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, Measure, Stage, Study, load_experiment

BASE = Stage("quickstart_base")


def reordering() -> Study:
    on_words = dict(task="word_problems")
    streaming, blockwise = "streaming, tau=0.4", "block-wise, J=16"
    arms = {
        "trained reordered": (BASE, Stage("reordering:adapted")),
        "trained in standard order": (BASE, Stage("reordering:adapted", ("objective.reorder=false",))),
    }
    return Study(
        name="reordering",
        arms=arms,
        measures=(
            Measure("masks recovered, reordered", "masked_accuracy"),
            Measure("masks recovered, in place", "masked_accuracy_in_place"),
            Measure("streaming p_cache, reordered", "p_cache", **on_words, decoder=streaming),
            Measure("streaming p_cache, in place", "p_cache", **on_words, decoder="in place, tau=0.4"),
            Measure("streaming accuracy, reordered", "accuracy", **on_words, decoder=streaming),
            Measure("streaming accuracy, in place", "accuracy", **on_words, decoder="in place, tau=0.4"),
            Measure("block-wise p_cache, reordered", "p_cache", **on_words, decoder=blockwise),
            Measure("block-wise p_cache, in place", "p_cache", **on_words, decoder="in place, J=16"),
            Measure("block-wise accuracy, reordered", "accuracy", **on_words, decoder=blockwise),
            Measure("block-wise accuracy, in place", "accuracy", **on_words, decoder="in place, J=16"),
            Measure("AR accuracy", "accuracy", **on_words, decoder="AR, adapted"),
        ),
    )


def adapted() -> Experiment:
    """One adaptation of the study, measured in both orders."""
    ablation = load_experiment("ablations:adapted")
    return dataclasses.replace(
        ablation, name="reordering", evaluation=dataclasses.replace(ablation.evaluation, in_place=True)
    )
