"""Observation of a running engine: metrics, progress bars and process usage. Sinks only."""
