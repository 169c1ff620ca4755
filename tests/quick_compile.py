"""A fixture for tests that compile many programs and run each a few times: most of their time would go into optimising."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compile():
    # jax keeps compiled programs without regard to this option, and what is optimised rounds otherwise: a module that shared
    # programs with another would compare numbers of both kinds.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
