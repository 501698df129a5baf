"""Reading run records: what they say, side by side."""
