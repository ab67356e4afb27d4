"""The form of the experts of a layer: what a kernel computes beside the two products. No torch."""

from dataclasses import dataclass

from quire.kernels.activation import UNGATED, checked


@dataclass(frozen=True)
class ExpertForm:
    """Activation and biases of the experts of a layer. Raises ValueError for an unknown activation.

    act      activation between the two products, a word of `quire.kernels.activation.ACTS`, or of `UNGATED`: the first
             product has I rows then
    biased   True: both products add a bias
    """

    act: str = "silu"
    biased: bool = False

    def __post_init__(self) -> None:
        if self.act not in UNGATED:
            checked(self.act)

    @property
    def features(self) -> frozenset[str]:
        """Features of `quire.kernels.experts` that an implementation needs for such experts."""
        return frozenset([self.act] * (self.act != "silu") + ["bias"] * self.biased)


PLAIN = ExpertForm()
