"""Model families, a file for each Hugging Face model_type, and the plan of an engine that runs them.

A family's file maps checkpoint tensors to the parameters of its layers. It knows nothing of batches, caches, files
or devices.
"""
