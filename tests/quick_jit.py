"""jit for functions that a test runs a few times: most of its time would go into optimising what is compiled."""

import functools

import jax

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
