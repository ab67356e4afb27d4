"""Choice of a dispatcher (moves tokens to experts and back) and an experts kernel, together, as a printable plan.

Topology and machine must allow the dispatcher and the kernel. In a phase whose steps are captured, CUDA graphs must be
able to hold the kernel; they can hold every dispatcher.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quire.args.checkpoint import ModelArgs
from quire.contracts.decision_line import line_of
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.contracts.scheme import Scheme
from quire.kernels.experts_plan import DISPATCHERS, KERNELS, MoEPlan, candidate_table, kind_of

NOT_CAPTURABLE = "{} cannot be captured in a CUDA graph (--enforce-eager captures none)"


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
        raise ConfigError(f"no way to run the experts in {phase} on {topology}{wanted}:" + candidate_table(candidates))
    dispatcher = DISPATCHERS[chosen[0]]
    why = "asked for" if "dispatcher" in asked else "first that fits"
    sharing = ("tp",) * (topology.tp > 1) + ("dp",) * _spread(topology)
    partial = tuple(group for group in sharing if group not in dispatcher.sums)
    shared = "added" if topology.tp == 1 or "tp" in partial else "summed alone"
    return MoEPlan(
        phase=phase,
        dispatcher=chosen[0],
        experts=chosen[1],
        weights=kind_of(scheme),
        features=hardware.features.get(chosen[1], ()),
        quantize_at="experts" if scheme and scheme.inputs else "nowhere",
        partial_over=partial,
        shared=shared if model.moe.shared_size else "none",
        capturable=KERNELS[chosen[1]],
        topology=topology,
        candidates=candidates,
        decided=f"{why}, decided in {line_of(_chosen)}",
    )


def _chosen(candidates: tuple[tuple[str, str, str], ...]) -> tuple[str, str, str] | None:
    """Return the first candidate that fits, or None."""
    return next((one for one in candidates if not one[2]), None)


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
            reason = cannot_run or (NOT_CAPTURABLE.format(kernel) if captured and not KERNELS[kernel] else "")
            others = [other for other in asked.values() if other not in (name, kernel)]
            if not reason and others:
                reason = f"{' and '.join(others)} was asked for"
            yield name, kernel, reason
