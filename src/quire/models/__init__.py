"""Names of the tensors of model families, a file for each Hugging Face model_type.

A family's file maps checkpoint tensors to the parameters of its layers. It knows nothing of batches, caches, files
or devices.
"""
