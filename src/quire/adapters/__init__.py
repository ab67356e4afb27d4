"""Adapters (LoRA) beside the plan of an engine: the memory of a slot on a rank, and the adapters that fit a model.

Knows parameters and the headers of files. Knows no device, no request and no step. No torch.
"""
