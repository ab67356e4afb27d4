"""What a device can do, as facts.

Knows the hardware of this machine; knows nothing of models, kernels or configuration. No torch, but inside
`cuda.read_cuda_facts`.
"""
