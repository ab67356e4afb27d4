"""DeepSeek-V3 and R1: as V2, routed by sigmoid scores with a bias that balances the experts."""

from quire.models.names import EXPERTS, LATENT, PREDICTION, ROUTER_CORRECTION, SHARED_EXPERTS, NameMap

NAME_MAP: NameMap = (*LATENT, *EXPERTS, *ROUTER_CORRECTION, *SHARED_EXPERTS, *PREDICTION)
