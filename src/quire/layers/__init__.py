"""The layers of which models are made, and `run_layers`, the only loop over them.

Single-device code. A layer gets what it needs at construction (`Build`) and per step (`StepContext`); nothing is
global and no layer is found by name. Knows kernels and weight formats, not models, checkpoints or requests.
Shape suffixes: T tokens of the step, D head_dim, H heads, V vocabulary.
"""
