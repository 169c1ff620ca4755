"""Other engines on the same weights and prompts: each a script that another Python runs, with torch and without this package.

`process` starts one and asks it; `official_engine`, `transformers_engine` and `vllm_engine` are the scripts, `answers` is what
they share. Nothing of another project is stored here: each engine is imported from where it is installed or checked out.
"""
