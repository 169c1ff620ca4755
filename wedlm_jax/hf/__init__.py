"""Interchange with Hugging Face directories: config.json, safetensors, tokenizer files, hub ids."""
