"""Drawing of a step's forecast: a bar for the kernels of each kind, one for the gaps between them."""

from typing import Any

from quire.explain.drawings.svg import LINE, MARGIN, Svg

Plan = dict[str, Any]
WIDE = 560


def draw_step(plan: Plan, cost: Plan) -> Svg | None:
    """Draw where the time of a decode step and of a prompt step goes; None: the device's rates are not known."""
    if cost["rates"] is None:
        return None
    drawing = Svg("forecast of steps: time at the rates that kernels reach, the floor inside it")
    y = MARGIN + 2.0 * LINE
    for step in cost["steps"]:
        words = {"decode": "a decode step", "prompts": "a prompt step"}[step["kind"]]
        each = f"{step['requests']:,} x {step['rows']:,} tokens, context {step['context']:,}"
        drawing.text(MARGIN, y, f"{words}, {each}: {step['seconds'] * 1e3:.3f} ms, floor {step['floor'] * 1e3:.3f} ms")
        y += 8
        bars = [(f"{one['name']} ({one['bound']})", one["seconds"], one["floor"]) for one in step["kernels"]]
        bars += [(f"{step['launches']} gaps between kernels", step["gaps"], 0.0)]
        bars += [("exchanges", step["exchanges"], step["exchanges"])] * bool(step["exchanges"])
        longest = max(seconds for _, seconds, _ in bars)
        for name, seconds, floor in sorted(bars, key=lambda one: -one[1]):
            drawing.box(MARGIN + 300, y, max(1.0, WIDE * seconds / longest), 12, "mixer", f"{seconds * 1e6:,.1f} us")
            drawing.box(MARGIN + 300, y, max(0.5, WIDE * floor / longest), 12, "dense", f"floor {floor * 1e6:,.1f} us")
            drawing.text(MARGIN, y + 11, name)
            drawing.text(MARGIN + 306 + WIDE * seconds / longest, y + 11, f"{seconds * 1e6:,.1f} us", "small")
            y += LINE
        y += LINE
    return drawing
