"""Runs the trainer in processes of its own that may be killed, each forked from one that has imported everything.

Reads a JSON object a line on stdin and answers with one on stdout when that run has ended:
    {"workdir": ..., "devices": 1, "at": [PHASE, STEP] or null, "after": SECONDS or null} -> {"status": ...}
`status` is the exit status, or minus the number of the signal that ended it. PHASE is one of PHASES.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from orbax.checkpoint._src.path import atomicity

from tests.tiny_training import EXPERIMENT
from wedlm_jax import train as train_module
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.experiment import override
from wedlm_jax.metrics.report import Report

KILLED = override(EXPERIMENT, "train.steps=8", "train.batch_size=8", "train.checkpoint_every=2")


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def in_step(step: int, number: int = signal.SIGKILL) -> None:
    """When `step` is under way on the device and not reported yet."""
    report = Report.step

    def dying(self, reported, *arguments):
        if reported == step:
            die(number)
        return report(self, reported, *arguments)

    Report.step = dying


def in_save(step: int) -> None:
    """When the files of `step` are written and nothing is renamed yet."""
    finalize = atomicity.AtomicRenameTemporaryPath.finalize

    async def dying(self, *arguments, **named):
        if f"/{step}" in str(self.get_final()):
            die()
        return await finalize(self, *arguments, **named)

    atomicity.AtomicRenameTemporaryPath.finalize = dying


def after_save(step: int) -> None:
    save = Checkpoints.save

    def dying(self, state, saved, *arguments):
        save(self, state, saved, *arguments)
        if saved == step:
            self.wait()
            die()

    Checkpoints.save = dying


PHASES = {
    "in step": in_step,
    "in save": in_save,
    "after save": after_save,
    "terminated": lambda step: in_step(step, signal.SIGTERM),
}


def run(order: dict) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)  # stdout carries the answers
        os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={order['devices']}"  # the last counts
        if order["at"] is not None:
            phase, step = order["at"]
            PHASES[phase](step)
        status = 1
        try:
            status = 0 if train_module.train(KILLED, Path(order["workdir"])) else train_module.EXIT_STATUS
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    if order["after"] is not None:
        end = time.monotonic() + order["after"]
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps({"status": run(json.loads(line))}), flush=True)
