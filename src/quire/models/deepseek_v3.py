"""DeepSeek-V3 and R1: as V2, routed by sigmoid scores with a bias that balances the experts."""

from quire.models.names import EXPERTS, LATENT, PREDICTION, ROUTER_BIAS, SHARED_EXPERTS, NameMap

NAME_MAP: NameMap = (*LATENT, *EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS, *PREDICTION)
