"""The HTTP server: requests in, JSON or event streams out. Knows the engine only by `engine.py`; never imports torch.
"""
