"""What every rank runs: the loop, and what it needs to save, to stop, to agree and to end."""
