"""The tour of a small DeepSeek: latent attention (MLA) and a mixture of experts (MoE)."""

from typing import Any

import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.args.latent import LatentArgs
from quire.contracts.params import Param
from quire.kernels.attention import as_list
from quire.plan.layout import layout
from quire.tour.live import Live, SeenCall, TourStop, Values, numbers, shape
from quire.tour.token import OPTIONS as OPTIONS

PROMPT = (
    "A mixture of experts has many feed-forward parts, and a token uses only a few of them, so that most of the "
    "weights rest in a step."
)
LAYER = 1  # the first with experts


def _sizes(live: Live) -> LatentArgs:
    sizes = live.llm.engine.args.layers[LAYER].mixer
    assert isinstance(sizes, LatentArgs)
    return sizes


def _routing(live: Live) -> Routing:
    moe = live.llm.engine.args.moe
    assert moe is not None
    return moe.routing


def _down(live: Live, call: SeenCall) -> Values:
    sizes = _sizes(live)
    heads = f"{sizes.num_heads}, each with {sizes.nope_dim} numbers of a key without position"
    parts = f"{sizes.q_rank} for queries, {sizes.kv_rank} of the latent, {sizes.rope_dim} of the rotated key"
    return [
        ("prompt", repr(live.prompt)),
        ("heads", f"{heads}, {sizes.rope_dim} that are rotated, {sizes.v_dim} of a value"),
        ("hidden states", shape(call.given["x"])),
        ("result", f"{shape(call.result)}: {parts}"),
        ("latent of the last token", numbers(call.result[-1, -sizes.kv_rank - sizes.rope_dim :])),
    ]


def _cached(live: Live, call: SeenCall) -> Values:
    cache, slots, sizes = call.given["cache"], call.given["kv_slots"].tolist(), _sizes(live)
    block, offset = divmod(slots[-1], cache.block_size)
    parts = sizes.nope_dim, sizes.rope_dim, sizes.v_dim
    heads, small, bytes_each = call.result.shape[1], sizes.kv_rank + sizes.rope_dim, cache.latent.element_size()
    whole = f"{heads} x ({' + '.join(map(str, parts))}) = {heads * sum(parts)}"
    layers = live.llm.engine.args.num_layers
    return [
        ("slots in the cache", f"{slots[0]} to {slots[-1]}; the last is block {block}, place {offset}"),
        ("latent of the last token", numbers(cache.latent[block, 0, offset])),
        ("rotated key of the last token", numbers(cache.rope[block, 0, offset])),
        ("bytes of a token", f"{small * bytes_each} a layer, {layers * small * bytes_each} in all {layers} layers"),
        ("numbers of a token", f"{small}; keys and values of {heads} heads would be {whole}"),
    ]


def _split(live: Live, call: SeenCall) -> Values:
    few, naive = call.result
    return [
        ("rows of sequences in the step", str([last - first for first, last, *_ in naive] or [few.max_query_len])),
        ("absorbed up to", f"{int(call.given['most'])} rows"),
        ("way", "naive" if naive else "absorbed"),
    ]


def _expanded(live: Live, call: SeenCall) -> Values:
    heads, width, rank = call.given["kv_up"].shape
    tokens = as_list(call.given["meta"].seq_lens)[0]
    return [
        ("queries", shape(call.given["q"])),
        ("up-projection", f"{heads} heads x {width} x {rank}"),
        ("keys and values made of latents", f"{tokens} tokens x {heads} heads x {width} = {tokens * heads * width:,}"),
        ("result of the last token, head 0", numbers(call.result[-1, 0])),
    ]


def _absorbed(live: Live, call: SeenCall) -> Values:
    q, rope, cache = call.given["q_latent"], call.given["q_rope"], call.given["cache"]
    length = as_list(call.given["meta"].seq_lens)[0]
    return [
        ("queries, multiplied with kv_up", f"{shape(q)} and {shape(rope)} that are rotated"),
        ("latents that are read", f"{length} x {cache.latent.shape[3] + cache.rope.shape[3]}, for all heads the same"),
        ("sums of latents, head 0", numbers(call.result[-1, 0])),
    ]


def _route(live: Live, call: SeenCall) -> Values:
    weights, ids = call.result
    routing, correction, logits = (call.given[name] for name in ("routing", "correction", "logits"))
    scores = logits[-1].float().softmax(0) if routing.scoring == "softmax" else logits[-1].float().sigmoid()
    groups = (scores + correction).unflatten(0, (routing.num_groups, -1)).topk(2, 1).values.sum(1)
    picked = list(zip(ids[-1].tolist(), weights[-1].tolist(), strict=True))
    chosen = ", ".join(f"expert {i} with {w:.2f}" for i, w in picked)
    shares = "; ".join(f"{scores[i]:.2f} / {scores[ids[-1].long()].sum():.2f} x {routing.scaling}" for i, _ in picked)
    kept = set(groups.topk(routing.top_groups).indices.tolist())
    width = routing.num_experts // routing.num_groups
    out = [i for i in range(routing.num_experts) if i // width not in kept]
    best = [max(out, key=lambda i: float((scores + correction)[i]))] if out else []
    left_out = [("best expert that its group leaves out", f"expert {i} with {scores[i]:.2f}") for i in best]
    return [
        ("scores of the last token", _two(scores)),
        ("correction of each expert", ", ".join(f"{one:.3f}" for one in correction.tolist())),
        ("sums of each group's best two", _two(groups)),
        *left_out,
        ("chosen", chosen),
        ("weights: score / sum x factor", shares),
    ]


def _two(row: Tensor) -> str:
    return ", ".join(f"{one:.2f}" for one in row.tolist())


def _experts(live: Live, call: SeenCall) -> Values:
    ids = call.given["ids"]
    routing = _routing(live)
    counts = torch.bincount(ids.flatten().long(), minlength=routing.num_experts).tolist()
    return [
        ("tokens x experts of each", shape(ids)),
        ("tokens of each expert", ", ".join(f"{number}: {count}" for number, count in enumerate(counts))),
        ("experts whose weights are read", f"{sum(map(bool, counts))} of {routing.num_experts}"),
    ]


def _sum(live: Live, call: SeenCall) -> Values:
    before, after = call.given["hidden"][-1], call.result[-1]
    return [
        ("hidden states", shape(call.result)),
        ("last token, before", numbers(before)),
        ("last token, after", numbers(after)),
        ("what experts added", numbers(after - before)),
        ("weights", _active(live)),
    ]


def _active(live: Live) -> str:
    """Return how many weights of the layer's experts a token is multiplied with."""
    args = live.llm.engine.args
    own = [one for one in layout(args) if one.name.startswith(f"layers.{LAYER}.mlp.experts.")]
    every = sum(map(_count, own))
    used = every * _routing(live).top_k // _routing(live).num_experts
    return f"{used:,} of {every:,} in the experts of this layer are used for a token"


def _count(param: Param) -> int:
    return param.shape[0] * param.shape[1]


STOPS = (
    TourStop(
        rf"layers\.{LAYER}\.attention\.down",
        0,
        ("branch.projections(", "q, latent = down["),
        _down,
        formula="quire.layers.latent:LatentAttention.forward",
        tie="inside",
        drawing="model",
    ),
    TourStop(
        r"latent\.\w+\.prepare",
        0,
        ("rms_norm(latent", "write_kv("),
        _cached,
        formula="quire.kernels.latent.ref:prepare",
        drawing="memory",
    ),
    TourStop(r"layers\.latent\.split", 0, ("dropwhile(", "return few, naive"), _split),
    TourStop(
        r"latent\.\w+\.expanded",
        0,
        ('torch.einsum("hpl,nl->hnp"',),
        _expanded,
        formula="quire.kernels.latent.ref:expanded",
    ),
    TourStop(
        r"latent\.\w+\.absorbed",
        1,
        ('torch.einsum("mhl,nl->hmn"', 'torch.einsum("mhr,nr->hmn"', 'torch.einsum("hmn,nl->mhl"'),
        _absorbed,
        formula="quire.kernels.latent.ref:absorbed",
        drawing="attention",
    ),
    TourStop(
        r"routing\.\w+\.route",
        0,
        ("logits.sigmoid()", "scores + correction", "_largest(chosen", "scores.gather("),
        _route,
        formula="quire.kernels.routing.ref:route",
    ),
    TourStop(
        rf"layers\.{LAYER}\.mlp\.experts",
        0,
        ("enumerate(_results(", "weights * (places == place)"),
        _experts,
        formula="quire.kernels.experts.ref:run_adapted",
        drawing="experts",
    ),
    TourStop(rf"layers\.{LAYER}\.mlp\.added", 0, ("hidden = self.shared.down.add(", "return self.experts("), _sum),
)


def facts(live: Live) -> dict[str, Any]:
    """Return the values that the texts name."""
    mixer, routing = _sizes(live), _routing(live)
    return {
        "heads": mixer.num_heads,
        "rank": mixer.kv_rank,
        "rope": mixer.rope_dim,
        "experts": routing.num_experts,
        "top_k": routing.top_k,
        "groups": routing.num_groups,
        "top_groups": routing.top_groups,
        "nope": mixer.nope_dim,
        "value": mixer.v_dim,
        "hidden": live.llm.engine.args.hidden_size,
        "scaling": routing.scaling,
        "bound": int(mixer.break_even),
        "prompt_tokens": len(live.output.prompt_token_ids or ()),
    }
