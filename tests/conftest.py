"""What every test runs under: the CPU, eight devices of it, and the count of random cases."""

# ruff: noqa: E402  jax is imported when its environment is set
import gc
import os
import time
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

FULL = os.environ.get("WEDLM_FULL") == "1"  # launch/test.sh --full
# XLA aborts at a flag that it does not know; jaxlib 0.11 has no older emitters any more.
OLDER_EMITTERS = [] if Version(version("jaxlib")) >= Version("0.11") else ["--xla_cpu_use_fusion_emitters=false"]

# Read by jax when it is first imported, here and in the commands that tests run. Tests of sharding need more devices than one;
# eight of them on two busy cores may wait long for each other, and by default XLA aborts the process after 40 seconds of that.
# Compiling is most of what the tests do: all but --full leave most optimisations out, and use XLA's older emitters where there
# are such, on one thread, which takes two thirds of the time that jax_disable_most_optimizations alone leaves.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        *([] if FULL else [*OLDER_EMITTERS, "--xla_cpu_parallel_codegen_split_count=1"]),
    ]
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "0" if FULL else "1")

import jax
import pytest
from hypothesis import HealthCheck, settings
from matplotlib.figure import Figure


def examples(ordinary: int, full: int) -> int:
    """The count of a costly check, here and under --full: `@settings(max_examples=examples(25, 1200))`."""
    return full if FULL else ordinary


# The ordinary run draws the same cases each time, so that a red build says something about the change; the full run
# draws new ones. A first case compiles, so no deadline.
settings.register_profile(
    "wedlm_jax",
    max_examples=examples(150, 2000),
    derandomize=not FULL,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("wedlm_jax")


def pytest_collection_finish():
    """What was imported stays: Python need not look through it again for what may go."""
    gc.freeze()


MANY_MAPS = 15_000
counted = time.monotonic()


@pytest.fixture(autouse=True)
def few_memory_maps():
    """A compiled program is a dozen memory maps; Linux allows a process 65,530, and XLA aborts where it gets no more. A
    quarter of them is some 3 GiB, and two workers run. A single test of many random cases may add 10,000.
    To count them takes 10 ms, which most tests do not."""
    global counted
    yield
    if time.monotonic() - counted < 2:
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > MANY_MAPS:
        jax.clear_caches()
        gc.collect()
    counted = time.monotonic()


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved, so that a test can read what is written in it."""
    seen, save = [], Figure.savefig

    def savefig(figure, *arguments, **options):
        seen.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model in a directory that commands read from and nothing is written to."""
    from tests.evals.models import tiny_model
    from wedlm_jax.pretrained import save

    folder = tmp_path_factory.mktemp("tiny") / "model"
    save(tiny_model(), folder)
    return folder
