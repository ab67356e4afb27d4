"""Observation of HTTP requests: their metrics and records, and their spans in traces."""
