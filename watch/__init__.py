"""Notices what goes wrong with ranks: who is slow, who hangs, who failed and why."""
