"""The operations of a model, one folder each: contract (`__init__.py`), reference (`ref.py`), fast implementations.

Knows tensors and devices. Knows nothing of models, layers or requests; `pack/` alone knows how weights are stored.
"""
