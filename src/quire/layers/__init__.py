"""The layers models are made of, and the one loop over them.

Single-device code. A layer gets what it needs at construction (`Build`) and per step (`StepContext`); nothing is
global and no layer is found by name. Knows kernels and weight formats, not models, checkpoints or requests.
Shape suffixes: T tokens of the step, D head_dim, H heads, V vocabulary.
"""
