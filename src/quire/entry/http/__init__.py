"""The server: HTTP in, streams of events out. Knows the engine only through `engine.py`; never imports torch."""
