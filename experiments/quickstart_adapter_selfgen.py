"""quickstart_adapter, trained on what the base itself answers to the training prompts.

python -m wedlm_jax.train --exp quickstart_base
python -m wedlm_jax.train --exp quickstart_adapter_selfgen
python -m wedlm_jax.evaluate --exp quickstart_adapter_selfgen
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
