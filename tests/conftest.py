"""What every test runs under: the CPU, eight devices of it, and the count of random cases."""

import os

# Read by jax when it is first imported; tests of sharding need more devices than one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from hypothesis import HealthCheck, settings

FULL = os.environ.get("WEDLM_FULL") == "1"  # launch/test.sh --full


def examples(ordinary: int, full: int) -> int:
    """The count of a costly check, here and under --full: `@settings(max_examples=examples(150, 2000))`."""
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
