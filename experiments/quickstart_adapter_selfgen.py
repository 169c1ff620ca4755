"""quickstart_adapter, trained on what the base itself answers to the training prompts.

    python -m wedlm_jax.train --exp quickstart_base
    python -m wedlm_jax.train --exp quickstart_adapter_selfgen
    python -m wedlm_jax.evaluate --exp quickstart_adapter_selfgen

The base first answers 4,000 training prompts greedily, about 100,000 tokens, a minute or two on two cores; they stay in
runs/quickstart_adapter_selfgen/self_generated. Then as quickstart_adapter. Seed 0, n = 200, tau = 0.7 (`python -m
benchmarks.drafting --model runs/quickstart_adapter_selfgen --rules verified --limit 200 --no-bfloat16`): 3.41 tokens per forward
on word problems, 9.92 on counting, 2.10 on copying, where quickstart_adapter has 3.70, 9.90 and 2.03. `--exp adapter_ablations`
compares it with distillation too.
"""

import dataclasses

from wedlm_jax.experiment import Experiment, SelfGenerated, load_experiment


def quickstart_adapter_selfgen() -> Experiment:
    adapter = load_experiment("quickstart_adapter")
    return dataclasses.replace(
        adapter,
        name="quickstart_adapter_selfgen",
        data=dataclasses.replace(adapter.data, self_generated=SelfGenerated(num_prompts=4000, batch_size=64)),
    )
