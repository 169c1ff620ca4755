"""Slow references, written from the papers in numpy and plain lists; they share no code with the package."""
