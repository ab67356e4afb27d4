"""Choice of a dispatcher (moves tokens to experts and back) and an experts kernel, together, as a printable plan.

Dispatchers and kernels declare as data what they produce and accept. A pair fits when both agree on the layout of rows,
the numbering of experts and the part that weighs results. Topology, machine and phase must allow the pair, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.args.checkpoint import ModelArgs
from quire.config.placement import MOST_RANKS, Parallel
from quire.contracts.decided import line_of
from quire.contracts.errors import ConfigError
from quire.contracts.scheme import Scheme, WirePlan


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """Properties of a dispatcher. It moves tokens to the ranks of their experts, and the results back.

    layout     rows that the experts get: "flat" (a row per token, with the ids of its k experts), "grouped" (a row per
               token and expert, sorted by expert), "masked" (as "grouped", with equally much room for each expert)
    numbering  expert ids of the rows: "global" (with an expert map), "local" (-1: expert of another rank), "none"
    weighs     stage that multiplies by the routing weights and sums over k: "experts" (the kernel), "combine" (later)
    sums       groups of ranks ("dp", "tp") over which the dispatcher sums partial results
    devices    devices whose ranks can use it
    ranks      most ranks that can use it together
    one_host   True: the ranks share memory, so all are on one host
    """

    layout: str
    numbering: str
    weighs: str
    sums: frozenset[str] = frozenset()
    capturable: bool = True
    implemented: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    ranks: int = MOST_RANKS
    one_host: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsKernel:
    """Row layouts, id numberings and weighing stages that an experts kernel accepts; see `Dispatcher`."""

    layouts: tuple[str, ...] = ("flat",)
    numberings: tuple[str, ...] = ("global", "local")
    weighs: tuple[str, ...] = ("experts",)
    capturable: bool = True


# The words of `Dispatcher` and `ExpertsKernel` in messages.
ROWS = {layout: f"{layout} rows" for layout in ("flat", "grouped", "masked")}
IDS = {"global": "global expert ids", "local": "local expert ids", "none": "rows without expert ids"}
WEIGHING = {"experts": "weighing by the experts kernel", "combine": "weighing in the combine step"}
DISPATCHERS: Mapping[str, Dispatcher] = {
    "none": Dispatcher(layout="flat", numbering="global", weighs="experts", implemented=True),
    # Ranks read the rows that their experts need from each other's memory, and so the results: GPUs of one host.
    "pull": Dispatcher(
        layout="flat",
        numbering="global",
        weighs="experts",
        sums=frozenset({"dp", "tp"}),
        devices=("cuda",),
        ranks=8,
        one_host=True,
        implemented=True,
    ),
    "all-gather": Dispatcher(
        layout="flat",
        numbering="global",
        weighs="experts",
        sums=frozenset({"dp", "tp"}),
        capturable=False,
        implemented=True,
    ),
    "all-to-all": Dispatcher(layout="grouped", numbering="none", weighs="combine", sums=frozenset({"dp", "tp"})),
}
NOT_YET = "not implemented yet"
KERNELS: Mapping[str, ExpertsKernel] = {
    "hopper": ExpertsKernel(),
    "triton": ExpertsKernel(),
    "scaled": ExpertsKernel(),
    "weight_only": ExpertsKernel(),
    "grouped": ExpertsKernel(
        layouts=("flat", "grouped"), numberings=("global", "local", "none"), weighs=("experts", "combine")
    ),
    "native": ExpertsKernel(capturable=False),
    "panels": ExpertsKernel(capturable=False),
    "cpu": ExpertsKernel(capturable=False),
    "ref": ExpertsKernel(),
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machine for which the experts kernel is chosen.

    kernels    (name of an experts kernel, reason why it cannot run here or with these weights, or ""), best first
    features   name of an experts kernel -> its optional features, such as "join"
    eager      steps are not captured in CUDA graphs
    hosts      hosts among which the ranks are divided
    """

    device: str
    kernels: tuple[tuple[str, str], ...]
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    eager: bool = False
    hosts: int = 1


@dataclass(frozen=True, kw_only=True)
class MoEPlan:
    """Plan of a model's expert layers for prefill or decode.

    phase         "prefill" or "decode"
    dispatcher    brings tokens to the ranks of their experts and results back
    experts       name of the experts kernel
    weights       kind of quantized weights that the kernel is for (`kind_of`); (): unquantized
    features      optional features of that kernel
    quantize_at   stage that quantizes activations: "nowhere", "wire" (before they are sent), "experts" (the kernel)
    weighs        stage that multiplies by the router's weights and sums a token's top-k results, as in `Dispatcher`
    partial_over  groups of ranks over which the caller must sum the result; empty: the result is complete
    shared        shared experts: "none", "added" (to the routed experts before any sum), "summed alone" (over tp)
    candidates    (dispatcher, experts, reason against the two) in order of preference. The first with reason "" is
                  chosen; if there is none, the first that is only not implemented. With experts "", the reason
                  excludes the dispatcher with every kernel
    decided       reason for the choice, and the line of the code that made it
    wire          form of rows on the way to experts: see `quire.models.wire`
    others        plans of the layers whose experts have weights of other kinds; they have the same dispatcher
    """

    phase: str
    dispatcher: str
    experts: str
    weights: tuple[str, ...]
    features: tuple[str, ...]
    quantize_at: str
    weighs: str
    partial_over: tuple[str, ...]
    shared: str
    capturable: bool
    topology: Parallel
    candidates: tuple[tuple[str, str, str], ...]
    decided: str
    wire: WirePlan = WirePlan()
    others: tuple["MoEPlan", ...] = ()

    @property
    def layout(self) -> str:
        """Rows that the experts get, as in `Dispatcher`."""
        return DISPATCHERS[self.dispatcher].layout

    @property
    def numbering(self) -> str:
        """Expert ids of these rows, as in `Dispatcher`."""
        return DISPATCHERS[self.dispatcher].numbering

    @property
    def kernels(self) -> str:
        """Names of the kernels of all layers, such as "hopper and scaled"."""
        return " and ".join(dict.fromkeys(one.experts for one in (self, *self.others)))

    def of(self, scheme: Scheme | None) -> "MoEPlan":
        """Return the plan of the layers whose experts' weights have this scheme."""
        found = [one for one in (self, *self.others) if one.weights == kind_of(scheme)]
        assert found, f"no kernel was chosen for experts of {scheme}"
        return found[0]

    @property
    def implemented(self) -> bool:
        """False for a dispatcher that can be planned, and not run."""
        return DISPATCHERS[self.dispatcher].implemented

    def __str__(self) -> str:
        result = "partial, to be summed over " + " and ".join(self.partial_over) if self.partial_over else "whole"
        return (
            f"{self.phase}: dispatcher {self.dispatcher} ({self.layout} rows, ids: {self.numbering}), experts "
            f"{self.experts}; weighed by {self.weighs}, quantized {self.quantize_at}, result {result}, shared "
            f"experts {self.shared}, {'capturable' if self.capturable else 'not capturable'}; {self.decided}"
            + _table(self.candidates)
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


def kind_words(weights: Sequence[str]) -> str:
    """Return the words for a kind of weights, such as "fp8 block weights"."""
    return f"{' '.join(weights) or 'unquantized'} weights"


def resolve_moe(
    model: ModelArgs,
    scheme: Scheme | None,
    topology: Parallel,
    hardware: Hardware,
    phase: str,
    overrides: Mapping[str, str] | None = None,
) -> MoEPlan:
    """Return the plan with the first dispatcher and experts kernel that fit together, in order of preference.

    scheme      quantization of the experts' weights; None: unquantized
    phase       "prefill" or "decode"
    overrides   names that the user chose for "dispatcher" and "experts"
    Raises `ConfigError` with the table of candidates when no dispatcher and kernel, or not the requested ones, fit.
    """
    assert model.moe is not None
    asked = dict(overrides or {})
    for what, name in asked.items():
        known = tuple({"dispatcher": DISPATCHERS, "experts": KERNELS}[what])
        if name not in known:
            raise ConfigError(f"{what}={name!r} does not exist (one of {', '.join(known)}).")
    candidates = tuple(_candidates(topology, hardware, phase, asked))
    chosen = _chosen(candidates)
    if chosen is None:
        wanted = "".join(f" {what}={name}" for what, name in asked.items())
        raise ConfigError(f"no way to run the experts in {phase} on {topology}{wanted}:" + _table(candidates))
    dispatcher, kernel = DISPATCHERS[chosen[0]], KERNELS[chosen[1]]
    why = ("asked for" if "dispatcher" in asked else "first that fits") + f", {NOT_YET}" * bool(chosen[2])
    sharing = ("tp",) * (topology.tp > 1) + ("dp",) * _spread(topology)
    partial = tuple(group for group in sharing if group not in dispatcher.sums)
    shared = "added" if topology.tp == 1 or "tp" in partial else "summed alone"
    return MoEPlan(
        phase=phase,
        dispatcher=chosen[0],
        experts=chosen[1],
        weights=kind_of(scheme),
        features=hardware.features.get(chosen[1], ()),
        weighs=dispatcher.weighs,
        quantize_at="experts" if scheme and scheme.inputs else "nowhere",
        partial_over=partial,
        shared=shared if model.moe.shared_size else "none",
        capturable=dispatcher.capturable and kernel.capturable,
        topology=topology,
        candidates=candidates,
        decided=f"{why}, decided in {line_of(_chosen)}",
    )


def _chosen(candidates: tuple[tuple[str, str, str], ...]) -> tuple[str, str, str] | None:
    """Return the first candidate that fits; else the first that only is not implemented; else None."""
    return next((one for reason in ("", NOT_YET) for one in candidates if one[2] == reason), None)


def _table(candidates: tuple[tuple[str, str, str], ...]) -> str:
    return "".join(f"\n  {name} + {kernel or 'any'}: {reason or 'fits'}" for name, kernel, reason in candidates)


def _spread(topology: Parallel) -> bool:
    """True when tokens of one replica of attention need experts on the ranks of another replica."""
    return topology.experts and topology.dp > 1


def _candidates(
    topology: Parallel, hardware: Hardware, phase: str, asked: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    captured = phase == "decode" and hardware.device == "cuda" and not hardware.eager
    for name, dispatcher in DISPATCHERS.items():
        if (name == "none") == _spread(topology):
            yield (
                name,
                "",
                (
                    "tokens of other replicas need the experts of this rank"
                    if name == "none"
                    else "every rank already has the tokens that its experts need"
                ),
            )
            continue
        if hardware.device not in dispatcher.devices:
            yield name, "", f"{name} runs on {' or '.join(dispatcher.devices)}, not on {hardware.device}"
            continue
        if topology.expert_ranks > dispatcher.ranks:
            yield name, "", f"{name} joins at most {dispatcher.ranks} ranks, those of one host"
            continue
        if dispatcher.one_host and hardware.hosts > 1:
            yield name, "", f"{name} reads the memory of other ranks, and these are on {hardware.hosts} hosts"
            continue
        for kernel, cannot_run in hardware.kernels:
            reason = cannot_run or _mismatch(name, kernel, captured)
            others = [other for other in asked.values() if other not in (name, kernel)]
            if not reason and others:
                reason = f"{' and '.join(others)} was asked for"
            yield name, kernel, reason or ("" if dispatcher.implemented else NOT_YET)


def _mismatch(giver: str, taker: str, captured: bool) -> str:
    """Return why the dispatcher `giver` and the kernel `taker` cannot work together; "" when they can."""
    dispatcher, kernel = DISPATCHERS[giver], KERNELS[taker]
    for verb, words, gives, accepts in (
        ("delivers", ROWS, dispatcher.layout, kernel.layouts),
        ("delivers", IDS, dispatcher.numbering, kernel.numberings),
        ("requires", WEIGHING, dispatcher.weighs, kernel.weighs),
    ):
        if gives not in accepts:
            return f"{giver} {verb} {words[gives]}; {taker} accepts only {' or '.join(words[one] for one in accepts)}"
    slow = giver if not dispatcher.capturable else taker if not kernel.capturable else ""
    return f"{slow} cannot be captured in a CUDA graph (--enforce-eager captures none)" if captured and slow else ""
