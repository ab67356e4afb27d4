"""Drawings of a model: its layers with the calls of a step, attention with its heads or latents, a layer of experts."""

from collections.abc import Mapping
from typing import Any

from quire.entry.cli.table import format_bytes as size
from quire.explain.drawings.svg import LINE, MARGIN, Svg
from quire.explain.render import folded_layers

Plan = dict[str, Any]
WIDE = 680
MOST_HEADS = 16  # heads that are drawn one by one


def draw_model(plan: Plan, cost: Plan) -> Svg:
    """Draw the layers from the tokens to the logits, those that are alike once, with calls and their weights."""
    drawing, y = Svg(f"{plan['model']['name']}: {plan['model']['parameters']:,} parameters"), MARGIN + 2.0 * LINE
    middle = MARGIN + WIDE / 2
    drawing.words(MARGIN, y, ["token ids [T]"], "plain", WIDE)
    y += LINE + 10
    for name, alike in folded_layers(plan["layers"]):
        drawing.arrow(middle, y, middle, y + 14)
        y += 14
        y = _layer(drawing, y, name, alike[0])
    drawing.arrow(middle, y, middle, y + 14)
    drawing.words(MARGIN, y + 14, ["logits [rows, V]"], "plain", WIDE)
    return drawing


def _layer(drawing: Svg, y: float, name: str, layer: Mapping[str, Any]) -> float:
    """Draw a layer and return where it ends."""
    begin, shapes = y, {one["name"].split(".", 2)[-1]: one for one in layer["weights"]}
    drawing.text(MARGIN + 8, y + LINE, f"{name}: {layer['kind']}, {size(layer['bytes'])}")
    y += LINE + 8
    for call in layer["calls"]:
        function = call["function"].removeprefix("quire.kernels.")
        lines = [function + f"  ({call['when']})" * bool(call["when"])]
        for parameter in call["parameters"]:
            weight = shapes.get(parameter) or next(
                (one for one in layer["weights"] if one["name"].endswith(parameter)), None
            )
            if weight is not None:
                lines.append(f"{parameter}  {'x'.join(map(str, weight['shape']))} {weight['dtype']}"[:88])
        _, height = drawing.words(MARGIN + 8, y, lines, _tone(function), WIDE - 16)
        y += height + 4
    drawing.box(MARGIN, begin, WIDE, y - begin + 4, "frame")
    return y + 4


def _tone(function: str) -> str:
    room = function.partition(".")[0]
    if room in ("attention", "latent", "heads", "delta", "mamba", "shortconv", "index"):
        return "mixer"
    if room in ("experts", "routing"):
        return "experts"
    return "send" if room in ("tp", "dcp", "ep", "pp") else "dense" if room == "linear" else "plain"


def draw_attention(plan: Plan, cost: Plan) -> Svg:
    """Draw which query heads share a KV head, or how latents are kept and used; windows of layers; bytes of a token."""
    facts, latent = plan["model"]["attention"], cost["latent"]
    drawing, y = Svg(f"attention: {facts['kind']}"), MARGIN + 2.0 * LINE
    if latent is not None:
        kept, made = size(latent["absorbed"]), size(latent["naive"])
        times = latent["naive"] / latent["absorbed"]
        absorbed = "absorbed (decodes): queries go into the latent's space, and the cache is read as it is"
        naive = "naive or expanded (prompts): keys and values of each head are made of the latents"
        for lines, kind in (
            (["hidden state of a token", "one compression for all heads"], "plain"),
            ([f"latent and rotated key: {kept} of a token and layer", "what the KV cache keeps"], "cache"),
            ([absorbed, f"reads {kept} of a token for all {facts['heads']} heads"], "mixer"),
            ([naive, f"{made} of a token, {times:.1f} times as much"], "mixer"),
        ):
            _, height = drawing.words(MARGIN, y, lines, kind, WIDE)
            y += height + 12
        return drawing
    each = facts["heads"] // facts["kv_heads"]
    shown = min(facts["kv_heads"], max(1, MOST_HEADS // each))
    for group in range(shown):
        names = [f"q{each * group + i}" for i in range(min(each, MOST_HEADS))]
        for i, name in enumerate(names):
            drawing.words(MARGIN + 56 * i, y, [name], "mixer", 48)
        width = 56 * len(names) - 8
        drawing.words(
            MARGIN, y + 34, [f"k{group} and v{group}, {facts['head_dim']} numbers each"], "cache", max(width, 240)
        )
        y += 78
    if shown < facts["kv_heads"]:
        drawing.text(MARGIN, y, f"... and {facts['kv_heads'] - shown} KV heads more, each with {each} query heads")
        y += LINE
    token = plan["memory"]["kv_bytes_per_token"]
    drawing.text(
        MARGIN, y + 4, f"{each} query heads share a KV head; a token takes {size(token)} in all layers of a rank"
    )
    for count, window in facts["windows"]:
        y += LINE
        drawing.text(MARGIN, y + 4, f"{count} layers see the last {abs(window):,} tokens; {facts['full']} layers all")
    return drawing


def draw_experts(plan: Plan, cost: Plan) -> Svg | None:
    """Draw a layer of experts: router, dispatch, experts, combine; None: the model has none."""
    router, moe = plan["model"]["router"], plan["moe"].get("decode")
    if router is None:
        return None
    drawing = Svg(f"a layer of experts: {router['top_k']} of {router['num_experts']} for each token")
    y, ways = MARGIN + 2.0 * LINE, moe if isinstance(moe, dict) else {"dispatcher": "none", "experts": str(moe)}
    hits = dict(map(tuple, cost["experts"]))
    most = max(hits)
    scores = f"router: scores of {router['num_experts']} experts, {router['scoring']}"
    hit = f"1 token hits {hits.get(1, 0):.1f} of them, {most} tokens {hits[most]:.1f}"
    for lines, kind in (
        ([scores, f"the best {router['top_k']} stay"], "plain"),
        ([f"dispatch: {ways['dispatcher']}", "a token's hidden state goes to the ranks that have its experts"], "send"),
        ([f"experts, kernel {ways['experts']}: gate and up, activation, down", hit], "experts"),
        (["combine: results times the router's weights, summed for each token"], "send"),
    ):
        _, height = drawing.words(MARGIN, y, lines, kind, WIDE)
        drawing.arrow(MARGIN + WIDE / 2, y + height, MARGIN + WIDE / 2, y + height + 12)
        y += height + 12
    drawing.words(MARGIN, y, ["residual stream"], "plain", WIDE)
    return drawing
