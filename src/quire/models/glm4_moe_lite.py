"""GLM-4.7-Flash (Z.ai): latent attention as DeepSeek-V3, experts as GLM-4.5; the tensors have the names of both."""

from quire.models.deepseek_v3 import NAME_MAP

__all__ = ["NAME_MAP"]
