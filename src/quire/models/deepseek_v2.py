"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, shared experts, the first layers dense."""

from quire.models.names import EXPERTS, LATENT, SHARED_EXPERTS, NameMap

NAME_MAP: NameMap = (*LATENT, *EXPERTS, *SHARED_EXPERTS)
