"""Plans of the layers with experts: for each phase a dispatcher, and a kernel for each kind of weights. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import ALONE, Parallel, Rank
from quire.contracts.scheme import Scheme
from quire.kernels.experts.form import ExpertForm
from quire.kernels.experts_plan import MoEPlan, kind_of, kind_words
from quire.kernels.select import KernelNeeds, Probe, features, here, objection, runs_no
from quire.kernels.supports import SUPPORTS
from quire.plan.dispatchers import Hardware, resolve_moe
from quire.plan.layout import layout
from quire.plan.parallel_notes import BACKENDS, check_backend
from quire.quantization.assigned import with_formats


def needs_of_kinds(
    args: ModelArgs, rank: Rank, needs: KernelNeeds, quantization: Mapping[str, Any], *, adapted: bool = False
) -> tuple[KernelNeeds, ...]:
    """Return `needs` with each kind of weights that experts have, in the order of the layers of all stages.

    A checkpoint may leave the experts of some layers unquantized. The ranks of all stages get the same kinds.
    adapted: adapters may change the experts
    """
    needs = replace(needs, features=needs.features | {"adapters"}) if adapted else needs
    if args.moe is None or not quantization:
        return (needs,)
    every = replace(rank, layers=(0, args.num_layers), last=True)
    params = with_formats(layout(args, every, rank.expert_ids[:1]), quantization)
    schemes = [param.scheme for param in params if param.name.endswith(".experts.gate_up")]
    kinds = {kind_of(scheme): scheme for scheme in reversed(schemes)} or {(): needs.scheme}
    return tuple(replace(needs, scheme=scheme) for scheme in reversed(kinds.values()))


def moe_plans(
    args: ModelArgs,
    needs: KernelNeeds | Sequence[KernelNeeds],
    probe: Probe = here,
    *,
    parallel: Parallel = ALONE,
    forced: str = "",
    backend: str = "auto",
    eager: bool = False,
    hosts: int = 1,
) -> dict[str, MoEPlan | str]:
    """Return phase ("prefill", "decode") -> plan of the experts, or the reason why no kernel can run them.

    needs    requirements of the model, with the scheme of the experts' weights; several where layers differ in it
    forced   name of the kernel to use for the kinds of weights that it runs; "": the best
    backend  value of --all2all-backend, which counts where replicas share experts
    eager    steps are not captured in CUDA graphs;  hosts  hosts among which the ranks are divided
    Returns {} for a model without experts. Raises ConfigError for a forced kernel that cannot run, an unknown backend.
    """
    kinds = (needs,) if isinstance(needs, KernelNeeds) else tuple(needs)
    if args.moe:
        form = ExpertForm(args.moe.act, args.moe.biased)
        kinds = tuple(replace(one, features=one.features | form.features) for one in kinds)
    supports, plans = SUPPORTS["experts"], dict[str, MoEPlan | str]()
    runs = [not forced or forced in supports and not runs_no(supports[forced], one) for one in kinds]
    for phase in ("prefill", "decode") if args.moe else ():
        dispatcher = BACKENDS.get(backend, {}).get(phase, "") if parallel.lockstep else ""
        found = list[MoEPlan | str]()
        for one, can in zip(kinds, runs, strict=True):
            kernel = forced if can or not any(runs) else ""
            asked = {what: name for what, name in (("experts", kernel), ("dispatcher", dispatcher)) if name}
            try:
                hardware = _hardware(one, probe, eager, hosts)
                found.append(_resolved(args, one.scheme, parallel, hardware, phase, asked=asked, backend=backend))
            except ConfigError as error:
                if kernel:
                    raise
                found.append(str(error))
        plans[phase] = made = _joined(found)
        if parallel.lockstep and isinstance(made, MoEPlan):
            check_backend(backend, made)
    return plans


def _resolved(
    args: ModelArgs,
    scheme: Scheme | None,
    parallel: Parallel,
    hardware: Hardware,
    phase: str,
    *,
    asked: dict[str, str],
    backend: str,
) -> MoEPlan:
    """Return `resolve_moe` of these arguments; a dispatcher that stands for DeepEP gives way where it cannot run."""
    try:
        return resolve_moe(args, scheme, parallel, hardware, phase, asked)
    except ConfigError:
        if "dispatcher" not in asked or not backend.startswith("deepep"):
            raise
        rest = {what: name for what, name in asked.items() if what != "dispatcher"}
        return resolve_moe(args, scheme, parallel, hardware, phase, rest)


def _joined(found: Sequence[MoEPlan | str]) -> MoEPlan | str:
    """Return the plan of all layers, made of the plan of each kind of weights; or the first reason against one."""
    plans = [one for one in found if isinstance(one, MoEPlan)]
    if len(plans) < len(found):
        return next(one for one in found if isinstance(one, str))
    first, *others = plans
    for one in others:
        if one.dispatcher != first.dispatcher:
            words = [f"{plan.dispatcher} for {kind_words(plan.weights)}" for plan in (first, one)]
            return f"no way to run the experts in {first.phase}: layers need other dispatchers, {' and '.join(words)}"
    return replace(first, others=tuple(others))


def _hardware(needs: KernelNeeds, probe: Probe, eager: bool, hosts: int) -> Hardware:
    supports = SUPPORTS["experts"]
    unfit = {"in place" if needs.scheme or "bias" in needs.features else "", "" if needs.scheme else "quantized rows"}
    unfit |= {"adapters"} - needs.features
    return Hardware(
        device=needs.device,
        eager=eager,
        hosts=hosts,
        kernels=tuple(
            (name, objection(one, needs, probe) or _odd_groups(name, needs.scheme))
            for name, one in supports.items()
            if one.only_for <= needs.features
        ),
        features={
            name: tuple(word for word in features(one, probe) if word not in unfit) for name, one in supports.items()
        },
    )


def _odd_groups(kernel: str, scheme: Scheme | None) -> str:
    """Return the reason why a kernel of experts cannot run groups of this size, or ""."""
    wide = scheme.block[1] if scheme is not None and kernel == "weight_only" and not scheme.factor else 0
    return f"runs groups of multiples of 32 inputs, not of {wide}" if wide % 32 else ""
