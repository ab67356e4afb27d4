"""RMS normalization over the last dimension.

rms_norm(x [..., D], weight [D] or [H, D] with x [..., H, D], eps) -> [..., D]
    y = x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in x's dtype (Zhang & Sennrich, 2019).
A weight of two dimensions gives each head its own, so that q and k are normalized in one call.
"""
