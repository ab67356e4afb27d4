"""The HTTP server: requests in, JSON or events out. Knows the engine only by `engine.py`; never imports torch."""
