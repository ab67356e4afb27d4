"""Weight formats: which tensors a checkpoint stores for a parameter, and how they become the kernel's layout.

A format has two halves. The one here is torch-free: `stored` tensors, bytes, and `objection`, the reason why a slice
cannot be cut or run. `pack/` has the PyTorch half: loaded tensors become what a kernel runs. Neither takes a layer.
Knows kernels, not models.
"""
