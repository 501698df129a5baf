"""Starters, the programs that start ranks: one file for each, which composes its command line."""
