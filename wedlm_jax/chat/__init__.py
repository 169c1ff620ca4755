"""`python -m wedlm_jax.chat`: a conversation in the terminal, over one row of an engine."""
