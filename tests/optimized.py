"""A fixture for tests of what is compiled: elsewhere the ordinary run leaves most optimisations out (tests/conftest.py)."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def optimized():
    # jax keeps compiled programs without regard to this option: a module would be given what another has compiled.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
