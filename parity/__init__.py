"""Whether a training computes what one process computes: the verdict, how it is reached, and the command that asks."""
