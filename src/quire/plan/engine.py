"""`EnginePlan`: the choices for one rank's engine, made by pure functions before anything is built. No torch.

`assemble` builds an engine from the plan, `quire explain` prints it (see `report.py`). A plan can be serialized, sent
and read back: no value in it belongs to a process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.args.checkpoint import ModelArgs
from quire.config.engine import EngineConfig, check_context
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import ALONE, Parallel, Rank
from quire.contracts.params import Param
from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.contracts.speculation import Speculation, read_speculative_config
from quire.contracts.step import most_drafts
from quire.kernels.attention_limits import SCRATCH, widened_blocks
from quire.kernels.experts_plan import MoEPlan
from quire.kernels.linear_plan import LinearPlan
from quire.kernels.select import Choice, KernelNeeds, Probe, choose_kernels, choose_linears
from quire.kernels.supports import FIXED_ORDER
from quire.plan.cache_dtype import CacheChoice, choose_cache
from quire.plan.collectives import buffer_bytes, head_reads, passed_bytes
from quire.plan.cuda_memory import check_sequences, resolve_batch
from quire.plan.dtype import DTypePlan
from quire.plan.expert_rows import with_wire
from quire.plan.experts import moe_plans, needs_of_kinds
from quire.plan.graphs import GraphPlan, resolve_graphs
from quire.plan.host_layers import HostLayers, choose_host_layers
from quire.plan.kernel_features import attention_features
from quire.plan.kinds.blocks import operations
from quire.plan.kinds.interfaces import StateTypes
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import layout
from quire.plan.linears import is_linear, linear_plans
from quire.plan.meeting_rows.records import MISSING
from quire.plan.meetings import Meeting, check, inputs_of, met
from quire.plan.placement import ranks
from quire.plan.state_memory import slots_limit, state_dtype
from quire.plan.tiers import OffloadPlan, resolve_offload
from quire.plan.weight_bytes import ITEM_BYTES, mover_bytes, unpacked_bytes
from quire.quantization.assigned import with_formats
from quire.quantization.formats import num_bytes


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A device as far as plans depend on it.

    device         "cpu" or "cuda"
    words          description of the device, for people
    total_memory   bytes
    shared         all ranks have the same GPU, and exchange tensors through host memory (tests alone)
    """

    device: str
    words: str
    total_memory: int
    shared: bool = False


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of tensor, pipeline and data parallelism, and the part of the model that this rank holds."""

    parallel: Parallel
    rank: Rank


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """All choices for one rank's engine, except those that need measured memory (`resolve_sizing`).

    config        the options, with defaults that depend on the device filled in
    folder        folder of config.json and weights
    params        parameters of this rank, with the checkpoint slices that it reads
    kernels       chosen implementation of each operation except experts
    linears       name of a linear layer -> plan of its kernel
    moe           phase ("prefill", "decode") -> kernel and dispatcher of experts, or the reason why there is none
    geometry      layout of a page of this rank's KV cache
    graphs        sizes of the steps that are captured as CUDA graphs
    meetings      rows of `plan/meetings.py` that apply: features that are not implemented, options without effect
    drafting      drafter, number of drafts and draft model
    quantization  quantization of the checkpoint, as `quire.quantization.read` returns it; {}: unquantized
    """

    config: EngineConfig
    folder: str
    args: ModelArgs
    machine: Machine
    dtype: DTypePlan
    mesh: Mesh
    params: tuple[Param, ...]
    kernels: tuple[Choice, ...]
    linears: dict[str, LinearPlan]
    moe: dict[str, MoEPlan | str]
    geometry: KVGeometry
    graphs: GraphPlan
    meetings: tuple[Meeting, ...] = ()
    drafting: "Drafting" = msgspec.field(default_factory=lambda: Drafting())
    quantization: dict[str, Any] = {}

    @property
    def missing(self) -> tuple[Meeting, ...]:
        """Features that are not implemented: an engine that needs them can be planned, not built."""
        return tuple(one for one in self.meetings if one.status == MISSING)

    @property
    def speculation(self) -> Speculation | None:
        """The drafter and its number of drafts; None: every decode advances by one token."""
        return self.drafting.speculation

    @property
    def draft(self) -> "EnginePlan | None":
        """The plan of the draft model; `geometry` has its layers, too. None: there is none."""
        return self.drafting.model

    @property
    def experts(self) -> MoEPlan | None:
        """The plan of experts in decode steps, or None. Prefill has the same kernel, for the same packed weights.

        If decode has no plan, the plan of prefill: such an engine can be planned, not built.
        """
        plans = [self.moe.get(phase) for phase in ("decode", "prefill")]
        runs = [one for one in plans if isinstance(one, MoEPlan)]
        assert len({(one.experts, one.wire.form) for one in runs}) < 2, "steps of both phases share weights and rows"
        return runs[0] if runs else None

    @property
    def spread(self) -> dict[str, str]:
        """Phase -> name of the dispatcher that brings tokens to the experts of other replicas; {}: none does."""
        plans = {phase: plan.dispatcher for phase, plan in self.moe.items() if isinstance(plan, MoEPlan)}
        return {phase: name for phase, name in plans.items() if name != "none"}

    @property
    def wire(self) -> Wire:
        """Form of rows on the way to the experts of other replicas, in all steps: replicas may differ in phase."""
        return self.experts.wire.form if self.experts else AS_THEY_ARE

    @property
    def cache(self) -> CacheChoice:
        """The dtype of the KV cache and the reason for it."""
        return choose_cache(self.config.cache.kv_cache_dtype, self.dtype.dtype, self.quantization)

    @property
    def widened_tokens(self) -> tuple[int, ...]:
        """Most tokens of context that a step's prompts read through the scratch for an 8-bit KV cache, by KV group.

        The scratch serves one layer after the other, those of a draft model, too. 0: layers of the group do not use it.
        Hopper's prefill kernel multiplies two-byte numbers; see `kernels/attention/triton_widen.py`.
        """
        own, drafts = _widens(self), self.draft is not None and _widens(self.draft)
        found = list[int]()
        for group in self.geometry.groups:
            keys = (*group.components[:own], *group.drafts[:drafts])
            size, chunks = group.block_size, (group.window or 0) < 0
            most = [size * widened_blocks(one.num_heads, one.head_dim, size) for one in keys if not chunks]
            found.append(min(filter(None, most), default=0))
        return tuple(found)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of that scratch."""
        return SCRATCH if any(self.widened_tokens) else 0

    @property
    def offload(self) -> OffloadPlan:
        """The tiers of KV blocks below the device."""
        return resolve_offload(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters as they are loaded, before they are packed."""
        own = unpacked_bytes(self.params, self.dtype.dtype)
        drafter = own_draft(self)
        return own + (drafter.weight_bytes if drafter is not None else 0)

    @property
    def weight_words(self) -> str:
        """Quantization method or dtype of the weights, for messages about memory."""
        return str(self.quantization["quant_method"]) if self.quantization else self.dtype.dtype

    @property
    def buffer_bytes(self) -> int:
        """Bytes that exchanges with other ranks take in the largest step, and moves of experts; 0 on one device."""
        rank, item, tokens = self.mesh.rank, ITEM_BYTES[self.dtype.dtype], self.step_tokens
        reads = head_reads(self.args, self.draft.args if self.draft else None)
        longest = self.config.model.max_model_len or self.args.max_position_embeddings
        return (
            buffer_bytes(
                self.args,
                rank,
                self.mesh.parallel,
                tokens=tokens,
                item_bytes=item,
                rows=self.step_rows,
                device=self.machine.device,
                spread=self.spread,
                wire=self.wire,
            )
            + passed_bytes(reads, rank, self.mesh.parallel.pp, tokens * self.args.hidden_size * item)
            + mover_bytes(self.params, self.mesh.parallel, self.dtype.dtype)
            + self.geometry.gathered_bytes(longest, self.config.scheduler.sequences())
        )

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step of a replica, drafts included."""
        return _step_tokens(self.config, self.speculation)

    @property
    def step_rows(self) -> int:
        """Most sampled rows of a step of a replica: one for each sequence, and one for each draft."""
        batch = self.config.scheduler
        return batch.sequences() + self.step_tokens - batch.token_budget()


def host_layers(plan: EnginePlan) -> HostLayers:
    """Return the layers of a rank whose weights lie in host memory."""
    sizes = ((one, num_bytes(one, ITEM_BYTES[one.dtype or plan.dtype.dtype])) for one in plan.params)
    return choose_host_layers(sizes, range(*plan.mesh.rank.layers), plan.config.load.cpu_offload_gb)


def own_draft(plan: EnginePlan) -> EnginePlan | None:
    """Return the plan of the draft model if the rank has it: a rank of the last stage of a pipeline."""
    return plan.draft if plan.mesh.rank.last else None


def _widens(plan: EnginePlan) -> bool:
    """Return True if attention of the model, without its draft model, can use the scratch for an 8-bit KV cache."""
    return bool(plan.cache.features) and ("attention", "hopper") in [(one.op, one.name) for one in plan.kernels]


def state_types(plan: EnginePlan) -> StateTypes:
    """Return the types of what layers of a plan keep of requests besides the KV cache."""
    return StateTypes(plan.dtype.dtype, state_dtype(plan.config), plan.drafting.num_drafts)


def of_rank(plan: EnginePlan, rank: Rank) -> EnginePlan:
    """Return a copy with `rank` in its mesh. `params` and `geometry` remain those of the original rank."""
    return msgspec.structs.replace(plan, mesh=Mesh(parallel=plan.mesh.parallel, rank=rank))


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding of an engine, and the plan of its draft model."""

    speculation: Speculation | None = None
    model: EnginePlan | None = None

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts that a decode verifies; 0: no speculation."""
        return self.speculation.num_drafts if self.speculation else 0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its files describe it, for the plan of an engine.

    folder         folder of config.json and weights
    dtype          dtypes as resolved for this machine
    quantization   quantization of the checkpoint; {}: unquantized
    draft          arguments of the draft model or EAGLE head; None: there is none
    """

    folder: Path
    args: ModelArgs
    dtype: DTypePlan
    quantization: Mapping[str, Any] = {}
    draft: ModelArgs | None = None


def resolve_engine(
    config: EngineConfig,
    model: ModelFacts,
    machine: Machine,
    probe: Probe,
    *,
    parallel: Parallel = ALONE,
    number: int = 0,
    served: bool = True,
    forced: dict[str, str] | None = None,
) -> EnginePlan:
    """Plan the engine of rank `number`.

    Raises a `UserError` that tells all rows of `plan/meetings.py` by which the options contradict each other or the
    model; then ConfigError for a number that does not fit the model or the device.

    probe    function that returns the reason why the machine does not meet a need of kernels, or ""
    forced   operation -> name of the implementation to use
    served   True: clients read answers token by token, so steps stay short
    """
    args, dtype, device = model.args, model.dtype, machine.device
    speculation = read_speculative_config(config.scheduler.speculative_config)
    inputs = inputs_of(config, args, device, draft=model.draft, parallel=parallel)
    check(met(inputs), planned=True)
    check_context(config.model, args.max_position_embeddings)
    resolve_offload(config)
    if speculation is not None and machine.device == "cuda":
        speculation = speculation.captured()
    quantization = dict(model.quantization)
    rank = list(ranks(args, parallel))[number]
    params = with_formats(layout(args, rank), quantization)
    by_triton = device == "cuda" and not probe("triton")
    cache = choose_cache(config.cache.kv_cache_dtype, dtype.dtype, quantization)
    kinds = _layouts(cache, StateTypes(dtype.dtype, state_dtype(config), _drafts(speculation)), by_triton)
    geometry = rank_geometry(args, rank, block_size=config.cache.block_size, **kinds)
    forced = dict(forced or {})
    experts = forced.pop("experts", "") if args.moe else ""
    blends, asked = config.cache.enable_cache_blend, attention_features(inputs, args)
    kernels = choose_kernels(
        device,
        dtype.dtype,
        ops=operations(args, blends, config.adapters.enable_lora),
        head_dim=max(one.head_dim for one in args.attending),
        forced=forced,
        attention_features=asked,
        cache_features=cache.features,
        probe=probe,
    )
    if by_triton and cache.features:
        _check_cache(config.cache.kv_cache_dtype, kernels, forced)
    needs = KernelNeeds(device=device, dtype=dtype.dtype, features=asked & {FIXED_ORDER})
    schemes = [param.scheme for param in params if param.scheme and is_linear(param)]
    kernels += choose_linears(needs, schemes, forced.get("linear"), probe)
    moe = _experts(config, model, params, rank, needs, probe, parallel=parallel, forced=experts)
    meetings = met(replace(inputs, moe=moe))
    check(meetings, planned=True)
    if device == "cuda":
        roomy = unpacked_bytes(params, dtype.dtype) <= machine.total_memory // 2  # else wide steps would cost context
        wide, most = args.moe is not None and not served and roomy, _slots(config, machine, args, parallel, kinds)
        config = replace(config, scheduler=resolve_batch(config.scheduler, machine.total_memory, wide, most))
        check_sequences(config)
    ways = {plan.dispatcher for plan in moe.values() if isinstance(plan, MoEPlan)}
    dtype, tokens = _typed(dtype, kernels), _step_tokens(config, speculation)
    return EnginePlan(
        config=config,
        folder=str(model.folder),
        args=args,
        machine=machine,
        dtype=dtype,
        mesh=Mesh(parallel=parallel, rank=rank),
        params=keep_stored(params, dtype, kernels, moe),
        kernels=kernels,
        linears=linear_plans(args, params, kernels, adapted=config.adapters.enable_lora),
        moe=moe,
        geometry=geometry,
        graphs=resolve_graphs(config, args, speculation, ways, tokens) if by_triton else GraphPlan(),
        meetings=meetings,
        drafting=Drafting(speculation=speculation),
        quantization=quantization,
    )


def _layouts(cache: CacheChoice, states: StateTypes, by_triton: bool) -> dict[str, Any]:
    """Return the arguments of `rank_geometry` that are alike for all ranks."""
    return {"dtype": cache.dtype, "states": states, "device": "cuda" if by_triton else "cpu"}


def _slots(config: EngineConfig, machine: Machine, args: ModelArgs, parallel: Parallel, kinds: dict[str, Any]) -> int:
    """Return the most requests for whose states a GPU has room, unless max_num_seqs is given; 0: no layer keeps some.

    The rank counts that keeps most bytes of a request, so that all ranks decide alike.
    """
    size = max(rank_geometry(args, one, block_size=None, **kinds).state_bytes for one in ranks(args, parallel))
    return slots_limit(machine.total_memory, config.state.state_memory_fraction, size) if size else 0


def _experts(
    config: EngineConfig,
    model: ModelFacts,
    params: Iterable[Param],
    rank: Rank,
    needs: KernelNeeds,
    probe: Probe,
    *,
    parallel: Parallel,
    forced: str,
) -> dict[str, MoEPlan | str]:
    """Return phase -> plan of the experts of a rank, with the form of rows on their way to other replicas."""
    args = model.args
    plans = moe_plans(
        args,
        needs_of_kinds(args, rank, needs, model.quantization, adapted=config.adapters.of_experts),
        probe,
        parallel=parallel,
        forced=forced,
        backend=config.parallel.all2all_backend,
        eager=config.device.enforce_eager,
        hosts=config.hosts.nnodes,
    )
    lacking = [one for one in plans.values() if isinstance(one, str)]
    if lacking and FIXED_ORDER in needs.features:
        raise ConfigError(f"batch_invariant: {lacking[0]}\nleave out --batch-invariant.")
    rows = {param.scheme for param in params if param.shard == "experts" and param.name.endswith("gate_up")}
    item = ITEM_BYTES[model.dtype.dtype]
    return {phase: with_wire(one, rows, args.hidden_size, item) for phase, one in plans.items()}


def _step_tokens(config: EngineConfig, speculation: Speculation | None) -> int:
    """Return the most tokens of a step of a replica, drafts included."""
    batch = config.scheduler
    return batch.token_budget() + most_drafts(batch.sequences(), _drafts(speculation))


def _drafts(speculation: Speculation | None) -> int:
    """Return the most drafts that a decode verifies."""
    return Drafting(speculation=speculation).num_drafts


def keep_stored(
    params: Iterable[Param], dtype: DTypePlan, kernels: Iterable[Choice], moe: Mapping[str, MoEPlan | str]
) -> tuple[Param, ...]:
    """Return the parameters, with dtype `dtype.weights` for matrices whose kernel reads them as stored ("stored")."""
    linear = {choice.weights: choice.features for choice in kernels if choice.op == "linear"}.get((), ())
    plans = [one for plan in moe.values() if isinstance(plan, MoEPlan) for one in (plan, *plan.others)]
    experts = {name for plan in plans if not plan.weights for name in plan.features}

    def kept(param: Param) -> bool:
        features = linear if is_linear(param) else experts if param.shard == "experts" else ()
        plain = param.stored is None and param.scheme is None
        return bool(dtype.weights) and "stored" in features and plain and not param.dtype

    return tuple(msgspec.structs.replace(one, dtype=dtype.weights) if kept(one) else one for one in params)


def _typed(dtype: DTypePlan, kernels: Iterable[Choice]) -> DTypePlan:
    """Return the types of a model whose linear layers are planned."""
    choice = next(choice for choice in kernels if choice.op == "linear" and not choice.weights)
    if not dtype.weights or "stored" in choice.features:
        return dtype
    why = dict(choice.rejected).get("panels", f"linear layers run {choice.name}")
    return replace(dtype, weights="", reason=f"weights are converted, because {why}")


def _check_cache(asked: str, kernels: Sequence[Choice], forced: Mapping[str, str]) -> None:
    """Refuse an 8-bit cache for which a GPU has the reference alone: it is far too slow."""
    for choice in kernels:
        if choice.name == "ref" and choice.op in ("heads", "attention", "latent") and choice.op not in forced:
            why = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected if name == "triton")
            raise ConfigError(
                f"kv_cache_dtype={asked}: this GPU has no {choice.op} kernel for it ({why}): set "
                "--kv-cache-dtype to the dtype of the computation, such as bfloat16."
            )
