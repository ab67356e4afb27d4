"""Choose the parts of a model runner for a device, and build the runner from them."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.contracts.speculation import Speculation
from quire.distributed.expert_moves import ExpertRanks
from quire.distributed.mesh import ALONE, RankGroups
from quire.kernels.attention import KVView
from quire.kernels.sampling import SamplerOperations
from quire.kernels.sampling.sampler import Sampler
from quire.kernels.select import Choice, KernelNeeds, select
from quire.kernels.states import BothViews, StateView
from quire.kernels.step.state import DeviceState, Limits
from quire.kernels.step.upload import InPlaceUpload, Upload
from quire.layers.stack import Model
from quire.spec.choose import make_drafter
from quire.spec.drafter import Drafter
from quire.worker.adapters import AdapterLoader, StepAdapters
from quire.worker.agreement import ReplicaAgreement
from quire.worker.balancing import RankBalancing
from quire.worker.blending import Blending
from quire.worker.features import Features, StepFeature
from quire.worker.graphs import Graphs
from quire.worker.logits_processors import LogitsProcessors
from quire.worker.pooling import Pooler
from quire.worker.programs import Programs
from quire.worker.prompt_embeds import PromptEmbeds
from quire.worker.prompt_logprobs import PromptScorer
from quire.worker.recorder import Recorder
from quire.worker.recordings import LayerRecordings, not_recordable
from quire.worker.runner import StepRunner
from quire.worker.sliced_sampling import SlicedSampling
from quire.worker.stage import PipelineStage
from quire.worker.stage_drafts import StageDrafts, StageTokens
from quire.worker.step_drafts import StepDrafts
from quire.worker.synthetic import SyntheticAcceptance

NOT_PACKED = "the step operations are PyTorch's, which cannot read packed changes"
EAGER = "enforce_eager"
NO_GRAPHS = "PyTorch's operations launch different work for each step's sizes"


def choose_parts(
    model: Model,
    target: str,
    forced: Mapping[str, str] | None = None,
    *,
    eager: bool = False,
    divided: bool = False,
) -> tuple[Choice, ...]:
    """Choose the implementations of a model runner's four parts. Return a `Choice` for each.

    The parts are the step operations, the sampler operations, the upload (it sends a step to the device) and the
    recorder (it records and replays launches: CUDA graphs on a GPU).

    target    "cpu" or "cuda": the device that the model's kernels are made for
    forced    "step" or "sampling" -> the implementation to use
    eager     record no CPU step (enforce_eager); on a GPU `Limits` without sizes does that
    divided   other ranks hold parts of layers
    """
    forced, dtype = forced or {}, "float32"  # the type of logits, for every type of model
    needs = KernelNeeds(device=target, dtype=dtype)
    step, sampling = (select(op, needs, forced.get(op)) for op in ("step", "sampling"))
    packs, why = step.name == "triton", EAGER if eager else not_recordable(model.kernels, divided=divided)
    upload = (
        Choice("upload", "packed", "one copy a step; a kernel writes the tables")
        if packs
        else Choice("upload", "in place", "the host writes the tables when it sends a step", (("packed", NOT_PACKED),))
    )
    if packs and sampling.name == "triton":
        recorder = Choice("recorder", "graphs", "the launches of a step depend on its sizes alone")
    elif not why:
        recorder = Choice("recorder", "recordings", "all kernels of the layers are native", (("graphs", NO_GRAPHS),))
    else:
        recorder = Choice("recorder", "none", why, (("graphs", NO_GRAPHS), ("recordings", why)))
    return step, sampling, upload, recorder


def make_runner(
    model: Model,
    kv: Sequence[KVView | StateView | BothViews],
    limits: Limits,
    device: torch.device,
    *,
    target: str,
    forced: Mapping[str, str] | None = None,
    groups: RankGroups = ALONE,
    eager: bool = False,
    speculation: Speculation | None = None,
) -> StepRunner:
    """Build the runner of `model` on `device` with the KV cache `kv`.

    target, forced, eager   see `choose_parts`
    groups                  groups of ranks (tensor parallel, pipeline) that this rank belongs to
    speculation             names the drafter
    """
    limits = replace(limits, exchanges=replace(limits.exchanges, replicas=groups.replicas))
    divided = groups.tp is not None or groups.ep is not None
    parts = choose_parts(model, target, forced, eager=eager, divided=divided)
    chosen = {choice.op: choice.name for choice in parts}
    step, sampling = (importlib.import_module(f"quire.kernels.{op}.{chosen[op]}") for op in ("step", "sampling"))
    state = DeviceState(limits, model.args.vocab_size, device)
    upload, staged = _upload(chosen["upload"], limits, device), groups.pp is not None
    operations: SamplerOperations = sampling.operations(limits.max_rows, model.args.vocab_size, device)
    if model.vocabulary is not None:
        operations = SlicedSampling(operations, model.vocabulary)
    places = state.buffers.sample_slots, state.buffers.sample_positions
    sampler = Sampler(operations, state.sampling, *places, state.tables.history)
    drafter = make_drafter(
        speculation if model.last else None,
        chosen["step"],
        model=model,
        kv=kv,
        operations=step,
        tables=state.tables,
        sampling=(operations, sampler.rows),
        windows=None if staged else limits.windows,
    )
    features: list[StepFeature] = [
        *_exchanging(model, groups, state, upload, limits, drafter),
        *_drafting(drafter, state, limits, staged=staged),
        *_own(model, kv, state, groups, limits.captured_tokens if chosen["recorder"] == "graphs" else None, drafter),
    ]
    if speculation is not None and speculation.synthetic:
        features.append(SyntheticAcceptance(speculation.synthetic, limits.max_rows, device))
    programs = Programs(
        model,
        kv,
        state,
        upload=upload,
        operations=step,
        sampler=sampler,
        recorder=_recorder(parts[-1], limits),
        features=Features(features),
        limits=limits,
    )
    return StepRunner(programs, state, upload, limits=limits, parts=parts)


def _upload(kind: str, limits: Limits, device: torch.device) -> Upload:
    """Return the upload of this kind, "packed" or "in place"."""
    slots = limits.num_slots
    if kind != "packed":
        return InPlaceUpload(slots, slots, device)
    packed = importlib.import_module("quire.kernels.step.packed")
    sizes = {"max_rows": limits.max_rows, "decode_len": 1 + limits.num_drafts, "by_kernel": limits.tiers}
    upload: Upload = packed.PackedUpload(slots, slots, device, limits.depth, **sizes)
    return upload


def _recorder(choice: Choice, limits: Limits) -> Recorder:
    """Return the recorder that was chosen: "graphs", "recordings" or "none"."""
    if choice.name == "graphs":
        sizes, exchanges = (limits.graph_sizes, limits.graph_tokens, limits.num_slots), limits.exchanges
        more = {"joint": exchanges.joint, "adapted": limits.adapters, "even": exchanges.even}
        graphs = Graphs(*sizes, exchanges.bounds, limits.queries, **more)
        graphs.short = limits.short
        return graphs
    return LayerRecordings() if choice.name == "recordings" else Recorder(choice.reason)


def _drafting(drafter: Drafter | None, state: DeviceState, limits: Limits, *, staged: bool) -> Iterator[StepFeature]:
    """Yield the features of speculative decoding. staged: this rank belongs to a pipeline"""
    if not staged:
        if drafter is not None:
            yield StepDrafts(drafter)
    elif drafter is not None:
        yield StageDrafts(drafter, state.tables, limits.num_drafts)
    elif limits.num_drafts:
        yield StageTokens(state.tables)


def _own(
    model: Model,
    kv: list[KVView],
    state: DeviceState,
    groups: RankGroups,
    captured: int | None,
    drafter: Drafter | None,
) -> Iterator[StepFeature]:
    """Yield the features of a rank: adapters, embeddings, blending, processors, scoring, pooling.

    captured   most tokens of a step in a CUDA graph; None: steps are in none
    """
    adapters: StepAdapters | None = None
    if model.adapters is not None:
        slots, tokens = len(state.tables.computed) - 1, len(state.buffers.token_ids)
        loader = AdapterLoader(model.adapters)
        yield (adapters := StepAdapters(loader, slots, tokens, model.device, captured))
    yield (embeds := PromptEmbeds(first=groups.pp is None or groups.pp.rank == 0))
    if drafter is not None:
        drafter.write_prompts = embeds.write
    if model.kernels.blend is not None:
        yield Blending(model, kv, groups)
    if model.last and model.vocabulary is None:
        yield LogitsProcessors(state.tables.history)

    def logits_of(rows: Tensor, slot: int) -> Tensor:
        own = None if adapters is None else adapters.of_prompt(slot, len(rows))
        return model.head.whole(model.norm(rows), own)

    if model.last:
        yield PromptScorer(logits_of, state.tables.history)
        yield Pooler(model.norm)


def _exchanging(
    model: Model, groups: RankGroups, state: DeviceState, upload: Upload, limits: Limits, drafter: Drafter | None
) -> Iterator[StepFeature]:
    """Yield the features by which a rank works with other ranks."""
    if groups.pp is not None and groups.tokens is not None:
        yield PipelineStage(model, groups.pp, groups.tokens, state.tables, told=limits.num_drafts > 0)
    if limits.exchanges.replicas > 1:
        passes = None if drafter is None else drafter.joint
        as_planned = not limits.exchanges.bounds or not model.last or limits.exchanges.joint == (passes is not None)
        assert as_planned, "replicas make the passes that were planned"
        yield ReplicaAgreement(model, upload.step, limits, passes, late=groups.pp is not None)
    if groups.movers is not None and model.args.moe is not None:
        every = model.args.expert_layers
        layers = {every.index(number): block.experts for number, block in model.blocks.items() if number in every}
        shape, ranks = (len(every), model.args.moe.routing.num_experts), ExpertRanks(groups.movers, groups.stage)
        yield RankBalancing(layers, shape, model.device, ranks)
