"""Facts about the devices of this machine.

Knows the hardware; knows nothing of models, kernels or configuration. Only `cuda.read_cuda_facts` imports torch.
"""
