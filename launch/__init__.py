"""Starts what the user asks for: the command line, its options, starters, supervision of ranks, and the display."""
