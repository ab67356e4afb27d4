"""Drawings of ranks: what each holds, and what an exchange moves."""

from typing import Any

from quire.entry.cli.table import format_bytes as size
from quire.explain.drawings.svg import LINE, MARGIN, Svg

Plan = dict[str, Any]
ACROSS = 8  # ranks of a row
MOST = 64  # ranks that are drawn


def draw_ranks(plan: Plan, cost: Plan) -> Svg:
    """Draw each rank with its stage, layers, heads, experts and bytes, and the members of the groups."""
    ranks = plan["ranks"]
    drawing, y = Svg(f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"), MARGIN + 2.0 * LINE
    for number, rank in enumerate(ranks[:MOST]):
        first, end = rank["layers"]
        experts = rank["expert_ids"]
        lines = [
            f"rank {rank['number']}",
            f"replica {rank['replica']}, stage {rank['stage']}, place {rank['place']}",
            f"layers {first}-{end - 1}",
            f"query {_heads(*rank['heads'])}, KV {_heads(*rank['kv_heads'])}",
        ]
        lines += [f"experts {experts[0]}-{experts[-1]} ({len(experts)})"] if experts else []
        lines += [f"weights {size(rank['bytes'])}, KV {size(rank['kv_bytes'])}"]
        column, row = number % ACROSS, number // ACROSS
        drawing.words(MARGIN + 248 * column, y + 124 * row, lines, "mixer" if rank["stage"] % 2 == 0 else "dense", 240)
    y += 124 * (-(-min(len(ranks), MOST) // ACROSS)) + LINE
    if len(ranks) > MOST:
        drawing.text(MARGIN, y, f"... and {len(ranks) - MOST} more ranks")
        y += LINE
    for group in plan["groups"]:
        members = "; ".join(", ".join(map(str, one)) for one in group["members"][:8])
        drawing.text(MARGIN, y, f"group {group['name']} ({group['purpose']}): {members}"[:220])
        y += LINE
    return drawing


def _heads(first: int, end: int) -> str:
    return f"heads {first}-{end - 1}" if end - first > 1 else f"head {first}"


def draw_exchanges(plan: Plan, cost: Plan) -> Svg | None:
    """Draw the exchanges of a step in order, and all-reduce beside all-gather; None: one rank sends nothing."""
    found = plan["collectives"]
    if not found:
        return None
    drawing, y = Svg("exchanges of a step, in order"), MARGIN + 2.0 * LINE
    for one in found:
        words = f"{one['kind']} over {one['group']}: {one['where']}"
        moved = f"{size(one['message_bytes'])} per {one['per']}, {one['times']} times; {one['algorithm']}"
        _, height = drawing.words(MARGIN, y, [words, moved + f"; {one['when']}" * bool(one["when"])], "send", 640)
        y += height + 6
    width = next((len(group["members"][0]) for group in plan["groups"] if len(group["members"][0]) > 1), 0)
    if width:
        y = _ways(drawing, y + LINE, min(width, 4))
    return drawing


def _ways(drawing: Svg, y: float, ranks: int) -> float:
    """Draw what ranks have before and after an all-reduce and an all-gather."""
    numbers = range(ranks)
    summed, parts = " + ".join(f"a{i}" for i in numbers), " | ".join(map(str, numbers))
    for name, before, after in (
        ("all-reduce: each has a partial sum of everything, then the whole sum", "a{0}", summed),
        ("all-gather: each has a part, then all parts", "part {0}", parts),
    ):
        drawing.text(MARGIN, y, name)
        for rank in range(ranks):
            left = MARGIN + 190 * rank
            drawing.words(left, y + 8, [f"rank {rank}: {before.format(rank)}"], "plain", 180)
            drawing.arrow(left + 90, y + 34, left + 90, y + 48)
            drawing.words(left, y + 48, [after], "cache", 180)
        y += 104
    return y
