"""Weight formats: the tensors that a checkpoint stores for a parameter, and their packing for a kernel.

A format has two halves. The half here is torch-free: stored tensors, bytes, and `objection`, the reason why a slice
cannot be read. The half in `pack/` turns loaded tensors into a kernel's layout. Neither takes a layer.
Knows kernels, not models.
"""
