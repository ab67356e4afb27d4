"""The muscle: runs a plan on the device and says what came of it.

Knows slots, tensors, the model and the sampler; knows nothing of requests, queues, prefix keys or text.
"""
