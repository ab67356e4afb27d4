"""Model folders, the safetensors files in them, loaders, dummy weights: from a model's name to its parameters.

Knows files and name maps. Knows nothing of layers beyond parameters and the rows their parts take.
"""
