"""The costs of `quire explain --cost` for a terminal: a table of each step, and what surrounds it."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from quire.entry.cli.table import format_bytes as size

Plan = dict[str, Any]


def render_cost(cost: Plan) -> Group:
    """Return the costs as renderables of rich."""
    return Group(*_parts(cost))


def _parts(cost: Plan) -> Iterator[RenderableType]:
    rates, counts = cost["rates"], cost["parameters"]
    yield f"parameters: {counts['all']:,}, of which a token is multiplied with {counts['active']:,}"
    if cost["experts"]:
        hit = ", ".join(f"{tokens}: {count:.1f}" for tokens, count in cost["experts"])
        yield f"experts of a layer that tokens hit, if routers choose at random (tokens: experts): {hit}"
    if latent := cost["latent"]:
        ratio = latent["naive"] / latent["absorbed"]
        yield (
            f"latent attention: {size(latent['absorbed'])} of a token and layer are kept; as keys and values of all "
            f"heads (naive) {size(latent['naive'])}, {ratio:.1f} times as much"
        )
    if rates is None:
        yield "seconds: the rates of this device are not known; --device h200, h100 or a100 names one"
    else:
        yield (
            f"rates of an {rates['name']} ({rates['source']}): {rates['memory'] / 1e12:.2f} TB/s, "
            f"{rates['products'] / 1e12:,.0f} TFLOP/s of two-byte products. From {cost['balance']:.0f} operations a "
            "byte on operations are the bound, below it memory. A kernel waits "
            f"{rates['gap'] * 1e6:.1f} us for the one before it."
        )
    if (replicas := cost["replicas"]) > 1:
        yield f"steps, requests and tokens per second are those of one of {replicas} replicas"
    for step in cost["steps"]:
        yield ""
        yield _step(step, timed=rates is not None)
        read, work = (sum(one[key] for one in step["kernels"]) for key in ("num_bytes", "operations"))
        yield f"in all {size(read)}, {_giga(work)} GFLOP, {step['launches']} kernels that wait for each other"
        if rates is not None:
            yield _sum(step)
    if cost["layouts"]:
        yield ""
        yield _layouts(cost)


def _step(step: Plan, *, timed: bool) -> Table:
    each = f"{step['requests']:,} request{'s' * (step['requests'] > 1)}, {step['rows']:,} token"
    words = {"decode": "a decode step", "prompts": "a prompt step"}[step["kind"]]
    title = f"{words}: {each}{'s' * (step['rows'] > 1)} each, context {step['context']:,}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("kernels")
    for name in ("number", "bytes", "GFLOP", "FLOP/byte", *["bound", "floor, us", "forecast, us"] * timed):
        table.add_column(name, justify="right", no_wrap=True)
    for one in step["kernels"]:
        table.add_row(
            one["name"],
            str(one["times"]),
            size(one["num_bytes"]),
            _giga(one["operations"]),
            f"{one['intensity']:,.1f}",
            *([one["bound"], f"{one['floor'] * 1e6:,.1f}", f"{one['seconds'] * 1e6:,.1f}"] if timed else []),
        )
    return table


def _giga(operations: float) -> str:
    few = 0 < operations < 1e8
    return f"{operations / 1e9:,.{4 if few else 2}f}"


def _sum(step: Plan) -> str:
    kernels = sum(one["seconds"] for one in step["kernels"])
    sent = f" + exchanges {_ms(step['exchanges'])}" * bool(step["exchanges"])
    each = step["requests"] * (step["rows"] if step["kind"] == "prompts" else 1) / step["seconds"]
    beside = f", beside copies of layers from host memory {_ms(step['copies'])}" * bool(step["copies"])
    return (
        f"forecast {_ms(step['seconds'])} = kernels {_ms(kernels)} + {step['launches']} gaps {_ms(step['gaps'])}{sent}"
        f"{beside}; floor {_ms(step['floor'])}, {step['floor'] / step['seconds']:.0%} of it; {each:,.0f} tokens/s"
    )


def _layouts(cost: Plan) -> Table:
    table = Table(title="other divisions of the model", title_justify="left", box=None, pad_edge=False)
    table.add_column("layout")
    for step in cost["steps"]:
        words = {"decode": "decode", "prompts": "prompt"}[step["kind"]]
        table.add_column(f"{words}: exchanges", justify="right")
        table.add_column("forecast", justify="right")
    for one in cost["layouts"]:
        if one["refused"]:
            table.add_row(one["layout"], one["refused"].partition(". ")[0])
            continue
        table.add_row(one["layout"], *(_ms(seconds) for pair in one["steps"] for seconds in pair))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
