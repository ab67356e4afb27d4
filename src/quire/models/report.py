"""An engine's plan as plain values: layers, bytes, kernel calls in order, and reasons. No torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from quire.config.bundled import NAME
from quire.config.placement import Rank, collectives, ranks
from quire.config.pooling import read_pooling
from quire.config.quantized import format_words, is_kept, missing_format
from quire.config.resolve import MemoryPlan
from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, fused
from quire.kernels.linear.plan import LinearPlan
from quire.kernels.select import Choice
from quire.models.calls import FUSED, Call, embedding_calls, head_calls, layer_calls, pack_function
from quire.models.facts import model_facts
from quire.models.layout import layout
from quire.models.plan import EnginePlan, keep_stored
from quire.models.registry import ITEM_BYTES, linear_plans, rank_geometry
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint, stored_in

_READ = {"config": "config.json, device, number type", "tokenizer": "tokenizer and chat template"}
PHASES = {
    "cpu": _READ | {"weights": "every file once, tensors to their rows, packed for the kernels",
                    "engine": "KV cache, worker, scheduler"},
    "cuda": _READ | {"device": "CUDA context, size of weights and batch",
                     "weights": "files streamed to the device, packed for the kernels",
                     "kernels": "every kernel compiled or found in the cache, the largest step run once and measured",
                     "graphs": "KV cache in what is left, CUDA graphs of steps", "engine": "scheduler"},
}  # fmt: skip
DUMMY, EAGER = {"weights": "random numbers, packed for the kernels"}, {"graphs": "KV cache in what is left"}
WHOLE = ("embed.weight", "head.weight", "norm.weight", ".router.weight", ".shared_gate.weight")  # never quantized
SCALE_BYTES = 4  # of a block of FP8
NEVER = 1 << 30  # query rows: a number for JSON
MISSING = "not implemented yet"


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan as plain values for people: `quire explain`, `/debug/plan`, the banner.

    plan     of any rank: the parameters of all ranks follow from its mesh
    memory   of the rank with the least room, number `fullest`, or the reason why nothing fits there
    load_error   error that the loader would raise for the weights; "" where there is none
    headers  of the weights, where they are not in the folder
    """

    plan: EnginePlan
    memory: MemoryPlan | str
    fullest: int = 0
    load_error: str = ""
    headers: Checkpoint | None = None

    def describe(self) -> dict[str, Any]:
        """Return the report as plain values; reads the headers of the weights, where there are any."""
        args, plan, config = self.plan.args, self.plan.experts, self.plan.config
        sent = collectives(args, self.plan.mesh.parallel, ITEM_BYTES[self.plan.dtype.dtype],
                           plan.dispatcher if plan else "")  # fmt: skip
        phases = PHASES[self.plan.machine.device] | (DUMMY if config.load.load_format == "dummy" else {})
        phases |= EAGER if self.plan.machine.device == "cuda" and config.device.enforce_eager else {}
        words, lacking = format_words(self.plan.quantization), self._lacking and f": {MISSING}"
        return {
            "missing": [one._asdict() for one in self.plan.missing],
            "load_error": self.load_error,
            "model": {
                "name": config.model.model or NAME, "type": args.model_type, "architecture": args.architecture,
                "parameters": sum(prod(param.shape) for param in self.layout),
                "bytes": _total(map(self.num_bytes, self.layout)), "dtype": self.plan.dtype.dtype,
                "dtype_reason": self.plan.dtype.reason, "notes": args.notes,
                "format": f"{words}{lacking}" or "unquantized", **model_facts(args),
                "embedding": str(read_pooling(self._folder, config.model.pooler_config)),
            },
            "machine": self.plan.machine.words,
            "kernels": [asdict(choice) for choice in self.plan.kernels],
            "latent": args.latent and asdict(args.latent) | {"break_even": min(args.latent.break_even, NEVER)},
            "moe": {phase: one if isinstance(one, str) else asdict(one) for phase, one in self.plan.moe.items()},
            "layers": list(self._layers()),
            "not_read": self._not_read(),
            "memory": self._memory(),
            "ranks": [asdict(rank) | {"device": self.plan.machine.device, "bytes": held} for rank, held in self.held],
            "collectives": [asdict(one) for one in sent],
            "phases": phases,
        }  # fmt: skip

    @cached_property
    def layout(self) -> tuple[Param, ...]:
        """The parameters of the whole model, not of a rank."""
        return self._layout()

    def _layout(self, rank: Rank | None = None) -> tuple[Param, ...]:
        plan = self.plan
        return keep_stored(layout(plan.args, rank), plan.dtype, plan.kernels, plan.moe)

    @cached_property
    def held(self) -> list[tuple[Rank, int | None]]:
        """Every rank and the bytes of its parameters; None: not known."""
        every = list(ranks(self.plan.args, self.plan.mesh.parallel))
        held = {kind: _total(map(self.num_bytes, self._layout(rank)))
                for kind, rank in {rank.kind: rank for rank in every}.items()}  # fmt: skip
        return [(rank, held[rank.kind]) for rank in every]

    def page(self, rank: Rank) -> KVGeometry:
        """Return the page of a rank's KV cache."""
        return rank_geometry(self.plan.args, rank, dtype=self.plan.dtype.dtype, device=self.plan.machine.device,
                             block_size=self.plan.geometry.block_size)  # fmt: skip

    def num_bytes(self, param: Param) -> int | None:
        """Return the bytes of a parameter of the model or of a rank, with scales; None where they are not known.

        For a quantization other than blocks of FP8, the headers tell the bytes, and a rank has its share of them.
        """
        item, width = ITEM_BYTES[param.dtype or self.plan.dtype.dtype], prod(param.shape[1:])
        if not self._is_quantized(param):
            return prod(param.shape) * item
        if self._block:
            return sum(part.rows * width * item if part.stored in self._plain else self._fp8_bytes(part.rows, width)
                       for part in param.parts)  # fmt: skip
        whole = sum(prod(part.shape) for part in param.parts)
        stored = _total(self._tensors(param).values())
        return stored and -(-stored * prod(param.shape) // whole)

    def _fp8_bytes(self, rows: int, width: int) -> int:
        high, wide = self._block
        return rows * width + SCALE_BYTES * -(-rows // high) * -(-width // wide)

    @property
    def _folder(self) -> Path:
        return Path(self.plan.folder)

    # --- layers and their weights ---------------------------------------------------------------------------------

    @cached_property
    def _block(self) -> tuple[int, ...]:
        """Rows and columns that share a scale; () where weights are not stored in blocks of FP8."""
        blocks = self.plan.quantization.get("quant_method") == "fp8"
        return tuple(blocks and self.plan.quantization.get("weight_block_size") or ())

    @cached_property
    def _plain(self) -> frozenset[str]:
        """Tensors that a checkpoint in blocks of FP8 stores without scales, by its files or else by its config."""
        kept = frozenset(self.plan.quantization.get("modules_to_not_convert") or ()) if self._block else frozenset()
        names = (part.stored for param in self.layout if self._block for part in param.parts)
        return frozenset(name for name in names if (
            f"{name}_scale_inv" not in self._stored if name in self._stored else is_kept(name, kept)))

    @cached_property
    def _lacking(self) -> str:
        """The missing kernel in words, where the weights have a format that cannot be run yet; else ""."""
        return missing_format(self.plan.quantization) and f"no {self.plan.quantization['quant_method']} kernel yet"

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """Stored tensor -> its file; {} where the files cannot be read (`load_error` tells why)."""
        if self.headers is not None:
            return {name: tensor.file.name for name, tensor in self.headers.tensors.items()}
        try:
            return {} if self.plan.config.load.load_format == "dummy" else stored_in(self._folder)
        except WeightsError:
            return {}

    @cached_property
    def _known(self) -> Mapping[str, StoredTensor]:
        """Stored tensor -> its header; {} without files, or where they cannot be read."""
        if self.headers is not None:
            return self.headers.tensors
        try:
            return read_checkpoint(self._folder).tensors if any(self._folder.glob("*.safetensors")) else {}
        except WeightsError:
            return {}

    @cached_property
    def _beside(self) -> Mapping[str, Mapping[str, int | None]]:
        """Quantized tensors by their names up to the last dot -> name -> bytes; None without headers."""
        known = self._known
        whole = {part.stored for param in self.layout if not self._is_quantized(param) for part in param.parts}
        names = sorted(self._stored.keys() - whole, key=lambda name: name.rpartition("."))
        stems = groupby(names, key=lambda name: name.rpartition(".")[0])
        return {stem: {name: known[name].num_bytes if known else None for name in some} for stem, some in stems}

    def _is_quantized(self, param: Param) -> bool:
        if not self.plan.quantization or len(param.shape) < 2 or param.name.endswith(WHOLE):
            return False
        return not self._plain or any(part.stored not in self._plain for part in param.parts)

    def _tensors(self, param: Param) -> Mapping[str, int | None]:
        """Return checkpoint tensors of a parameter ("....*" for unknown names) -> bytes, where headers tell them."""
        names = [part.stored for part in param.parts]
        if not self._is_quantized(param):
            return dict.fromkeys(names)
        if self._block:
            return dict.fromkeys(name + end for name in names for end in ("", "_scale_inv")
                                 if not end or name not in self._plain)
        stems = [name.rpartition(".")[0] for name in names]
        return {name: size for stem in stems for name, size in self._beside.get(stem, {f"{stem}.*": None}).items()}

    @cached_property
    def _chosen(self) -> dict[str, Choice]:
        return {choice.op: choice for choice in self.plan.kernels}

    @cached_property
    def _names(self) -> dict[str, str]:
        """Operation -> name of its implementation, without experts that no kernel can run."""
        experts = {"experts": self.plan.experts.experts} if self.plan.experts else {}
        return {op: choice.name for op, choice in self._chosen.items()} | experts

    @cached_property
    def _linears(self) -> Mapping[str, LinearPlan]:
        """Plans of the linear layers of all stages; the ranks of a stage have the same plans."""
        if self.plan.mesh.parallel.pp == 1:
            return self.plan.linears
        return linear_plans(self.plan.args, self.layout, self.plan.kernels)

    @cached_property
    def _in_place(self) -> bool:
        """True where experts are not packed: they are loaded in place, or no kernel can run them."""
        elsewhere = self.plan.config.load.load_device == "cpu" != self.plan.machine.device
        return self.plan.experts is None or "in place" in self.plan.experts.features and not elsewhere

    def _qualified(self, function: str, parameters: Iterable[str]) -> str:
        """Return the full name of a function ("linear.run"), of the implementation planned for these parameters."""
        op, _, rest = function.partition(".")
        if op == "linear":
            modules = (name.rpartition(".")[0] for name in parameters)
            return f"quire.kernels.linear.{next(m for m in map(self._linears.get, modules) if m).layout}.{rest}"
        name = self._names.get(op)
        return f"quire.kernels.{op}.{name}.{rest}" if name else function

    def _layers(self) -> Iterator[dict[str, Any]]:
        args = self.plan.args
        for layer, group in groupby(self.layout, key=lambda param: _layer(param.name)):
            params = {param.name.removeprefix(f"layers.{layer}."): param for param in group}
            first, quantized = "embed.weight" in params, frozenset(filter(lambda n: self._lacks(params[n]), params))
            linear = frozenset(self._chosen["linear"].features) - (FUSED if quantized else frozenset())
            calls = list(layer_calls(args, layer, linear, self.plan.config.load.routing) if layer >= 0 else
                         embedding_calls(args, linear) if first else head_calls(args))  # fmt: skip
            at = f"layers.{layer}." if layer >= 0 else ""
            named = [self._call(call, quantized, at) for call in calls]
            run = {parameter: call["function"] for call in reversed(named) for parameter in call["parameters"]}
            weights = [self._weight(param, run.get(name, ""), linear) for name, param in params.items()]
            yield {
                "layer": str(layer) if layer >= 0 else "embed" if first else "head", "kind": _kind(calls),
                "parameters": sum(w["parameters"] for w in weights), "bytes": _total(w["bytes"] for w in weights),
                "calls": named,
                "weights": weights,
            }  # fmt: skip

    def _call(self, call: Call, quantized: frozenset[str], at: str) -> dict[str, Any]:
        """Return a call as plain values. A call with a parameter among the `quantized` has no implementation yet."""
        missing = self._lacking if quantized & set(call.parameters) else ""
        function = call.function if missing else self._qualified(call.function, (at + p for p in call.parameters))
        return call._asdict() | {"function": function, "missing": missing}

    def _lacks(self, param: Param) -> bool:
        """True for a parameter of a format that no kernel runs yet."""
        return bool(self._lacking) and self._is_quantized(param)

    def _weight(self, param: Param, run: str, linear: Collection[str]) -> dict[str, Any]:
        loader = "dummy.load_dummy" if self.plan.config.load.load_format == "dummy" else "load.load_weights"
        pack = pack_function(self.plan.args, param.name, linear, self._in_place)
        steps = {"load": f"quire.weights.{loader}", "pack": self._qualified(pack, [param.name]), "run": run}
        quantized = self._is_quantized(param)
        method = "float8_e4m3" if self._block else self.plan.quantization.get("quant_method", "")
        experts, parts = fused(param)
        return {
            "name": param.name, "shape": param.shape, "shard": self._cut(param),
            "parameters": prod(param.shape), "experts": experts if param.shard == "experts" else 0,
            "parts": [{"name": name, "shape": (rows, *param.shape[1:])} for name, rows in parts],
            "dtype": method if quantized else param.dtype or self.plan.dtype.dtype, "bytes": self.num_bytes(param),
            **(dict.fromkeys(steps, MISSING) if self._lacks(param) else steps),
            "stored": {name: self._stored.get(name) for name in self._tensors(param)},
        }  # fmt: skip

    def _cut(self, param: Param) -> str:
        """Return the way in which ranks divide a parameter; "" where every rank has all of it.

        A parameter is divided by "rows" or "columns", by these of each expert, or by whole "experts".
        """
        if param.shard == "experts" and self.plan.mesh.parallel.experts:
            return "experts" if self.plan.mesh.parallel.expert_ranks > 1 else ""
        sliced = "columns of each expert" if param.name.endswith(".down") else "rows of each expert"
        return "" if self.plan.mesh.parallel.tp == 1 else sliced if param.shard == "experts" else param.shard

    def _not_read(self) -> dict[str, int]:
        """Checkpoint tensors that no parameter reads -> their number; a layer behind the last one is one entry."""
        read = {name for param in self.layout for name in self._tensors(param)}
        layers = [f"model.layers.{self.plan.args.num_layers + i}." for i in range(self.plan.args.extra_layers)]
        found = {f"{layer}*": 0 for layer in layers}
        for name in sorted(self._stored.keys() - read):
            shown = next((f"{layer}*" for layer in layers if name.startswith(layer)), name)
            found[shown] = found.get(shown, 0) + 1
        return found

    def _memory(self) -> dict[str, Any]:
        plan, (rank, weights) = self.memory, self.held[self.fullest]
        cache = self.page(rank) if isinstance(plan, str) else plan.geometry
        page, size, group = cache.page_bytes, cache.block_size, cache.groups[0]
        known = {
            "rank": self.fullest, "weights": weights, "kv_bytes_per_token": page / size, "block_size": size,
            "block_bytes": page // len(group.layers), "page_bytes": page, "page_layers": len(group.layers),
            "components": [[c.name, c.num_heads, c.head_dim, c.dtype] for c in group.components],
        }  # fmt: skip
        return known | ({"refused": plan} if isinstance(plan, str) else {
            "num_blocks": plan.num_blocks, "kv_bytes": plan.kv_bytes, "num_tokens": plan.num_tokens,
            "max_model_len": plan.max_model_len, "notes": plan.notes,
            "sequences": self.plan.config.scheduler.sequences(),
            "full_sequences": round(plan.num_tokens / plan.max_model_len, 2), "budget": str(plan.budget or ""),
        })  # fmt: skip


def _total(sizes: Iterable[int | None]) -> int | None:
    """The sum; None where a size is not known."""
    every = list(sizes)
    return None if None in every else sum(size or 0 for size in every)


def _layer(name: str) -> int:
    """Return the number of the layer to which a parameter belongs; -1: none."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _kind(calls: Iterable[Call]) -> str:
    called = {call.function.partition(".")[0] for call in calls}
    if not called & {"attention", "latent"}:
        return "norm and head" if "norm" in called else "embedding"
    attention = "latent" if "latent" in called else "grouped-query"
    return f"{attention} attention, {'experts' if 'experts' in called else 'feed-forward'}"
