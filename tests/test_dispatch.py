"""The device never waits for the host: the numbers of a step are fetched when the next one is on its way."""

import dataclasses

import jax
import jax.numpy as jnp

from tests.tiny_training import EXPERIMENT, one_device_mesh
from wedlm_jax import train as train_module
from wedlm_jax.experiment import override
from wedlm_jax.metrics.report import Report


def test_a_step_is_dispatched_before_the_numbers_of_the_one_before_are_fetched(tmp_path, monkeypatch):
    """But for a step that is saved: its line comes first."""
    order: list[str] = []
    told = Report.step

    def compile_step(step, settings, mesh):
        def dispatch(state, batch):
            order.append(f"dispatch {int(state.step) + 1}")
            numbers = {"loss": 1.0, "tokens": 1, "useful_flops": 1.0, "skipped_in_row": 0}
            return dataclasses.replace(state, step=state.step + 1), jax.tree.map(jnp.asarray, numbers)

        return dispatch

    def report(self, step, *numbers):
        order.append(f"fetch {step}")
        return told(self, step, *numbers)

    monkeypatch.setattr(train_module, "compile_step", compile_step)
    monkeypatch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
    monkeypatch.setattr(Report, "step", report)
    train_module.train(override(EXPERIMENT, "train.steps=5", "train.checkpoint_every=3"), tmp_path)
    assert order == [
        "dispatch 1", "dispatch 2", "fetch 1", "dispatch 3", "fetch 2", "fetch 3", "dispatch 4", "dispatch 5", "fetch 4",
        "fetch 5",
    ]  # fmt: skip
