"""The user's choices: a small frozen dataclass per component, composed in `engine.py`. `plan` decides.

Knows flags, defaults and the environment; knows nothing of torch.
"""
