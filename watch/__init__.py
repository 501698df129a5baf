"""Watches ranks: which of them is slow, hangs, or has failed, and why."""
