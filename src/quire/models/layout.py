"""The parameters of a model, with their places in its checkpoint, computed from the config alone. No torch.

The loader fills parameters by it, `quire explain` prints it, and a test holds it equal to the layers that are built.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from quire.config.checkpoint import ModelArgs
from quire.layers.params import Param, Part


@dataclass(frozen=True)
class _Shape:
    """A parameter without checkpoint names: `parts` are the rows of each part, `width` is 0 for a vector."""

    name: str
    parts: dict[str, int]
    width: int
    shard: str = ""
    dtype: str = ""


def layout(args: ModelArgs, experts: Sequence[int] | None = None) -> tuple[Param, ...]:
    """Every parameter in the order of the layers; of the experts only those numbered `experts` (None: all)."""
    rows = importlib.import_module(f"quire.models.{args.model_type}").NAME_MAP
    names = {(parameter, part): stored for stored, parameter, part in rows}
    owned = range(args.moe.routing.num_experts) if args.moe and experts is None else experts or ()
    found = [_param(shape, "", names) for shape in _ends(args)]
    body = [_param(shape, str(i), names) for i in range(args.num_layers) for shape in _block(args, i, owned)]
    return (found[0], *body, *found[1:])


def stored_names(params: Iterable[Param]) -> Iterator[str]:
    """The checkpoint tensors that these parameters are made of."""
    return (part.stored for param in params for part in param.parts)


def parameters_per_token(args: ModelArgs) -> float:
    """How many parameters a token is multiplied with: of the experts, those that it is sent to."""
    chosen = args.moe.routing.top_k / args.moe.routing.num_experts if args.moe else 1.0
    return sum(prod(param.shape) * (chosen if param.shard == "experts" else 1.0) for param in layout(args))


def _param(shape: _Shape, layer: str, names: dict[tuple[str, str], str]) -> Param:
    parts = []
    for part, rows in shape.parts.items():
        expert, dot, rest = part.rpartition(".")
        stored = names[shape.name, "{e}." + rest if dot else part]
        parts.append(Part(stored.replace("{i}", layer).replace("{e}", expert), rows, part))
    size = sum(shape.parts.values())
    return Param(shape.name.replace("{i}", layer), (size, shape.width) if shape.width else (size,), tuple(parts),
                 shape.dtype, shape.shard)


def _ends(args: ModelArgs) -> Iterator[_Shape]:
    yield _Shape("embed.weight", {"": args.vocab_size}, args.hidden_size, "rows")
    yield _Shape("norm.weight", {"": args.hidden_size}, 0)
    if not args.tie_word_embeddings:
        yield _Shape("head.weight", {"": args.vocab_size}, args.hidden_size, "rows")


def _block(args: ModelArgs, layer: int, experts: Sequence[int]) -> Iterator[_Shape]:
    at, hidden = "layers.{i}.", args.hidden_size
    yield _Shape(at + "attention_norm.weight", {"": hidden}, 0)
    yield from _latent(args, at + "attention.") if args.latent else _attention(args, at + "attention.")
    yield _Shape(at + "mlp_norm.weight", {"": hidden}, 0)
    if args.moe is not None and layer in args.moe.layers:
        yield from _experts(args, at + "mlp.", experts)
    else:
        yield from _mlp(at + "mlp.", hidden, args.intermediate_size, args.mlp_bias)


def _attention(args: ModelArgs, at: str) -> Iterator[_Shape]:
    q, kv = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    parts = {"q": q, "k": kv, "v": kv}
    yield _Shape(at + "qkv.weight", parts, args.hidden_size, "rows")
    if args.attention_bias:
        yield _Shape(at + "qkv.bias", parts, 0, "rows")
    yield _Shape(at + "output.weight", {"": args.hidden_size}, q, "columns")
    if args.output_bias:
        yield _Shape(at + "output.bias", {"": args.hidden_size}, 0)
    if args.qk_norm:
        yield _Shape(at + "q_norm.weight", {"": args.head_dim}, 0)
        yield _Shape(at + "k_norm.weight", {"": args.head_dim}, 0)


def _latent(args: ModelArgs, at: str) -> Iterator[_Shape]:
    sizes, heads, hidden = args.latent, args.num_heads, args.hidden_size
    assert sizes is not None
    if sizes.q_rank:
        yield _Shape(at + "q_down.weight", {"": sizes.q_rank}, hidden)
        yield _Shape(at + "q_norm.weight", {"": sizes.q_rank}, 0)
    yield _Shape(at + "q.weight", {"up" if sizes.q_rank else "": heads * args.head_dim}, sizes.q_rank or hidden, "rows")
    yield _Shape(at + "kv_down.weight", {"": sizes.kv_rank + sizes.rope_dim}, hidden)
    yield _Shape(at + "kv_norm.weight", {"": sizes.kv_rank}, 0)
    yield _Shape(at + "kv_up.weight", {"": heads * (sizes.nope_dim + sizes.v_dim)}, sizes.kv_rank, "rows")
    yield _Shape(at + "output.weight", {"": hidden}, heads * sizes.v_dim, "columns")


def _mlp(at: str, hidden: int, width: int, bias: bool = False) -> Iterator[_Shape]:
    yield _Shape(at + "gate_up.weight", {"gate": width, "up": width}, hidden, "rows")
    if bias:
        yield _Shape(at + "gate_up.bias", {"gate": width, "up": width}, 0, "rows")
    yield _Shape(at + "down.weight", {"": hidden}, width, "columns")
    if bias:
        yield _Shape(at + "down.bias", {"": hidden}, 0)


def _experts(args: ModelArgs, at: str, experts: Sequence[int]) -> Iterator[_Shape]:
    moe, hidden = args.moe, args.hidden_size
    assert moe is not None
    yield _Shape(at + "router.weight", {"": moe.routing.num_experts}, hidden)
    if moe.routing.bias:
        yield _Shape(at + "router.bias", {"": moe.routing.num_experts}, 0, dtype="float32")
    halves = {f"{expert}.{half}": moe.expert_size for expert in experts for half in ("gate", "up")}
    yield _Shape(at + "experts.gate_up", halves, hidden, "experts")
    yield _Shape(at + "experts.down", {f"{expert}.": hidden for expert in experts}, moe.expert_size, "experts")
    if moe.shared_size:
        yield from _mlp(at + "shared.", hidden, moe.shared_size)
    if moe.shared_gate:
        yield _Shape(at + "shared_gate.weight", {"": 1}, hidden)
