"""Several processes as one run: how they find each other, what they agree on, and how they end when one of them fails.

`together` reads the environment. Cloud TPU pods, GKE and Slurm are found as jax finds them; anywhere else three variables
say it, to each process its own:

    WEDLM_COORDINATOR=HOST:PORT    of process 0; PORT - 1 must be free there too (lifeline.py)
    WEDLM_NUM_PROCESSES=2
    WEDLM_PROCESS_ID=0             0 .. WEDLM_NUM_PROCESSES - 1

WEDLM_START_TIMEOUT=300 is how many seconds the processes wait for each other. A single process needs none of this, and
every function here is then free.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from wedlm_jax.errors import UserError, reason
from wedlm_jax.lifeline import BAD_INPUT, TRY_AGAIN, NotMet, meet, require_free

_VARIABLES = ("WEDLM_COORDINATOR", "WEDLM_NUM_PROCESSES", "WEDLM_PROCESS_ID")


class Place(NamedTuple):
    """Where this process stands among all."""

    coordinator: str  # host:port
    num_processes: int
    process_id: int
    local_device_ids: Any = None  # None: all devices of the machine


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Joins the other processes of the run, if there are any; enter it before anything touches a device.

    If this process fails inside, or hears Ctrl-C, it says why and ends at once, and with it all the others: none waits for it.
    Of bad input all end with the same status, and where the others do not come in time, it is that of a run that may be started
    again.

    Raises:
      UserError: the environment is not complete, or the others are not of this run.
      SystemExit: the others did not come.
    """
    place = find_place(os.environ)
    if place is None:
        yield
        return
    host, _, port = place.coordinator.rpartition(":")
    try:
        lifeline = meet(
            host.strip("[]"), int(port) - 1, place.process_id, place.num_processes, _start_timeout(os.environ)
        )
    except NotMet as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(TRY_AGAIN)
    # Its preemption service would swallow every SIGTERM that comes before the loop takes them, as in restoring or compiling.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        if place.process_id == 0:
            require_free(int(port))
        jax.distributed.initialize(*place, cluster_detection_method="deactivate")
        yield
    except BaseException as error:
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr, flush=True)
            lifeline.refuse()
            lifeline.end(BAD_INPUT)
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr, flush=True)
            lifeline.fail()
            lifeline.end(130)
        # If it is a lost connection that broke a collective, the lifeline knows a little later, says so and ends this process,
        # process 0 within 1.5 s of the others.
        time.sleep(2)
        traceback.print_exc()
        lifeline.fail()
        lifeline.end(1)
    lifeline.finish()


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place of this process; None where it is the only one.

    Raises:
      UserError: the three variables are not complete, or not of their form; the cluster does not answer.
    """
    given = [name for name in _VARIABLES if environment.get(name)]
    if given:
        if missing := [name for name in _VARIABLES if name not in given]:
            raise UserError(f"{', '.join(given)} is set, {', '.join(missing)} is not; set all three, for each process")
        coordinator, count, index = environment[_VARIABLES[0]], *(_whole(environment, n) for n in _VARIABLES[1:])
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 1 < int(port) < 2**16:  # the lifeline's is the one below
            raise UserError(f"WEDLM_COORDINATOR={coordinator} is not HOST:PORT, with a port from 2 to 65535")
        if not index < count:
            raise UserError(f"WEDLM_PROCESS_ID={index} must be below WEDLM_NUM_PROCESSES={count}")
        return Place(coordinator, count, index) if count > 1 else None
    slurm = "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS", "1") != "1"
    hosts = "," in environment.get("TPU_WORKER_HOSTNAMES", "") or environment.get("MEGASCALE_NUM_SLICES", "1") != "1"
    # Importing jax sets TPU_SKIP_MDS_QUERY on machines without TPU chips.
    tpu_vm = "TPU_SKIP_MDS_QUERY" not in environment and importlib.util.find_spec("libtpu") is not None
    if not (slurm or hosts or tpu_vm):
        return None
    from jax._src.clusters import ClusterEnv  # jax tells what it finds only to itself

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(_start_timeout(environment))
        )
    except Exception as error:  # of the metadata server, of name look-up
        raise UserError(f"the cluster does not tell the place of this process ({reason(error)}); {_BY_HAND}") from error
    address, processes, own, devices = found
    if address is None or processes is None or own is None:
        raise UserError(f"jax does not find the place of this process in the cluster; {_BY_HAND}")
    if slurm and "JAX_COORDINATOR_PORT" not in environment:
        # jax's port is one more for the next job, as in an array, which may share the machine; the lifeline's is the one below.
        host, _, port = address.rpartition(":")
        address = f"{host}:{61441 + 2 * (int(port) % 2048)}"
    return Place(address, processes, own, devices) if processes > 1 else None


_BY_HAND = f"set {', '.join(_VARIABLES)} for each process (WEDLM_NUM_PROCESSES=1 for a single one)"


def is_main() -> bool:
    """Whether this is the one process that prints and writes what is not sharded."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def all_gather(x: np.ndarray) -> np.ndarray:
    """The `x` of every process, stacked in process order [P, ...]; all processes must call it."""
    x = np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x)) if _several() else x[None]


def any_process(flag: bool) -> bool:
    """Whether `flag` holds in at least one process; all processes must call it, and wait for their devices there."""
    return bool(all_gather(np.asarray(flag)).any()) if _several() else flag


def of_main(number: int) -> int:
    """The `number` of process 0; all processes must call it, and wait for it there."""
    return int(all_gather(np.asarray(number))[0])


def all_texts(text: str) -> list[str]:
    """The `text` of every process, in process order; all processes must call it."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = all_gather(np.asarray(own.size))
    rows = all_gather(np.pad(own, (0, sizes.max() - own.size)))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _whole(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdigit():
        raise UserError(f"{name}={environment[name]} is no whole number")
    return int(environment[name])


def _start_timeout(environment: Mapping[str, str]) -> float:
    return _whole({"WEDLM_START_TIMEOUT": "300"} | dict(environment), "WEDLM_START_TIMEOUT")
