"""Weight formats: the tensors that a checkpoint stores for a parameter, their bytes, and the rules of its config.

A format has two halves. The half here is torch-free; `objection` is the reason why a slice cannot be read. The half in
`kernels/pack/` turns loaded tensors into the form that kernels pack. Neither takes a layer. Knows no models.
"""
