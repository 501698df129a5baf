"""Backends race each other: the plan, its runs, and the files that they leave."""
