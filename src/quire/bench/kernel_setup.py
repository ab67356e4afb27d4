"""The setup of `quire bench kernels`: layers and KV caches as a model has them."""

from dataclasses import dataclass

from quire.contracts.params import Param
from quire.kernels.attention import KVView
from quire.kernels.cases import KernelSetup
from quire.kvstore.arena import KVArena
from quire.layers.context import Build
from quire.plan.kv_geometry import kv_components, resolve_geometry
from quire.plan.linears import linear_plans


@dataclass(frozen=True, kw_only=True)
class Setup(KernelSetup):
    """A `KernelSetup` that builds layers and KV caches as a model does."""

    def build(self, *params: Param) -> Build:
        """Return the `Build` (what a layer's constructor needs) of a layer with the parameters `params`."""
        linears = linear_plans(self.args, params, self.kernels.choices)
        return Build(self.dtype, self.device, self.kernels, {param.name: param for param in params}, linears)

    def arena(self, num_layers: int, num_blocks: int) -> list[KVView]:
        geometry = resolve_geometry(
            kv_components(self.attention, str(self.dtype).removeprefix("torch.")), num_layers, None, self.block_size
        )
        arena = KVArena(geometry, num_blocks, self.device)
        views = [KVView(*arena.views(layer)) for layer in range(num_layers)]
        for view in views:
            for part in (view.k, view.v):
                part.copy_(self.randn(1, *part.shape[1:]).expand(part.shape))
                part.mul_(self.randn(part.shape[0], 1, 1, 1))
        return views
