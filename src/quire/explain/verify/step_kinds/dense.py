"""Steps of a gated MLP."""

from collections.abc import Mapping

from quire.explain.verify.recording import on_sum
from quire.explain.verify.step_kinds.interfaces import FeedForwardSteps, Keep, Parts
from quire.layers.mlp import GatedMLP

DOWN = ("mlp.down_proj", "shared_mlp.output_linear", "feed_forward.down_proj", "feed_forward.w2", "mixer.down_proj")


class DenseSteps(FeedForwardSteps):
    """The steps of a gated MLP. A `FeedForwardSteps`."""

    room = "mlp"
    paths: Mapping[str, tuple[str, ...]] = {"down_proj": DOWN}
    inputs: Mapping[str, tuple[str, ...]] = {"gate_proj, up_proj": DOWN}

    def watch(self, layer: GatedMLP, keep: Keep, parts: Parts) -> None:
        """Record the gated product and the projection back."""
        on_sum(layer.down, keep, "gate_proj, up_proj", "down_proj")
