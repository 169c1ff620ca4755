"""What the loop costs around the steps of an experiment: time to the first step, steps per second, the host's share.

    python -m benchmarks.train_loop --exp stdlib_code --steps 60

Trains in a folder that is removed afterwards, without checkpoints but the last. The host's share of a step is the time in
which it does not wait for the device: drawing the batch, putting it on the device, dispatching the step, writing metrics.
While it is below 1 the device is never without work. The first steps, which compile, are left out of all but the first
figure.
"""

from __future__ import annotations

import time

START = time.perf_counter()  # before the imports, which are a part of what is waited for

import argparse  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402

from wedlm_jax import train as train_module  # noqa: E402
from wedlm_jax.data.pipeline import PackedBatches  # noqa: E402
from wedlm_jax.errors import entry  # noqa: E402
from wedlm_jax.experiment import load_experiment  # noqa: E402
from wedlm_jax.host_memory import use_huge_pages  # noqa: E402
from wedlm_jax.metrics import report as report_module  # noqa: E402

WARM_UP = 5  # steps


class Clock:
    """The time that is spent in some functions of the loop, from the end of the warm-up on."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.ends: list[float] = []  # of the steps

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **named)
            if len(self.ends) >= WARM_UP:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin
            return result

        return run

    def ends_a_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self.ends.append(time.perf_counter())
            return result

        return run


@entry
def main() -> None:
    use_huge_pages()  # as the trainer does
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--exp", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*")
    flags = parser.parse_args()
    assert flags.steps > 2 * WARM_UP, f"--steps must be above {2 * WARM_UP}"
    fixed = (f"train.steps={flags.steps}", f"train.checkpoint_every={flags.steps}")
    experiment = load_experiment(flags.exp, (*flags.overrides, *fixed))

    clock = Clock()
    PackedBatches.__next__ = clock.timed("batch", PackedBatches.__next__)  # type: ignore[method-assign]
    train_module.place = clock.timed("placing", train_module.place)  # type: ignore[attr-defined]
    report_module.fetch = clock.ends_a_step(clock.timed("waiting", report_module.fetch))  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        train_module.train(experiment, Path(folder))

    seconds = clock.ends[-1] - clock.ends[WARM_UP - 1]
    steps = len(clock.ends) - WARM_UP
    result = {
        "experiment": flags.exp,
        "overrides": flags.overrides,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "machine": platform.machine(),
        "jax": jax.__version__,
        "seconds to the end of the first step": round(clock.ends[0] - START, 2),
        "steps per second": round(steps / seconds, 3),
        "host's share of a step": round(1 - clock.spent["waiting"] / seconds, 4),
        "of it, drawing the batch": round(clock.spent["batch"] / seconds, 4),
        "of it, placing it": round(clock.spent["placing"] / seconds, 4),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
