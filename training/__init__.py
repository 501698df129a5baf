"""What every rank runs: the training loop, its observers, and the saving of checkpoints and results."""
