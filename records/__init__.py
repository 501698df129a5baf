"""The files that a run writes into its directory, and the options of a run."""
