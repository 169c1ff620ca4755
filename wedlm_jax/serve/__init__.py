"""`python -m wedlm_jax.serve`: an engine behind OpenAI's HTTP protocol, for programs that speak it."""
