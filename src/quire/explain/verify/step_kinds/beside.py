"""Steps of a gated MLP and experts beside each other."""

from collections.abc import Mapping

from quire.explain.verify.recording import on_added, on_result
from quire.explain.verify.step_kinds.dense import DenseSteps
from quire.explain.verify.step_kinds.experts import ExpertSteps
from quire.explain.verify.step_kinds.interfaces import FeedForwardSteps, Keep, Parts
from quire.layers.beside import MLPBesideExperts

AFTER, BEFORE_EXPERTS, AFTER_EXPERTS = (
    f"{place}_feedforward_layernorm_{number}" for place, number in (("post", 1), ("pre", 2), ("post", 2))
)


class BesideSteps(FeedForwardSteps):
    """The steps of both parts and of the norms around them, by the names of Gemma 4. A `FeedForwardSteps`."""

    room = "mlp"
    paths: Mapping[str, tuple[str, ...]] = {
        name: (name,) for name in ("router", "experts", AFTER, BEFORE_EXPERTS, AFTER_EXPERTS)
    }
    inputs: Mapping[str, tuple[str, ...]] = DenseSteps.inputs

    def watch(self, layer: MLPBesideExperts, keep: Keep, parts: Parts) -> None:
        """Record the steps of both parts, and the norms."""
        DenseSteps().watch(layer.mlp, keep, parts)
        ExpertSteps().watch(layer.moe, keep, parts)
        on_result(layer.dense_after, keep, AFTER)
        on_result(layer.experts_norm, keep, BEFORE_EXPERTS)
        on_added(layer.experts_after, keep, AFTER_EXPERTS)
