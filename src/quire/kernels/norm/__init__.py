"""Normalization over the last dimension, computed in float32, returned in x's dtype.

rms_norm(x [..., D], weight [D] or [H, D] with x [..., H, D], eps, residual [..., D] or None,
         factor [1] float32 or None) -> [..., D]
    y = (residual + x / sqrt(mean(x^2) + eps) * weight) * factor (Zhang & Sennrich, 2019). The result may overwrite the
    residual.
    A weight of two dimensions gives each head its own, so that q and k are normalized in one call.
layer_norm(x [..., D], weight [D], eps, bias [D] or None) -> [..., D]
    y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba et al., 2016); the bias has the weight's dtype
A weight may be float32 beside any dtype of x.
"""
