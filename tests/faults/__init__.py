"""Faults at random moments, many times over: `python -m tests.faults` writes what came of them."""
