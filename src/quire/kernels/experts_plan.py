"""Plan of the layers with experts: the dispatcher brings tokens to experts, the kernel computes them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.contracts.parallel import MOST_RANKS, Parallel
from quire.contracts.scheme import Scheme, WirePlan


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """Properties of a dispatcher. It moves tokens to the ranks of their experts, and the results back.

    Kernels get a row per token, with the global ids of its k experts. They multiply by the routing weights, and sum
    over k.

    sums        groups of ranks ("dp", "tp") over which the dispatcher sums partial results
    devices     devices whose ranks can use it
    ranks       most ranks that can use it together
    one_host    True: the ranks share memory, so all are on one host
    even        True: in a CUDA graph each replica brings as many rows as the fullest one
    """

    sums: frozenset[str] = frozenset()
    devices: tuple[str, ...] = ("cpu", "cuda")
    ranks: int = MOST_RANKS
    one_host: bool = False
    even: bool = False


DISPATCHERS: Mapping[str, Dispatcher] = {
    "none": Dispatcher(),
    # Ranks read the rows that their experts need from each other's memory, and so the results: GPUs of one host.
    "pull": Dispatcher(sums=frozenset({"dp", "tp"}), devices=("cuda",), ranks=8, one_host=True),
    "all-gather": Dispatcher(sums=frozenset({"dp", "tp"}), even=True),
}

# Experts kernel -> CUDA graphs can hold it.
KERNELS: Mapping[str, bool] = {
    "hopper": True,
    "triton": True,
    "scaled": True,
    "weight_only_hopper": True,
    "weight_only": True,
    "grouped": True,
    "invariant": True,
    "native": False,
    "panels": False,
    "invariant_cpu": False,
    "cpu": False,
    "ref": True,
}


@dataclass(frozen=True, kw_only=True)
class MoEPlan:
    """Plan of a model's expert layers for prefill or decode.

    phase         "prefill" or "decode"
    dispatcher    brings tokens to the ranks of their experts and results back
    experts       name of the experts kernel
    weights       kind of quantized weights that the kernel is for (`kind_of`); (): unquantized
    features      optional features of that kernel
    quantize_at   stage that quantizes activations: "nowhere", "wire" (before they are sent), "experts" (the kernel)
    partial_over  groups of ranks over which the caller must sum the result; empty: the result is complete
    shared        shared experts: "none", "added" (to the routed experts before any sum), "summed alone" (over tp)
    candidates    (dispatcher, experts, reason against the two) in order of preference. The first with reason "" is
                  chosen. With experts "", the reason excludes the dispatcher with every kernel
    decided       reason for the choice, and the line of the code that made it
    wire          form of rows on the way to experts: see `quire.plan.expert_rows`
    others        plans of the layers whose experts have weights of other kinds; they have the same dispatcher
    """

    phase: str
    dispatcher: str
    experts: str
    weights: tuple[str, ...]
    features: tuple[str, ...]
    quantize_at: str
    partial_over: tuple[str, ...]
    shared: str
    capturable: bool
    topology: Parallel
    candidates: tuple[tuple[str, str, str], ...]
    decided: str
    wire: WirePlan = WirePlan()
    others: tuple["MoEPlan", ...] = ()

    @property
    def kernels(self) -> str:
        """Names of the kernels of all layers, such as "hopper and scaled"."""
        return " and ".join(dict.fromkeys(one.experts for one in (self, *self.others)))

    def of(self, scheme: Scheme | None) -> "MoEPlan":
        """Return the plan of the layers whose experts' weights have this scheme.

        A down projection of integers may have other bits than gate and up, for which the kernel was chosen.
        """
        every, kind = (self, *self.others), kind_of(scheme)
        found = [one for one in every if one.weights == kind]
        found = found or [one for one in every if _of_any_width(one.weights) == _of_any_width(kind)]
        assert found, f"no kernel was chosen for experts of {scheme}"
        return found[0]

    def __str__(self) -> str:
        result = "partial, to be summed over " + " and ".join(self.partial_over) if self.partial_over else "whole"
        return (
            f"{self.phase}: dispatcher {self.dispatcher}, experts {self.experts}; quantized {self.quantize_at}, result "
            f"{result}, shared experts {self.shared}, {'capturable' if self.capturable else 'not capturable'}; "
            f"{self.decided}"
            + candidate_table(self.candidates)
            + "".join(f"\nof {kind_words(one.weights)} {one}" for one in self.others)
        )


def kind_of(scheme: Scheme | None) -> tuple[str, ...]:
    """Return the kind of weights for which a kernel of experts is chosen; (): unquantized.

    Groups that are no multiple of 32 are a kind of their own, because not every kernel of integers runs these.
    """
    if scheme is None:
        return ()
    odd = scheme.values in ("w4", "w8") and scheme.block[1] % 32
    return (*sorted(scheme.needs), *[f"in groups of {scheme.block[1]}"] * bool(odd))


def _of_any_width(kind: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("integers" if word in ("w4", "w8") else word for word in kind)


def kind_words(weights: Sequence[str]) -> str:
    """Return the words for a kind of weights, such as "fp8 block weights"."""
    return f"{' '.join(weights) or 'unquantized'} weights"


def candidate_table(candidates: tuple[tuple[str, str, str], ...]) -> str:
    """Return a line for each candidate of `MoEPlan.candidates`: dispatcher, kernel and the reason against them."""
    return "".join(f"\n  {name} + {kernel or 'any'}: {reason or 'fits'}" for name, kernel, reason in candidates)
