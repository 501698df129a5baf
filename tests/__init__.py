"""The project's tests; they start real processes."""
