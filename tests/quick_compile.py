"""A fixture for tests that compile many programs and run each a few times: most of their time would go into optimising."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compile():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
