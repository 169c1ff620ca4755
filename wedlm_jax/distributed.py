"""Several processes as one run: how they find each other, what they agree on, and how they end when one of them dies.

`initialize` reads the environment. Cloud TPU pods, GKE and Slurm are found by jax itself; anywhere else three variables
say it, for each process its own:

    WEDLM_COORDINATOR=HOST:PORT    of process 0
    WEDLM_NUM_PROCESSES=2
    WEDLM_PROCESS_ID=0             0 .. WEDLM_NUM_PROCESSES - 1

A single process needs none of this, and every function here is then free.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wedlm_jax.errors import UserError

_VARIABLES = ("WEDLM_COORDINATOR", "WEDLM_NUM_PROCESSES", "WEDLM_PROCESS_ID")


def initialize() -> None:
    """Joins the other processes of the run, if there are any; to be called before anything touches a device.

    Raises:
      UserError: the environment is not complete, or the others are not found.
    """
    arguments = arguments_from(os.environ)
    if arguments is None:
        return
    try:
        jax.distributed.initialize(**arguments)
    except Exception as error:  # of jax, of grpc, of the cluster's metadata
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the processes of this run did not find each other ({reason})") from error


def arguments_from(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be called with; None for a single process, {} where jax finds out itself.

    Raises:
      UserError: the three variables are not complete, or no numbers.
    """
    given = [name for name in _VARIABLES if environment.get(name)]
    if given:
        if missing := [name for name in _VARIABLES if name not in given]:
            raise UserError(f"{', '.join(given)} is set, {', '.join(missing)} is not; set all three, for each process")
        count, index = (_whole(environment, name) for name in _VARIABLES[1:])
        if not index < count:
            raise UserError(f"WEDLM_PROCESS_ID={index} must be below WEDLM_NUM_PROCESSES={count}")
        if count == 1:
            return None
        return {
            "coordinator_address": environment["WEDLM_COORDINATOR"],
            "num_processes": count,
            "process_id": index,
            "cluster_detection_method": "deactivate",
        }
    slurm = "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS", "1") != "1"
    hosts = "," in environment.get("TPU_WORKER_HOSTNAMES", "") or int(environment.get("MEGASCALE_NUM_SLICES", "1")) > 1
    # Importing jax sets TPU_SKIP_MDS_QUERY on machines without TPU chips.
    tpu_vm = "TPU_SKIP_MDS_QUERY" not in environment and importlib.util.find_spec("libtpu") is not None
    return {} if slurm or hosts or tpu_vm else None


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


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if _several():
        multihost_utils.sync_global_devices(name)


def _several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _whole(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdigit():
        raise UserError(f"{name}={environment[name]} is no whole number")
    return int(environment[name])
