"""The floors of steps in a described plan for a terminal: each part with its bytes, its time and its share."""

from collections.abc import Mapping
from typing import Any

from rich.tree import Tree

from quire.entry.cli.table import format_bytes as size
from quire.explain.render_ranks import Plan, add
from quire.reports.step_time import BETWEEN


def add_floors(tree: Tree, plan: Plan) -> None:
    """Add the steps of a GPU part by part; nothing on a CPU."""
    floors, ranks = plan["floors"], len(plan["ranks"])
    if floors is None:
        return
    whose = f" of rank {floors['rank']}, the slowest" if ranks > 1 else ""
    if floors["rates"] is None:
        add(tree, "floors of a step: the rates of this GPU are not known; --device h200, h100 or a100 names one")
        return
    branch = add(tree, f"floors of a step{whose}: bytes over bandwidth, or operations over rate where they take longer")
    add(branch, _rates(floors["rates"]))
    for step in floors["steps"]:
        node = add(branch, f"{_title(step, floors['stages'])}: {_ms(step['seconds'])}{_speed(step)}")
        for part in step["parts"]:
            add(node, _part(part, step))
        if any(part["name"] == BETWEEN for part in step["parts"]):
            add(node, "no network between hosts was measured: the time above lacks these exchanges")


def _rates(rates: Mapping[str, Any]) -> str:
    narrow = "".join(f", {rate / 1e12:,.0f} in {values}" for values, rate in rates["narrow"].items())
    link, small = f"{rates['link'] / 1e9:.0f} GB/s", f"{rates['exchange'] * 1e6:.1f} us"
    return (
        f"rates of an {rates['name']} ({rates['source']}): {rates['memory'] / 1e12:.2f} TB/s of memory, "
        f"{rates['products'] / 1e12:,.0f} TFLOP/s of two-byte products{narrow}; {link} from other GPUs of a host, "
        f"{rates['host'] / 1e9:.1f} GB/s from host memory, {small} for an exchange of few bytes"
    )


def _title(step: Plan, stages: int) -> str:
    count, context = step["requests"], f"context {step['context']:,}"
    stage = f" of one of {stages} stages" * (stages > 1)
    if step["kind"] == "prompts":
        prompts = f"{count:,} prompts, {step['tokens']:,} tokens each" if count > 1 else f"{step['tokens']:,} tokens"
        return f"a prompt step{stage}, {prompts}, {context}"
    full = " (all that the KV cache has room for)" * step["full"]
    drafts = f", {step['drafts']} drafts each" * bool(step["drafts"])
    return f"a decode step{stage}, {count:,} request{'s' * (count > 1)} a replica{full}, {context}{drafts}"


def _speed(step: Plan) -> str:
    """Return the tokens per second of a replica, and the slowest part, in words."""
    each = step["requests"] * (step["tokens"] if step["kind"] == "prompts" else 1) / step["seconds"]
    right = f" ({each * step['tokens']:,.0f} if all drafts are right)" * bool(step["drafts"])
    return f", at most {each:,.0f} tokens/s of a replica{right}; slowest: {step['slowest']}"


def _part(part: Plan, step: Plan) -> str:
    if part["seconds"] is None:
        return f"{part['name']}: {size(part['num_bytes'])} that a rank receives"
    return f"{part['name']}: {size(part['num_bytes'])}, {_ms(part['seconds'])}, {part['seconds'] / step['seconds']:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
