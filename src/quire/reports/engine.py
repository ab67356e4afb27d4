"""An engine's plan as plain values: layers, bytes, kernel calls in order, and reasons. No torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import cycle, groupby
from math import prod
from pathlib import Path
from typing import Any

from quire.args.check_layer import check_layer
from quire.args.checkpoint import ModelArgs
from quire.args.pooling import read_pooling
from quire.config.bundled import NAME
from quire.contracts.errors import WeightsError
from quire.contracts.parallel import Rank
from quire.contracts.params import Param, first_expert, fused
from quire.contracts.scheme import Scheme
from quire.contracts.step import FIRST_TOKENS
from quire.kernels.experts_plan import MoEPlan
from quire.kernels.linear_plan import LinearPlan
from quire.kernels.select import Choice
from quire.plan.collectives import collectives, groups, head_reads
from quire.plan.draft_exchanges import draft_exchanges
from quire.plan.engine import EnginePlan, of_rank
from quire.plan.joined import joined_router
from quire.plan.kinds import mixers
from quire.plan.kinds.blocks import block_calls
from quire.plan.kinds.interfaces import Call, Features, LayerStep
from quire.plan.layout import alone, stored_names
from quire.plan.linears import linear_plans
from quire.plan.meetings import described, idle_notes
from quire.plan.memory import MemoryPlan
from quire.plan.parallel_notes import parallel_notes, slice_notes
from quire.plan.placement import rank_facts
from quire.plan.weight_bytes import ITEM_BYTES
from quire.quantization.assigned import decided_by
from quire.quantization.formats import FORMATS, tensor_names
from quire.quantization.read import format_words, quantization_notes
from quire.quantization.scheme_words import scheme_words
from quire.reports.adapters import describe_adapters
from quire.reports.chosen import describe_chosen
from quire.reports.holdings import Holdings
from quire.reports.joined import describe_joined
from quire.reports.memory import describe_loading, describe_memory
from quire.reports.model import model_facts
from quire.reports.outer_calls import embedding_calls, head_calls, pack_function
from quire.reports.step_costs import scores
from quire.reports.step_time import describe_steps
from quire.weights.cache_scales import scale_names
from quire.weights.units import ITEM_BYTES as RAW_BYTES

_READ = {"config": "config.json, device, number type", "tokenizer": "tokenizer and chat template"}
PHASES = {
    "cpu": _READ | {"weights": "every file once, tensors to their rows, packed for the kernels",
                    "engine": "KV cache, worker, scheduler"},
    "cuda": _READ | {"device": "CUDA context, size of weights and batch",
                     "weights": "files streamed to the device, packed for the kernels",
                     "kernels": "every kernel compiled or found in the cache, the largest step run once and measured",
                     "graphs": "KV cache in what is left, CUDA graphs of steps", "engine": "scheduler"},
}  # fmt: skip
MANY = _READ | {
    "weights": "a process for each rank, which reads its slices and packs them",
    "ranks": "each rank's KV cache and worker, in sizes that all ranks have room for",
    "engine": "scheduler",
}
DUMMY, EAGER = {"weights": "random numbers, packed for the kernels"}, {"graphs": "KV cache in what is left"}


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan as plain values for people: `quire explain`, `/debug/plan`, the banner.

    holdings     the plan of any rank, and the parts of the model that all ranks hold
    memory       memory of rank number `fullest`, or the reason why no KV cache fits there
    fullest      number of the rank with the least free memory
    load_error   error that the loader would raise for the weights; "": none
    """

    holdings: Holdings
    memory: MemoryPlan | str
    fullest: int = 0
    load_error: str = ""

    @property
    def plan(self) -> EnginePlan:
        """The plan of a rank."""
        return self.holdings.plan

    def describe(self) -> dict[str, Any]:
        """Return the report as plain values. Reads the headers of the weights, if the folder has weights."""
        args, config = self.plan.args, self.plan.config
        pooling = read_pooling(Path(self.plan.folder), config.model.pooler_config, config.load.hf_overrides)
        every = (
            *quantization_notes(self.plan.quantization, config.load.quantization),
            *slice_notes(self.plan.params, self.plan.dtype.dtype),
            *parallel_notes(args, config.parallel, self.plan.params),
            *idle_notes(self.plan.meetings),
        )
        notes = (note.removesuffix(".") for note in every)
        return {
            **described(self.plan.meetings),
            "load_error": self.load_error,
            "model": {
                "name": config.model.model or NAME,
                "type": args.model_type,
                "architecture": args.architecture,
                "parameters": sum(prod(param.shape) for param in self.holdings.layout),
                "bytes": sum(map(self.holdings.num_bytes, self.holdings.layout)),
                "dtype": self.plan.dtype.dtype,
                "dtype_reason": self.plan.dtype.reason,
                "notes": (*args.notes, *notes),
                "format": format_words(self.plan.quantization) or "unquantized",
                **model_facts(args),
                "embedding": str(pooling),
            },
            "machine": self.plan.machine.words,
            "kernels": [asdict(choice) for choice in self.plan.kernels],
            "joined": describe_joined(self.plan),
            "joined_router": joined_router(self.plan),
            "latent": next((one for kind in mixers(args) if (one := kind.facts().get("compressed"))), None),
            "chosen": describe_chosen(self.plan),
            "moe": {phase: one if isinstance(one, str) else asdict(one) for phase, one in self.plan.moe.items()},
            "layers": list(self.layers()),
            "speculation": self._speculation(),
            "blend": self._blend(),
            "adapters": describe_adapters(self.plan),
            "not_read": self._not_read(),
            "memory": self._memory(),
            "ranks": [self.describe_rank(rank, held) for rank, held in self.holdings.held],
            "groups": groups(self.plan.mesh.parallel),
            "collectives": self.exchanges(),
            "floors": describe_steps(self.holdings, self.memory, self.exchanges),
            "phases": self._phases(),
        }

    def _phases(self) -> dict[str, str]:
        """Return start-up phase -> its work, in order."""
        config, device = self.plan.config, self.plan.machine.device
        many = self.plan.mesh.parallel.size > 1
        phases = MANY if many else PHASES[device] | (DUMMY if config.load.load_format == "dummy" else {})
        return phases | (EAGER if device == "cuda" and config.device.enforce_eager and not many else {})

    def _speculation(self) -> dict[str, Any] | None:
        """Return drafter and costs as plain values; None without speculation.

        `read` has the bytes of weights, of all ranks, that a step of one decode reads, by its number of drafts. Experts
        are those that n tokens hit if routers choose at random: E (1 - (1 - top / E)^n) of E. Of 1 + k tokens it runs
        the model and the first pass of draft layers; each other draft is a pass of one token. Drafts read the head.
        Each pass of a draft model or EAGLE head counts as all its weights.
        `shared_choice` has the tokens that later passes attend to, as the first one has chosen; 0: each pass chooses.
        """
        speculation, args = self.plan.speculation, self.plan.args
        if speculation is None:
            return None
        holdings = self.holdings
        drafts = [one for one in holdings.layout if _layer(one.name) >= args.num_layers]
        skipped = {one.name for one in drafts} | ({"embed.weight"} if not args.tie_word_embeddings else set())
        model = [one for one in holdings.layout if one.name not in skipped]
        other, layered = 0, speculation.layered
        if self.plan.draft is not None:
            drafter = Holdings(plan=self.plan.draft)
            other = sum(map(drafter.num_bytes, drafter.layout))
        index = args.prediction.shared_choice(args.layers)
        later_drafts = [one for one in drafts if index is None or not scores(one.name)]
        shared = drafts or speculation.method == "eagle"
        head = holdings.num_bytes(holdings.layout[0] if args.tie_word_embeddings else model[-1]) if shared else 0

        def read(k: int) -> int:
            later = max(0, k - 1)
            own = self._read(model, 1 + k) + self._read(drafts, 1 + k) + later * self._read(later_drafts, 1) + k * head
            return own + max(1, k) * other

        last, _ = holdings.held[self.plan.mesh.parallel.lead]  # of the last stage, which drafts
        own = len(range(*last.layers))
        every = [(group, layer) for group in holdings.page(last).groups for layer in group.layers]
        drafting = [(group, one) for group, at in every if layered and at >= own for one in group.of(at)]
        return {
            "drafter": str(speculation),
            "weights": other + sum(map(holdings.num_bytes, drafts)),
            "cache": sum(one.num_bytes(group.entries) / group.block_size for group, one in drafting),
            "read": {k: read(k) for k in (0, *speculation.lengths)},
            "shared_choice": 0 if index is None else index.top_k,
        }

    def _read(self, params: Iterable[Param], tokens: int) -> int:
        """Return the bytes of weights that so many tokens read at once, of the experts as in `_speculation`."""
        moe = self.plan.args.moe
        hit = 1 - (1 - moe.routing.top_k / moe.routing.num_experts) ** tokens if moe else 0
        return sum(round(self.holdings.num_bytes(one) * (hit if one.shard == "experts" else 1)) for one in params)

    def _blend(self) -> dict[str, Any] | None:
        """Return the settings of CacheBlend as plain values; None without it."""
        cache = self.plan.config.cache
        return (
            {
                "ratio": cache.blend_ratio,
                "separator": cache.blend_separator,
                "check_layer": check_layer(self.plan.args),
                "first_tokens": FIRST_TOKENS,
            }
            if cache.enable_cache_blend
            else None
        )

    def exchanges(self, rank: Rank | None = None) -> list[dict[str, Any]]:
        """Return the exchanges of a rank in a step as plain values; None: those that a token passes in all stages."""
        drafter = self.plan.draft
        reads = head_reads(self.plan.args, drafter.args if drafter else None)
        sent = collectives(
            self.plan.args,
            self.plan.mesh.parallel,
            item_bytes=ITEM_BYTES[self.plan.dtype.dtype],
            device=self.plan.machine.device,
            spread=self.plan.spread,
            wire=self.plan.wire,
            rank=rank,
            drafts=None if self.plan.speculation is None else reads,
        )
        return [asdict(one) for one in (*sent, *draft_exchanges(self.plan, rank))]

    def _memory(self) -> dict[str, Any]:
        """Return the memory of the rank with the least room."""
        plan, (rank, weights) = self.memory, self.holdings.held[self.fullest]
        cache = self.holdings.page(rank) if isinstance(plan, str) else plan.geometry
        loads: dict[str, Any] = {
            "device": self.load_device,
            "num_bytes": self.holdings.num_bytes,
            "in_place": self.in_place,
        }
        host = self.holdings.host_layers(rank)
        loading = describe_loading(self.plan, self.holdings.with_one_expert(rank), weights - host.saved, **loads)
        known: dict[str, Any] = {"weights": weights, "scales": self.cache_scales, "loading": loading}
        streamed = {"host_layers": host._asdict() if host.layers else None}
        return streamed | describe_memory(self.plan, plan, rank, cache, **known)

    def describe_rank(self, rank: Rank, held: int) -> dict[str, Any]:
        """Return a rank's part of the model and its memory as plain values; held: bytes of its parameters.

        `bytes` are those in the memory of its device.
        """
        blocks = 0 if isinstance(self.memory, str) else self.memory.num_blocks + 1
        return rank_facts(self.plan.args, rank) | {
            "device": self.plan.machine.device,
            "expert_ids": list(rank.expert_ids),
            "balanced": self.plan.mesh.parallel.redundant is not None,
            "bytes": held - self.holdings.host_layers(rank).saved,
            "kv_bytes": blocks * self.holdings.page(rank).page_bytes,
            "buffers": of_rank(self.plan, rank).buffer_bytes,
        }

    # --- layers and their weights ---------------------------------------------------------------------------------

    @cached_property
    def _chosen(self) -> dict[str, Choice]:
        return {choice.op: choice for choice in self.plan.kernels if not choice.weights}

    @cached_property
    def _linears(self) -> Mapping[str, LinearPlan]:
        """Plans of the linear layers of all stages; the ranks of a stage have the same plans."""
        if self.plan.mesh.parallel.pp == 1:
            return self.plan.linears
        return linear_plans(self.plan.args, self._listed, self.plan.kernels)

    @cached_property
    def _listed(self) -> tuple[Param, ...]:
        """The parameters of all stages: a tied head that lies on another stage than the embedding has its own."""
        holdings, args = self.holdings, self.plan.args
        if self._embeds or not args.tie_word_embeddings:
            return holdings.layout
        return holdings.layout[:1] + holdings.as_packed(holdings.params_of(replace(alone(args), first=False)))

    @property
    def _embeds(self) -> bool:
        """True if the stage with the head has the embedding, too: it is the only one, or its drafter reads that."""
        return self.plan.mesh.parallel.pp == 1 or self.plan.args.prediction.embeds

    def _features(self, at: str, name: str) -> tuple[str, ...]:
        """Features of the kernel of a linear layer; `name` is its name below the decoder layer `at`."""
        return self._linears[at + name].features

    def _experts(self, parameters: Iterable[str]) -> MoEPlan | None:
        """Plan of the experts that have these parameters; None where no kernel can run them, or without experts."""
        schemes = [self._schemes[name] for name in parameters if name in self._schemes]
        return self.plan.experts.of(schemes[0]) if schemes and self.plan.experts else None

    @cached_property
    def _schemes(self) -> dict[str, Scheme | None]:
        """Parameter of experts -> its scheme."""
        matrices = {one.name: one.scheme for one in self._listed if one.shard == "experts"}
        return {name: matrices[name.removesuffix("_bias")] for name in matrices}  # biases lie beside the matrices

    @property
    def load_device(self) -> str:
        """The device on which weights are loaded, converted and packed."""
        return "cpu" if self.plan.config.load.load_device == "cpu" else self.plan.machine.device

    def in_place(self, name: str) -> bool:
        """True where a parameter of experts is not packed: it is loaded in place, or no kernel can run it."""
        experts = self._experts([name])
        return experts is None or "in place" in experts.features and self.load_device == self.plan.machine.device

    def _qualified(self, function: str, parameters: Iterable[str]) -> str:
        """Return the full name of a function ("linear.run"), of the implementation planned for these parameters."""
        op, _, rest = function.partition(".")
        if op == "linear":
            modules = (name.rpartition(".")[0] for name in parameters)
            return f"quire.kernels.linear.{next(m for m in map(self._linears.get, modules) if m).layout}.{rest}"
        experts = self._experts(parameters) if op == "experts" else None
        name = experts.experts if experts else self._chosen[op].name if op in self._chosen else ""
        return f"quire.kernels.{op}.{name}.{rest}" if name else function

    def layers(self) -> Iterator[dict[str, Any]]:
        """Yield each layer, its weights and the calls of a step; see `describe`."""
        args, parallel = self.plan.args, self.plan.mesh.parallel
        args = replace(args, tie_word_embeddings=args.tie_word_embeddings and self._embeds)
        for layer, group in groupby(self._listed, key=lambda param: _layer(param.name)):
            at = f"layers.{layer}." if layer >= 0 else ""
            params = {param.name.removeprefix(at): param for param in group}
            first, linear = "embed.weight" in params, partial(self._features, at)
            sliced = parallel.tp > 1
            routing, divided = self.plan.config.load.routing, parallel.dcp > 1
            step = LayerStep(linear, routing, sliced, self.plan.spread, divided=divided)
            ends = embedding_calls(args, linear, sliced) if first else head_calls(args, sliced)
            calls = list(block_calls(args, layer, step) if layer >= 0 else ends)
            named = [
                call._asdict() | {"function": self._qualified(call.function, (at + p for p in call.parameters))}
                for call in calls
            ]
            run = {parameter: call["function"] for call in reversed(named) for parameter in call["parameters"]}
            pack = partial(self._pack, args, at, linear)
            weights = [self._weight(param, run.get(name, ""), pack(name)) for name, param in params.items()]
            yield {
                "layer": str(layer) if layer >= 0 else "embed" if first else "head",
                "kind": "drafts: " * (layer >= args.num_layers) + _kind(calls),
                "parameters": sum(w["parameters"] for w in weights),
                "bytes": sum(w["bytes"] for w in weights),
                "calls": named,
                "weights": weights,
            }

    def _pack(self, args: ModelArgs, at: str, linear: Features, name: str) -> str:
        """Return the function that packs a parameter; norms of transformers' layers have names of any kind."""
        module = (at + name).rpartition(".")[0]
        if args.foreign is not None and module not in self._linears:
            return ""
        return pack_function(args, name, linear, self.in_place(at + name))

    def _weight(self, param: Param, run: str, pack: str) -> dict[str, Any]:
        loader = "dummy.load_dummy" if self.plan.config.load.load_format == "dummy" else "load.load_weights"
        converted = param.stored is not None or param.scheme is not None
        steps = {
            "load": f"quire.weights.{loader}",
            "convert": "quire.kernels.pack.convert.convert" * converted,
            "pack": self._qualified(pack, [param.name]),
            "run": run,
        }
        experts, parts = fused(param)
        rule = scheme_words(param.scheme) if param.scheme else ""
        stored = list(tensor_names(param))
        return {
            "name": param.name,
            "shape": param.shape,
            "shard": self._cut(param),
            "parameters": prod(param.shape),
            "experts": experts if param.shard == "experts" else 0,
            "parts": [{"name": name, "shape": (rows, *param.shape[1:])} for name, rows in parts],
            "dtype": rule or param.dtype or self.plan.dtype.dtype,
            "bytes": self.holdings.num_bytes(param),
            **steps,
            "format": param.format,
            "stored_as": " and ".join(dict.fromkeys(map(scheme_words, param.each or filter(None, (param.stored,))))),
            "decided_by": decided_by(param, self.plan.quantization),
            "raw_bytes": self._raw_bytes(param, stored),
            "load_device": self.load_device,
            "device": self.plan.machine.device,
            "stored": {name: self.holdings.files.get(name) for name in stored},
        }

    def _raw_bytes(self, param: Param, names: Iterable[str]) -> int:
        """Return the bytes that are read for a parameter: in their stored types, as far as the headers are known.

        names   of its stored tensors: those of the first expert, then those of the others, which have the same shapes
        """
        item, headers, found = ITEM_BYTES[param.dtype or self.plan.dtype.dtype], self.holdings.headers, 0
        raws = FORMATS[param.format].tensors(first_expert(param))
        sizes = [(prod(part.local_shape), RAW_BYTES.get(raw.dtype, item)) for raw in raws for part in raw.parts]
        for name, (count, known) in zip(names, cycle(sizes), strict=False):
            stored = headers.get(name)
            whole = prod(stored.shape) if stored is not None else 0
            found += count * (stored.num_bytes // whole if stored is not None and whole else known)
        return found

    def _cut(self, param: Param) -> str:
        """Return the way in which ranks divide a parameter; "" where every rank has all of it.

        A parameter is divided by "rows" or "columns", by these of each expert, or by whole "experts".
        """
        if param.shard == "experts" and self.plan.mesh.parallel.experts:
            return "experts" if self.plan.mesh.parallel.expert_ranks > 1 else ""
        sliced = {"down": "columns of each expert", "down_bias": ""}  # other ranks do not have the bias
        cut = param.shard
        if cut == "experts":
            cut = sliced.get(param.name.rpartition(".")[2], "rows of each expert")
        return "" if self.plan.mesh.parallel.tp == 1 else cut

    @cached_property
    def cache_scales(self) -> list[tuple[str, str]]:
        """Names of the stored scales of keys and values that an 8-bit cache uses, by layer; []: all are 1, or none."""
        try:
            return scale_names(self.holdings.files, self.plan.args) if self.plan.cache.scaled else []
        except WeightsError:
            return []

    def _not_read(self) -> dict[str, int]:
        """Checkpoint tensors that no parameter reads -> their number; a layer behind the last one is one entry."""
        files, args = self.holdings.files, self.plan.args
        root, extra = args.prediction.root, range(args.draft_layers, args.extra_layers)
        layers = [root or f"model.layers.{args.num_layers + i}." for i in extra]
        found = {f"{layer}*": 0 for layer in layers}
        read = set(stored_names(self.holdings.layout) if files else ()).union(*self.cache_scales)
        for name in sorted(files.keys() - read):
            shown = next((f"{layer}*" for layer in layers if name.startswith(layer)), name)
            found[shown] = found.get(shown, 0) + 1
        return found


def _layer(name: str) -> int:
    """Return the number of the layer to which a parameter belongs; -1: none."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _kind(calls: Sequence[Call]) -> str:
    called = {call.function.partition(".")[0] for call in calls}
    kinds = {"attention": "grouped-query attention", "latent": "latent attention", "delta": "gated delta"}
    kinds |= {"shortconv": "short convolution", "mamba": "Mamba 2"}
    mixer = next((words for name, words in kinds.items() if name in called), "")
    if "latent.chosen" in {call.function for call in calls}:
        mixer = f"sparse latent attention with {'an indexer of its own' if 'index' in called else 'a shared indexer'}"
    if not mixer:
        return "embedding" if calls[0].function.endswith((".rows", ".embedding")) else "norm and head"
    return f"{mixer}, {'experts' if 'experts' in called else 'feed-forward'}"
