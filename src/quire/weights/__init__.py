"""From a model's name to its parameters: the folder, the safetensors files in it, the loaders, dummy weights.

Knows files and name maps. Knows nothing of layers beyond parameters and the rows their parts take.
"""
