"""Malformed inputs, many of them made up by hypothesis: `python -m tests.hostile` writes what came of them."""
