"""How fast a run is: tokens per second, and the share of the devices' datasheet FLOPs that is useful (MFU)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax

TIME_FIELDS = ("tokens_per_second", "mfu")  # the metrics that differ between two equal runs

# Dense bfloat16 FLOPs per second of one device, from the makers' datasheets, by what jax calls the device. Where a sheet of
# NVIDIA's tells them with sparsity, the half; of GeForce cards from the white papers of their architectures, with sums in
# float32, which these add at half the rate.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,  # of a chip, which is two devices
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA A800": 312e12,
    "NVIDIA H800": 989e12,
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,  # of one of the two GPUs of a board
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX 6000 Ada Generation": 364e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "Tesla T4": 8.1e12,  # float32: it has no products in bfloat16
}


def peak_flops(device_kind: str) -> float | None:
    """The datasheet's dense bfloat16 FLOPs per second; None for a device that is not in the table, such as a CPU."""
    if device_kind in PEAK_FLOPS:
        return PEAK_FLOPS[device_kind]
    # "NVIDIA H100 80GB HBM3": the longest name that it begins with as whole words. TPUs are named exactly, and GeForce cards, of
    # which a "4090 D" or "4090 Laptop GPU" is another chip.
    known = [
        name
        for name in PEAK_FLOPS
        if name.startswith("NVIDIA")
        and "GeForce" not in name
        and f"{device_kind}-".startswith((f"{name} ", f"{name}-"))
    ]
    return PEAK_FLOPS[max(known, key=len)] if known else None


class Throughput:
    """Rates between two logged steps. The first step only starts the clock: it was compiled in its own time."""

    def __init__(self, devices: int = 1, device_kind: str | None = None) -> None:
        kind = jax.devices()[0].device_kind if device_kind is None else device_kind
        peak = peak_flops(kind)
        self._peak = None if peak is None else peak * devices
        self._tokens, self._flops = 0, 0.0
        self._since: float | None = None

    def add(self, tokens: int, flops: float = 0.0) -> None:
        """A step has ended that had so many tokens and useful FLOPs."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._tokens += tokens
            self._flops += flops

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is not training."""
        before = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - before

    def take(self) -> dict[str, float]:
        """The rates since the last call; empty before there are any. `mfu` only where the device's peak is known."""
        now = time.perf_counter()
        if not self._tokens or self._since is None:
            return {}
        seconds = now - self._since
        rates = {"tokens_per_second": round(self._tokens / seconds, 1)}
        if self._peak is not None:
            rates["mfu"] = round(self._flops / seconds / self._peak, 4)
        self._tokens, self._flops, self._since = 0, 0.0, now
        return rates
