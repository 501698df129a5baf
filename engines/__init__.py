"""Engines: what starts the nodes of a job, from a resolved run to commands or manifests."""
