"""Drawing of a rank's memory: weights, activations and graphs, KV cache, and what is free."""

from typing import Any

from quire.entry.cli.table import format_bytes as size
from quire.explain.drawings.svg import LINE, MARGIN, Svg

Plan = dict[str, Any]
WIDE = 720


def draw_memory(plan: Plan, cost: Plan) -> Svg:
    """Draw the memory of the rank with the least room to scale, and a block of the KV cache."""
    memory = plan["memory"]
    drawing, y = Svg(f"memory of rank {memory['rank']}"), MARGIN + 2.0 * LINE
    parts = [("weights", memory["weights"], "dense"), ("buffers of exchanges", memory["buffers"], "send")]
    parts += [("KV cache", memory.get("kv_bytes") or 0, "cache")]
    whole = sum(number for _, number, _ in parts) or 1
    x = float(MARGIN)
    for name, number, kind in parts:
        if number:
            width = max(2.0, WIDE * number / whole)
            drawing.box(x, y, width, 40, kind, f"{name}: {size(number)}")
            x += width
    y += 40 + LINE
    for name, number, kind in parts:
        if number:
            drawing.box(MARGIN, y - 10, 10, 10, kind)
            drawing.text(MARGIN + 18, y, f"{name}: {size(number)}, {number / whole:.1%}")
            y += LINE
    if memory.get("budget"):
        drawing.text(MARGIN, y, memory["budget"], "small")
        y += LINE
    if memory.get("num_blocks"):
        y = _block(drawing, y + LINE, memory)
    return drawing


def _block(drawing: Svg, y: float, memory: Plan) -> float:
    """Draw how a page of the KV cache is made up of blocks of tokens in layers."""
    drawing.text(
        MARGIN,
        y,
        f"{memory['num_blocks']:,} pages = {memory['num_tokens']:,} tokens; a page has a block of "
        f"{memory['block_size']} tokens in each of {memory['page_layers']} layers, {size(memory['page_bytes'])}",
    )
    shown = min(memory["page_layers"], 8)
    for layer in range(shown):
        drawing.box(MARGIN + 90 * layer, y + 10, 84, 30, "cache", f"{size(memory['block_bytes'])} of keys and values")
        drawing.text(MARGIN + 90 * layer + 6, y + 29, f"layer {layer}", "small")
    if shown < memory["page_layers"]:
        drawing.text(MARGIN + 90 * shown + 6, y + 29, f"... layer {memory['page_layers'] - 1}", "small")
    return y + 50
