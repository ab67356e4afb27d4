"""One file per checkpoint format: which tensors it stores, how they become the kernel's layout, how that is run.

Three separate pure steps, load, pack and run; none of them takes a layer. Knows kernels, not models.
"""
