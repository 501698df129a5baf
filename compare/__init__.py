"""Comparing backends: the race, the benchmark of collectives, and the report of both."""
