"""Starts what the user asks for: the command line, its options, engines, supervision of ranks, and the display."""
