"""Arguments of a model, read from the files of its checkpoint: sizes, layers, experts, rotary positions, pooling.

Knows the spellings of Hugging Face. Knows nothing of options, devices or plans.
"""
