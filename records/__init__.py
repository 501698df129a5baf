"""What a run leaves in its directory, and what it was asked to do."""
