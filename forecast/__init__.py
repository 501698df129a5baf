"""Forecasts: how long a step takes on a number of ranks and a network that are not at hand."""
