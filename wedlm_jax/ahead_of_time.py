"""`--compile-only v5p:4x4x4` or `h100:8`: the real training step, compiled for a TPU slice or for GPUs that are not there.

What comes out is what the compiler says of memory, and a lower bound of the time from the chip's data sheet; neither is a
measurement.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wedlm_jax.absent_devices import canonical, chip_of, devices
from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.errors import UserError, out_of_memory
from wedlm_jax.experiment import Experiment
from wedlm_jax.hf.weights import fastest_dtype
from wedlm_jax.model.config import DType, ModelConfig, ModelOverrides
from wedlm_jax.pretrained import config_of
from wedlm_jax.program_costs import (
    COLLECTIVES,
    GATHERING,
    collectives,
    matmul_flops,
    sent_between_slices,
    traffic_by_kind,
)
from wedlm_jax.sharding import batch_sharding, make_mesh
from wedlm_jax.train_state import abstract_state
from wedlm_jax.train_step import ar_step, compile_step, wedlm_step
from wedlm_jax.workdir import refuse_long_rows


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One compiled step. Bytes and FLOPs are those of one chip."""

    topology: str
    chips: int
    mesh: str
    tokens: int  # of a global batch, padding included
    arguments: int  # bytes: parameters, optimizer, batch
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int
    code: int
    flops: float  # of matrix products, recomputation included, as if divided evenly
    traffic: dict[str, float]  # bytes sent, by kind of collective
    compile_seconds: float
    between_slices: int = 0  # bytes handed to the host for other slices

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def seconds(self) -> dict[str, float]:
        """The least time by each resource of a step that runs all blocks and reads all rows with a loss; all three may run at
        once, so it takes at least the largest."""
        chip = chip_of(self.topology)
        # Each argument is read and each output written; what is gathered is written once and read once.
        # A gather that is compiled as a sum sends twice what it gathers.
        gathered = self.traffic.get("all-gather", 0.0) + self.traffic.get(GATHERING, 0.0) / 2
        moved = self.arguments + self.outputs + 2 * gathered
        return {
            "FLOPs": self.flops / chip.flops,
            "HBM": moved / chip.hbm_bandwidth,
            chip.links: sum(self.traffic.values()) / chip.link_bandwidth,
        }

    def lines(self) -> Iterator[str]:
        """The report for people, a line at a time."""
        chip = chip_of(self.topology)
        chips = f"{self.chips} chip{'s' * (self.chips > 1)}"
        yield f"{self.topology}: {chips} as {self.mesh}; compiled ahead of time in {self.compile_seconds:.0f} s"
        yield f"global batch         {self.tokens:,} tokens"
        for name in ("arguments", "outputs", "aliased", "temporaries", "code"):
            yield f"{name:<20} {_gigabytes(getattr(self, name))} a chip"
        of_all = f"{chip.hbm / 1e9:.0f} GB"
        room = of_all if chip.gpu is None else f"the {chip.memory_of_a_run / 1e9:.0f} GB that a run gets of {of_all}"
        yield f"{'peak':<20} {_gigabytes(self.peak)} a chip, of {room}"
        yield f"{'FLOPs':<20} {self.flops:.3e} a chip (matrix products, recomputation included)"
        for kind in COLLECTIVES:
            if kind in self.traffic:
                yield f"{kind:<20} {_gigabytes(self.traffic[kind])} sent a chip"
        if self.between_slices:
            yield f"{'between slices':<20} {_gigabytes(self.between_slices)} handed to its host by a chip; not in the least time"
        bound = max(self.seconds, key=lambda name: self.seconds[name])
        yield "least time           " + ", ".join(f"{name} {value:.3f} s" for name, value in self.seconds.items())
        yield f"a step takes at least {self.seconds[bound]:.3f} s ({bound}): a lower bound, not a measurement"


def compile_only(experiment: Experiment, topology: str) -> StepReport:
    """Compiles the experiment's step for a TPU slice or GPUs; neither weights nor data need be there.

    Args:
      experiment: where it has no model of its own, the shape of the one that it starts from is read.
      topology: KIND:AxB or KIND:AxBxC, such as v5e:4x4 or v5p:2x2x2, of several such slices KIND:AxB:SLICES; of GPUs KIND:N or
        KIND:MACHINESxN, such as h100:8. KIND is one of CHIPS or ALIASES.

    Raises:
      UserError: the compiler is missing, the topology is unknown, the mesh or the batch does not fit it, or the step does not
        fit the memory of its chips.
    """
    topology = canonical(topology)
    model_of(experiment, "bfloat16")  # what is wrong with it, before the compiler is asked for
    mesh = make_mesh(experiment.mesh, devices(topology))
    start = time.monotonic()
    traced = trace_step(experiment, mesh)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        used = re.search(r"Used ([\d.]+\w+) of ([\d.]+\w+) hbm", str(error))
        raise _too_large(
            experiment, topology, f"{used[1]} of the {used[2]}" if used else str(error).partition("\n")[0]
        ) from None
    memory, text = compiled.memory_analysis(), compiled.as_text()
    report = StepReport(
        topology=topology,
        chips=mesh.size,
        mesh=" x ".join(f"{name}={size}" for name, size in mesh.shape.items()),
        tokens=experiment.train.batch_size * experiment.data.row_length,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=matmul_flops(traced.jaxpr.jaxpr) / mesh.size,
        traffic=traffic_by_kind(collectives(text)),
        compile_seconds=time.monotonic() - start,
        between_slices=sent_between_slices(text),
    )
    room = chip_of(topology).memory_of_a_run
    if report.peak > room:  # the compiler for TPUs says so itself, that for GPUs does not
        of_a_run = " that a run gets" if chip_of(topology).gpu else ""
        raise _too_large(experiment, topology, f"{report.peak / 1e9:.1f} GB of the {room / 1e9:.1f} GB{of_a_run}")
    return report


def _too_large(experiment: Experiment, topology: str, needed: str) -> UserError:
    more = "more GPUs" if chip_of(topology).gpu else "a larger slice"
    return UserError(
        f"{experiment.name} does not fit {topology}: it needs {needed} of a chip; "
        f"set model.remat=full or model.mlp_tile=2048, raise train.micro_batches or mesh.fsdp, or take {more}"
    )


def trace_step(experiment: Experiment, mesh: Mesh) -> Any:
    """The training step on `mesh`, traced (`jax.stages.Traced`); neither weights nor data need be there.

    Raises:
      UserError: the experiment has no model, its rows are past the model's context, or its batch cannot be split over the mesh.
    """
    experiment.check_batch(mesh)
    model = model_of(experiment, fastest_dtype(mesh.devices.flat[0]))
    refuse_long_rows(experiment, model)
    settings = experiment.step_settings(model, experiment.objective.mask_token_id or 0)
    shape, sharding = (experiment.train.batch_size, experiment.data.row_length), batch_sharding(mesh)
    batch = PackedBatch(
        **{
            field.name: jax.ShapeDtypeStruct(shape, bool if field.name == "loss_mask" else jnp.int32, sharding=sharding)
            for field in dataclasses.fields(PackedBatch)
        }
    )
    state = abstract_state(settings.model, settings.optimizer, mesh)
    # Of a training with steps of both kinds the one with masks: it needs more.
    step = ar_step if experiment.objective.ar_steps >= experiment.train.steps else wedlm_step
    return compile_step(step, settings, mesh).trace(state, batch)  # type: ignore[attr-defined]


def model_of(experiment: Experiment, dtype: DType) -> ModelConfig:
    """Its own model, or the shape of the one that it starts from, computed in `dtype` where it names none."""
    experiment.require_model()
    if isinstance(experiment.model, ModelConfig):
        return experiment.model
    return (experiment.model or ModelOverrides()).over(config_of(str(experiment.init_from)), dtype)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:10.3f} GB"
