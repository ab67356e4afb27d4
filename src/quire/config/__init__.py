"""The user's choices: a small frozen dataclass per component, composed in `engine.py`, resolved in `resolve.py`.

Knows flags, defaults and the environment; knows nothing of torch.
"""
