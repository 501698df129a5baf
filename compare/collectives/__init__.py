"""Times the collectives of each library on its own path."""
