"""One file per architecture, named by its Hugging Face model_type, and the registry.

A model file says which layers it is made of and where each checkpoint tensor goes. Knows nothing of batches, caches,
files or devices.
"""
