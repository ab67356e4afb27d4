"""The model runner: executes step plans on the device and returns step results.

Knows slots, tensors, the model and the sampler. Knows nothing of requests, queues, prefix keys or text.
"""
