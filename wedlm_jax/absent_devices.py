"""Accelerators that need not be there: their data sheets, and devices of theirs to compile for.

libtpu compiles without a TPU, and jax's CUDA plugin without a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from wedlm_jax.errors import UserError
from wedlm_jax.metrics.throughput import peak_flops

GPU_SHARE = 0.92  # of a GPU's memory that jax takes under launch/gpu.sh and launch/slurm.sh


@dataclasses.dataclass(frozen=True)
class Chip:
    """The data sheet of one chip."""

    name: str  # as jax calls the device
    hbm: float  # bytes
    hbm_bandwidth: float  # bytes/s
    links: str  # how chips are linked
    link_bandwidth: float  # bytes/s that it can send over all its links
    pod: tuple[int, ...] = ()  # of a TPU the chips of its largest slice along each side; libtpu itself knows no end
    gpu: Gpu | None = None  # None: a TPU

    @property
    def memory_of_a_run(self) -> float:
        """Bytes that a program may have: of a GPU a share, since contexts and libraries lie beside what jax takes."""
        return self.hbm if self.gpu is None else GPU_SHARE * self.hbm

    @property
    def flops(self) -> float:
        """bfloat16 FLOP/s."""
        flops = peak_flops(self.name)
        assert flops is not None
        return flops


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA reads of a GPU: the properties that CUDA reports of it."""

    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    l2_cache: int  # bytes
    shared_memory: int  # bytes of a multiprocessor; a block may have all but a KiB
    cores: int = 128  # float32, of a multiprocessor


HOPPER = Gpu((9, 0), multiprocessors=132, clock_ghz=1.98, l2_cache=50 * 2**20, shared_memory=228 * 2**10)
AMPERE = Gpu((8, 0), multiprocessors=108, clock_ghz=1.41, l2_cache=40 * 2**20, shared_memory=164 * 2**10, cores=64)
BLACKWELL = Gpu((10, 0), multiprocessors=148, clock_ghz=1.97, l2_cache=126 * 2**20, shared_memory=228 * 2**10)
L4 = Gpu((8, 9), multiprocessors=58, clock_ghz=2.04, l2_cache=48 * 2**20, shared_memory=100 * 2**10)
L40S = Gpu((8, 9), multiprocessors=142, clock_ghz=2.52, l2_cache=96 * 2**20, shared_memory=100 * 2**10)
RTX4090 = Gpu((8, 9), multiprocessors=128, clock_ghz=2.52, l2_cache=72 * 2**20, shared_memory=100 * 2**10)
TURING = Gpu((7, 5), multiprocessors=40, clock_ghz=1.59, l2_cache=4 * 2**20, shared_memory=64 * 2**10, cores=64)

# cloud.google.com/tpu/docs/v5e, v5p, v6e (the "Gbps" of a sheet / 8), tpu7x, nvidia.com/data-center; read in November 2026.
# NVLink's and PCIe's sheets, and that of TPU7x, count both directions; a chip of TPU7x is two devices.
CHIPS = {
    "v5e": Chip("TPU v5 lite", 16 * 2**30, 819e9, "ICI", 1600e9 / 8, (16, 16)),
    "v5p": Chip("TPU v5", 95 * 2**30, 2765e9, "ICI", 4800e9 / 8, (16, 20, 28)),
    "v6e": Chip("TPU v6 lite", 32 * 2**30, 1640e9, "ICI", 3200e9 / 8, (16, 16)),
    "tpu7x": Chip("TPU7x", 192 * 2**30 / 2, 7380e9 / 2, "ICI", 1200e9 / 2 / 2, (16, 24, 24)),
    "a100": Chip("NVIDIA A100-SXM4-80GB", 80 * 2**30, 2039e9, "NVLink", 600e9 / 2, gpu=AMPERE),
    "a100-40g": Chip("NVIDIA A100-SXM4-40GB", 40 * 2**30, 1555e9, "NVLink", 600e9 / 2, gpu=AMPERE),
    "h100": Chip("NVIDIA H100 80GB HBM3", 80 * 2**30, 3352e9, "NVLink", 900e9 / 2, gpu=HOPPER),
    "h200": Chip("NVIDIA H200", 141e9, 4800e9, "NVLink", 900e9 / 2, gpu=HOPPER),
    "b200": Chip("NVIDIA B200", 180e9, 8000e9, "NVLink", 1800e9 / 2, gpu=BLACKWELL),
    "l4": Chip("NVIDIA L4", 24 * 2**30, 300e9, "PCIe", 64e9 / 2, gpu=L4),
    "l40s": Chip("NVIDIA L40S", 48e9, 864e9, "PCIe", 64e9 / 2, gpu=L40S),
    "rtx4090": Chip("NVIDIA GeForce RTX 4090", 24 * 2**30, 1008e9, "PCIe", 64e9 / 2, gpu=RTX4090),
    "t4": Chip("Tesla T4", 16 * 2**30, 320e9, "PCIe", 32e9 / 2, gpu=TURING),
}
ALIASES = {
    "v5litepod": "v5e",
    "v5 lite": "v5e",
    "v6 lite": "v6e",
    "trillium": "v6e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
}


def chip_of(topology: str) -> Chip:
    return CHIPS[topology.partition(":")[0]]


def canonical(topology: str) -> str:
    """KIND:SHAPE or KIND:SHAPE:SLICES with the alias of KIND resolved.

    Raises:
      UserError: it is not of this form, or of a kind that is not known.
    """
    kind, _, shape = topology.partition(":")
    kind, shape = ALIASES.get(kind, kind), shape.removesuffix(":1")
    gpu = kind in CHIPS and CHIPS[kind].gpu is not None
    form = r"[1-9]\d*(x[1-9]\d*)?" if gpu else r"[1-9]\d*(x[1-9]\d*){1,2}(:[1-9]\d*)?"
    if kind not in CHIPS or not re.fullmatch(form, shape):
        known = ", ".join([*CHIPS, *ALIASES])
        raise UserError(
            f"topology {topology!r} is unknown; write KIND:SHAPE, as v5p:4x4x4 or v5e:16x16, of two such slices "
            f"v5e:16x16:2, or GPUs as h100:8 or, of two machines, h100:2x8, with KIND of {known}"
        )
    sides, pod = sorted(map(int, shape.partition(":")[0].split("x"))), CHIPS[kind].pod
    if pod and (len(sides) != len(pod) or any(side > most for side, most in zip(sides, pod, strict=True))):
        raise UserError(f"topology {topology}: no such slice; {_slices(kind)}")
    return f"{kind}:{shape}"


def _slices(kind: str) -> str:
    pod = CHIPS[kind].pod
    sides, some = ("AxB", "1x1, 2x2 and 2x4") if len(pod) == 2 else ("AxBxC", "2x2x1, 2x2x2 and 2x4x4")
    return f"those of {kind} are {sides} up to {'x'.join(map(str, pod))}, such as {some}"


def devices(topology: str) -> list[jax.Device]:
    """Those of slices, or of machines with GPUs, that need not be there, to compile for.

    Args:
      topology: as `canonical` gives it.

    Raises:
      UserError: there is no compiler for them here, or it knows no such slice.
    """
    chip = chip_of(topology)
    return _tpus(topology) if chip.gpu is None else _gpus(chip, chip.gpu, topology.partition(":")[2])


def _tpus(topology: str) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise UserError(
            "--compile-only needs the TPU compiler, libtpu, which is not installed; pip install 'jax[tpu]' (it needs "
            "no TPU)"
        )
    # No TPU is touched, so several may compile side by side.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    # libtpu takes hosts of 2 x 2 chips unless it is told that there is but one chip.
    kind, shape, *slices = topology.split(":")
    more: dict[str, Any] = {"chips_per_host_bounds": [1, 1, 1]} if set(shape) == {"1", "x"} else {}
    if slices:
        more["num_slices"] = int(slices[0])
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{shape}", **more).devices)
    except Exception as error:  # libtpu raises several types for shapes that no slice has
        reason = str(error).partition("\n")[0]
        raise UserError(f"topology {topology}: libtpu knows no such slice ({reason}); {_slices(kind)}") from None


def _gpus(chip: Chip, gpu: Gpu, shape: str) -> list[jax.Device]:
    if not has_gpu_compiler():
        raise UserError(
            "--compile-only needs jax's CUDA plugin, which is not installed; pip install 'jax[cuda12]', or of the same "
            "versions as jax jax-cuda12-plugin and jax-cuda12-pjrt with --no-deps, and nvidia-cuda-nvcc-cu12 (they need no GPU)"
        )
    machines, _, of_each = shape.rpartition("x")
    major, minor = gpu.capability
    target = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.multiprocessors} fpus_per_core: {gpu.cores} clock_rate_ghz: {gpu.clock_ghz}
          memory_bandwidth: {chip.hbm_bandwidth:.0f} device_memory_size: {chip.hbm:.0f} l2_cache_size: {gpu.l2_cache}
          shared_memory_per_core: {gpu.shared_memory} shared_memory_per_block_optin: {gpu.shared_memory - 1024}
          shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        }}
        platform_name: "CUDA" device_description_str: "{chip.name}"
        dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 8 }}
    """
    named = dict(target_config=target, topology=f"1x{machines or 1}x{of_each}")
    return list(topologies.get_topology_desc(platform="cuda", **named).devices)


def has_gpu_compiler() -> bool:
    """Whether jax's CUDA plugin is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
