"""The ranks of a described plan for a terminal: their parts, groups and exchanges; or a single rank with its slices.

Ranks that hold as much are one line. The experts of a layer, and layers whose slices are equal, are one line.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from quire.entry.cli.table import format_bytes as size
from quire.plan.draft_exchanges import FIRST, LATER, PROMPTS
from quire.plan.parallel_notes import listed

Plan = Mapping[str, Any]
HELD = {"layers": "layers", "heads": "query heads", "kv_heads": "KV heads", "experts": "experts"}
PASSES = {  # of a drafter -> the steps that make it, and its rows
    FIRST: "in steps with decodes: the tokens that the last step accepted",
    LATER: "in steps with decodes: a token of each decode in each pass",
    PROMPTS: "in steps with prompts: all tokens of the step",
}
MOST_RUNS = 4  # of ranks that are alike and not neighbours, before their count is told instead
MOST_GROUPS = 8  # of a name whose members are shown
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"(\.layers)\.(\d+)\.")


def folded(names: Iterable[str]) -> Iterator[str]:
    """Yield checkpoint names in order; the names of all experts become "experts.{0-255}.up_proj.weight"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _EXPERT.search(name)
        groups.setdefault(_EXPERT.sub(".experts.{}.", name), []).append(found[1] if found else "")
    for pattern, numbers in groups.items():
        words = _range("", [int(number) for number in numbers]).strip() if "{}" in pattern else ""
        yield pattern.replace("{}", words if len(numbers) == 1 else f"{{{words}}}")


def add_ranks(tree: Tree, plan: Plan) -> None:
    """Add the ranks of a plan, their groups and their exchanges; nothing for one device."""
    ranks = plan["ranks"]
    if len(ranks) == 1:
        return
    branch = add(tree, f"{len(ranks):,} ranks")
    alike: dict[tuple[Any, ...], list[Plan]] = {}
    for rank in ranks:
        each = (len(range(*rank[key])) for key in HELD)
        alike.setdefault((rank["stage"], rank["bytes"], *each), []).append(rank)
    if ranks[-1]["replica"]:
        add(branch, _replicas(ranks, plan["groups"]))
    for (stage, *_), some in alike.items():
        add(branch, f"{_numbers([rank['number'] for rank in some])} (stage {stage}): {_held(some, plan['latent'])}")
    if plan["latent"] and ranks[0]["tp"] > 1:
        add(branch, _latents(ranks[0], plan["groups"]))
    for key in ("kv_heads", "experts"):
        if line := _shares(ranks, key) if not (plan["latent"] and key == "kv_heads") else "":
            add(branch, line)
    _groups(branch, plan["groups"])
    _exchanges(branch, "exchanges of a step in order, with bytes of a rank's buffer", plan["collectives"])


def render_rank(rank: Plan) -> Group:
    """Return a rank as a terminal tree, with every tensor slice that its loader reads. `rank`: see `describe_one`."""
    replica = f"replica {rank['replica']} of {rank['replicas']}, " * (rank["replicas"] > 1)
    tree = Tree(
        Text(
            f"rank {rank['number']} of {rank['ranks']} ({rank['parallel']}): {replica}stage {rank['stage']}, "
            f"place {rank['place']} of its tp group; {_held([rank], rank['latent'])}"
        )
    )
    if rank["routing_table"]:
        _experts(tree, rank)
    _groups(tree, [one | {"members": [one["members"]]} for one in rank["groups"]])
    if rank["collectives"]:
        _exchanges(tree, "exchanges of a step in order, with bytes of this rank's buffer", rank["collectives"])
    branch = add(tree, "slices of stored tensors that this rank reads")
    layers = [(name, dict(_cut(some))) for name, some in groupby(rank["slices"], key=_layer_of)]
    for _, equal in groupby(layers, key=lambda layer: (layer[0] if layer[0] is None else "", list(layer[1].items()))):
        first, *others = equal
        number, slices = first
        if number is None:
            for name, cut in slices.items():
                add(branch, f"{name}: {cut}")
            continue
        title = f"layers {number}-{others[-1][0]}, each" if others else f"layer {number}"
        node = add(branch, title)
        for name, cut in slices.items():
            add(node, f"{name}: {cut}")
    return Group(*not_runnable(rank["missing"]), tree)


def not_runnable(missing: Sequence[Plan]) -> Iterator[RenderableType]:
    """Yield the sentence that an engine cannot run yet, which names these features, and each with its remedy."""
    if not missing:
        return
    *most, last = [one["feature"] for one in missing]
    words = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    yield Text(f"Not runnable yet: {words} not implemented; the plan below is what it would be.")
    for one in missing:
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row("-", Text(one["reason"] + f": {one['remedy']}" * bool(one["remedy"]) + "."))
        yield line


def add(tree: Tree, line: str) -> Tree:
    """Add a line below a node of a tree; return its node."""
    return tree.add(Text(line))


def _held(some: Sequence[Plan], latent: object) -> str:
    """Return what ranks hold, which hold as much, in words."""
    one, held = some[0], list[str]()
    for key, word in HELD.items():
        own = [range(*rank[key]) for rank in some]
        every = own[0] if len(set(own)) == 1 else range(min(one.start for one in own), max(one.stop for one in own))
        if len(own[0]) and not (key == "kv_heads" and latent):
            sliced = "a slice of " * (key == "experts" and one["tp"] > 1 and not one["whole_experts"])
            words = _slots(one, every) if key == "experts" else _range(word, every)
            held.append(sliced + words + f" ({len(own[0])} each)" * (len(every) > len(own[0])))
    each = " each" * (len(some) > 1)
    held += ["embedding"] * one["first"] + ["head"] * one["last"] + [f"{size(one['bytes'])} of weights{each}"]
    held += [
        f"{size(one[key])} of {word}{each}"
        for key, word in (("kv_bytes", "KV cache"), ("buffers", "buffers"))
        if one[key]
    ]
    return ", ".join(held)


def _replicas(ranks: Sequence[Plan], groups: Sequence[Plan]) -> str:
    """Return the replicas and their ranks, in words."""
    numbers: dict[int, list[int]] = {}
    for rank in ranks:
        numbers.setdefault(rank["replica"], []).append(rank["number"])
    shown = [f"replica {one}: {_numbers(own)}" for one, own in numbers.items()][:MOST_GROUPS]
    more = f"; and {len(numbers) - MOST_GROUPS:,} more" * (len(numbers) > MOST_GROUPS)
    together = any(one["name"] == "ep" for one in groups)
    share = "in lock-step, which share experts" if together else "that share nothing"
    return f"{len(numbers):,} replicas {share}: {'; '.join(shown)}{more}"


def _experts(tree: Tree, rank: Plan) -> None:
    """Add a rank's expert map, and the routing table of its layers."""
    own, table = range(*rank["experts"]), rank["routing_table"]
    others = len(table) - len(set(rank["expert_ids"]))
    add(
        tree,
        f"expert map: {_slots(rank, own)} to {_range('slots', range(len(own)))}"
        + f"; the {others} others to -1, because they are on other ranks" * (others > 0),
    )
    held: dict[int, list[int]] = {}
    for expert, (number, _) in enumerate(table):
        held.setdefault(number, []).append(expert)
    places = "; ".join(f"{_range('experts', ids)} on rank {number}" for number, ids in held.items())
    add(tree, f"routing table{' at the start' * rank['balanced']}: {places}")
    copies: dict[int, list[int]] = {}
    for expert, number, _ in rank["copies"]:
        copies.setdefault(number, []).append(expert)
    if copies:
        also = "; ".join(f"of {_range('experts', ids)} on rank {number}" for number, ids in copies.items())
        add(tree, f"copies at the start: {also}")


def _latents(rank: Plan, groups: Sequence[Plan]) -> str:
    """Return the places of latents on the tp ranks, in words."""
    if rank["dcp"] == 1:
        return "KV cache: the same latents on every tp rank"
    count = len(next(one["members"] for one in groups if one["name"] == "dcp"))
    return f"KV cache: {rank['dcp']} ranks divide the latents of a block by tokens" + f", {count} times" * (count > 1)


def _groups(branch: Tree, groups: Iterable[Plan]) -> None:
    for one in groups:
        members = [f"ranks {', '.join(map(str, ranks))}" for ranks in one["members"][:MOST_GROUPS]]
        more = f"; and {len(one['members']) - MOST_GROUPS:,} more" * (len(one["members"]) > MOST_GROUPS)
        add(branch, f"group {one['name']} ({one['purpose']}): {'; '.join(members)}{more}")


def _exchanges(tree: Tree, title: str, exchanges: Sequence[Plan]) -> None:
    """Add the exchanges of the model's layers, then those of each pass of a drafter as a branch."""
    branch = add(tree, title)
    for drafts, some in groupby(exchanges, key=lambda one: one["drafts"]):
        node = add(branch, f"{drafts} of the drafter ({PASSES[drafts]})") if drafts else branch
        for one in some:
            whole = f" x {one['times']} = {size(one['times'] * one['message_bytes'])}" * (one["times"] > 1)
            sent = f"{size(one['message_bytes'])} per {one['per']}{whole}"
            when = f" ({one['when']})" * bool(one["when"])
            add(node, f"{one['kind']} over {one['group']}, {one['where']}: {sent}{when}; {one['algorithm']}")
    for name, why in {one["algorithm"]: one["why"] for one in exchanges}.items():
        add(branch, f"{name}: {why}")


def _shares(ranks: Sequence[Plan], key: str) -> str:
    """Return the KV heads or experts of each rank of the first stage, in words; "" where all ranks have the same."""
    held: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        if rank["stage"] == 0 and (key == "experts" or rank["replica"] == 0):
            held.setdefault(tuple(rank[key]), []).append(rank["number"] if key == "experts" else rank["place"])
    if len(held) == 1 and (key == "experts" or sum(map(len, held.values())) == 1):
        return ""
    one, where = ("experts", "ranks of the first stage") if key == "experts" else ("heads", "tp ranks")
    words = (
        f"{_slots(ranks[0], range(*some)) if key == 'experts' else _range(one, range(*some))} on "
        f"{_range('ranks', range(places[0], places[-1] + 1))}"
        for some, places in held.items()
    )
    return f"{HELD[key]} on {where}: {'; '.join(words)}"


def _layer_of(one: Plan) -> str | None:
    found = _LAYER.search(one["tensor"])
    return found[2] if found else None


def _cut(slices: Iterable[Plan]) -> Iterator[tuple[str, str]]:
    """Yield (stored tensors, slice in words), with the layer's number and experts' numbers folded."""
    by_cut: dict[str, dict[str, str]] = {}
    for one in slices:
        cut = cut_words(one)
        name = _LAYER.sub(r"\1.{i}.", one["tensor"])
        by_cut.setdefault(f"{_EXPERT.sub('.experts.{}.', name)} {cut}", {})[name] = cut
    for names in by_cut.values():
        for name in folded(names):
            yield name, next(iter(names.values()))


def cut_words(one: Plan) -> str:
    """Return a slice of a stored tensor in words: "whole" or "rows 0-127 of 256"."""
    if one["end"] - one["start"] == one["total"]:
        return "whole"
    return f"{'rows' if one['axis'] == 0 else 'columns'} {one['start']}-{one['end'] - 1} of {one['total']}"


def _numbers(ranks: Sequence[int]) -> str:
    """Return ranks by number, in words: each run of neighbours, or a count where there are many runs."""
    known = set(ranks)
    runs = list(zip([n for n in ranks if n - 1 not in known], [n for n in ranks if n + 1 not in known], strict=True))
    if len(runs) > MOST_RUNS:
        return f"{len(ranks):,} of ranks {ranks[0]}-{ranks[-1]}"
    words = (f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def _slots(rank: Plan, slots: range) -> str:
    """Return the experts of slots in words: "experts 0-31", "experts 30-31 and copies of experts 0-1 at the start"."""
    own = [slot for slot in slots if slot < rank["num_experts"] or not rank["balanced"]]
    copies = [slot % rank["num_experts"] for slot in slots[len(own) :]]
    words = [before + _range("experts", some) for before, some in (("", own), ("copies of ", copies)) if some]
    return " and ".join(words) + " at the start" * rank["balanced"]


def _range(words: str, numbers: Sequence[int]) -> str:
    """Return numbers in words: "expert 5", "experts 0-7", "experts 0, 4, ..., 252", "experts 252-255, 0-31"."""
    if len(numbers) == 1:
        return f"{words.removesuffix('s')} {numbers[0]}"
    step = numbers[1] - numbers[0]
    if any(after - before != step for before, after in pairwise(numbers)):
        starts = [0, *(i + 1 for i, (before, after) in enumerate(pairwise(numbers)) if after != before + 1)]
        runs = (numbers[first:end] for first, end in pairwise((*starts, len(numbers))))
        return f"{words} " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{words} {numbers[0]}-{numbers[-1]}" if step == 1 else f"{words} {listed(numbers)}"
