"""Simulation of the balance of experts over ranks, and of the bytes that tokens take to experts and back.

    PYTHONPATH=src python tools/simulate_experts.py [MODEL --eval eval.json]

DeepSeek-V3's router: 256 experts in 8 groups, a token takes its best 8 of its best 4 groups. A score is the logarithm
of the expert's popularity plus Gumbel noise. Popularities of a layer are Zipf(s) in random order, and a part of them is
new in each interval. Balance: a map is made from one interval's load and judged by the next interval's; "max/mean" is
of the ranks' tokens in a step, with the choice of copies. Bytes: rows are routed through the maps. With MODEL, the
engine runs that model on the evaluation text, and its recorded routing is balanced on 8 ranks. Prints tables of
Markdown. Takes about two minutes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.engine.eplb import ExpertMap, balanced_map, balancedness, expert_map, initial_map, moves
from quire.kernels.expert_copies.slots import ExpertSlots

EXPERTS, GROUPS, KEPT, TOP_K, HIDDEN = 256, 8, 4, 8, 7168
SIMULATED, INTERVALS, WINDOW, NEW = 12, 4, 4096, 0.3  # layers; intervals; tokens of a load; new part of popularities
ROWS = 128  # of a rank in a step of decodes
NODE = 8  # ranks of a host
Array = np.ndarray[Any, Any]


def route(popularity: Array, tokens: int, draw: np.random.Generator) -> Array:
    """Expert ids of each layer and token, [L, tokens, 8], for popularities [L, 256]."""
    ids = []
    for layer in np.log(popularity):
        scores = layer + draw.gumbel(size=(tokens, EXPERTS))
        groups = scores.reshape(tokens, GROUPS, -1)
        best = np.partition(groups, -2, axis=2)[:, :, -2:].sum(axis=2)
        dropped = np.argpartition(best, -KEPT, axis=1)[:, :-KEPT]
        np.put_along_axis(groups, dropped[:, :, None], -np.inf, axis=1)
        ids.append(np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:])
    return np.stack(ids).astype(np.int32)


def intervals(s: float, draw: np.random.Generator) -> Iterator[Array]:
    """Popularities [L, 256] of one interval after the other."""
    zipf = np.tile(np.arange(1, EXPERTS + 1) ** -s, (SIMULATED, 1))
    logs = np.log(draw.permuted(zipf, axis=1))
    for _ in range(INTERVALS + 1):
        yield np.exp(logs)
        fresh, middle = np.log(draw.permuted(zipf, axis=1)), np.log(zipf).mean()
        logs = middle + (1 - NEW**2) ** 0.5 * (logs - middle) + NEW * (fresh - middle)  # as uneven as before


def counted(ids: Array, num_experts: int) -> Array:
    """Tokens of each expert, [L, E], of ids [L, T, k]."""
    return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in ids])


def choose(experts: ExpertMap, layer: int, ids: Array) -> Array:
    """Slots [T, k] of the experts `ids` [T, k] of consecutive rows."""
    slots = ExpertSlots(torch.from_numpy(experts.slots[layer]), torch.from_numpy(experts.counts[layer]))
    return slots.choose(torch.from_numpy(ids)).numpy()


def in_a_step(experts: ExpertMap, ids: Array) -> float:
    """Tokens of the busiest rank over the mean, in the mean over layers, if these rows are a step."""
    ratios = []
    for layer, routed in enumerate(ids):
        chosen = choose(experts, layer, routed).ravel()
        tokens = np.bincount(chosen // experts.each, minlength=experts.ranks)
        ratios.append(tokens.max() / tokens.mean())
    return float(np.mean(ratios))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A way to place experts on ranks."""

    name: str
    ranks: int
    num_experts: int
    redundant: int = 0
    groups: int = 1
    nodes: int = 1

    def first(self, layers: int) -> ExpertMap:
        """The map before any load."""
        if self.name != "round robin":
            return initial_map(layers, self.num_experts, self.redundant, self.ranks)
        held = np.arange(self.num_experts).reshape(-1, self.ranks).T.ravel()
        return expert_map(np.tile(held, (layers, 1)), self.num_experts, self.ranks)

    def next(self, load: Array, old: ExpertMap) -> ExpertMap:
        """The map after a load."""
        if self.name in ("linear", "round robin"):
            return old
        return balanced_map(load, self.redundant, self.ranks, groups=self.groups, nodes=self.nodes, old=old)


def placements(ranks: int) -> Iterator[Placement]:
    """The rows of the table."""
    yield Placement(name="linear", ranks=ranks, num_experts=EXPERTS)
    yield Placement(name="round robin", ranks=ranks, num_experts=EXPERTS)
    for redundant in (0, 32, 64):
        yield Placement(name="global", ranks=ranks, num_experts=EXPERTS, redundant=redundant)
        if ranks > NODE:
            yield Placement(
                name="hierarchical",
                ranks=ranks,
                num_experts=EXPERTS,
                redundant=redundant,
                groups=GROUPS,
                nodes=ranks // NODE,
            )


def judged(placement: Placement, loads: list[Array], steps: list[Array]) -> tuple[float, float, float]:
    """Mean of: balancedness, busiest rank over mean in a step, share of slots that a rebalance fills anew."""
    experts = placement.first(len(loads[0]))
    found = []
    for before, load, step in zip(loads[:-1], loads[1:], steps[1:], strict=True):
        old, experts = experts, placement.next(before, experts)
        moved = sum(map(len, moves(old, experts))) / experts.experts.size
        found.append((balancedness(load, experts), in_a_step(experts, step), moved))
    first, *later = found
    mean = np.mean(found, axis=0)
    return float(mean[0]), float(mean[1]), float(np.mean([one[2] for one in later or [first]]))


def print_balance() -> None:
    """Print the table of balance."""
    print(f"{SIMULATED} layers, {INTERVALS} intervals, {WINDOW} tokens each; steps of {ROWS} rows per rank.\n")
    skews = (0.4, 0.7, 1.0)
    print(
        "| ranks | placement | redundant |"
        + "".join(f" s = {s}: balancedness | max/mean |" for s in skews)
        + " moved |\n"
        + "|---" * (4 + 2 * len(skews))
        + "|"
    )
    for ranks in (8, 32):
        windows = {}
        for s in skews:
            draw = np.random.default_rng(0)
            ids = [route(one, max(WINDOW, ranks * ROWS), draw) for one in intervals(s, draw)]
            windows[s] = [counted(one, EXPERTS) for one in ids], [one[:, : ranks * ROWS] for one in ids]
        for placement in placements(ranks):
            results = [judged(placement, *windows[s]) for s in skews]
            cells = "".join(f" {balance:.2f} | {ratio:.2f} |" for balance, ratio, _ in results)
            print(f"| {ranks} | {placement.name} | {placement.redundant} |{cells} {results[-1][2]:.0%} |")


def print_bytes(s: float) -> None:
    """Print the table of bytes on the wire.

    A row goes out in BF16, or in FP8 with a float32 scale per 128 values, and its result comes back in BF16. "pull": a
    row crosses once to each rank that needs it, and all ids and weights go to all ranks. "copies": once per expert.
    """
    draw = np.random.default_rng(1)
    popularity = next(intervals(s, draw))
    print(
        f"\nMB that a rank receives per layer, out and back, in a step of {ROWS} rows per rank; bf16 / fp8 wire. "
        f"Zipf({s}).\n"
    )
    print(
        "| ranks | placement | redundant | other ranks of a row | other hosts | all-gather | pull | copies |\n"
        + "|---" * 8
        + "|"
    )
    for ranks in (8, 32):
        ids = route(popularity, ranks * ROWS, draw)
        load = counted(ids, EXPERTS)
        for placement in placements(ranks):
            experts = placement.next(load, placement.first(SIMULATED))
            to_ranks, to_hosts, copies = crossing(experts, ids)
            forms = ((ranks - 1, (ranks - 1) * TOP_K), (to_ranks, (ranks - 1) * TOP_K), (copies, copies))
            cells = ""
            for rows, routes in forms:  # that a row brings: rows, and pairs of id and weight
                out = [rows * size + routes * 8 for size in (2 * HIDDEN, HIDDEN + HIDDEN // 32)]
                cells += " | " + " / ".join(f"{ROWS * (one + rows * 2 * HIDDEN) / 1e6:.1f}" for one in out)
            print(f"| {ranks} | {placement.name} | {placement.redundant} | {to_ranks:.2f} | {to_hosts:.2f}{cells} |")


def crossing(experts: ExpertMap, ids: Array) -> tuple[float, float, float]:
    """Mean over rows of: other ranks and other hosts that need the row, and its copies for experts of other ranks."""
    found = np.zeros(3)
    line = np.arange(ids.shape[1])
    own = line * experts.ranks // len(line)
    for layer, routed in enumerate(ids):
        to = choose(experts, layer, routed) // experts.each
        for place, ranks in enumerate((1, NODE)):
            hit = np.zeros((len(line), experts.ranks // ranks), bool)
            np.put_along_axis(hit, to // ranks, True, axis=1)
            hit[line, own // ranks] = False
            found[place] += hit.sum()
        found[2] += (to != own[:, None]).sum()
    ranks_hit, hosts_hit, copies = found / ids[:, :, 0].size
    return float(ranks_hit), float(hosts_hit), float(copies)


def recorded(model: Path, texts: list[str]) -> tuple[list[Array], int]:
    """Expert ids [L, T, k] of each text, and the number of experts."""
    from quire import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", enforce_eager=True, use_tqdm_on_load=False, kv_cache_memory_bytes=300 << 20)
    moe = llm.engine.args.moe
    assert moe is not None, f"{model} has no experts"
    seen: dict[int, list[Array]] = {}

    def note(layer: int, weights: object, ids: Any) -> None:
        seen.setdefault(layer, []).append(ids.cpu().numpy().copy())

    for layer in llm.engine.args.expert_layers:
        llm.engine.worker.model.layers[layer].mlp.on_routing = partial(note, layer)
    found = []
    for text in texts:
        seen.clear()
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        windows = [ids[at : at + 1024] for at in range(0, len(ids), 1024)]
        llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
        found.append(np.stack([np.concatenate(seen[layer]) for layer in sorted(seen)]))
    llm.close()
    return found, moe.routing.num_experts


def print_recorded(model: Path, evaluation: Path, ranks: int = 8) -> None:
    """Print the table of balance for recorded routing."""
    given = json.loads(evaluation.read_text())
    text, items = given["perplexity_text"], given["recall"]
    notes = ["\n".join([*item["notes"], item["question"], item["answer_sentence"]]) for item in items]
    texts = [text[: len(text) // 2], text[len(text) // 2 :], "\n".join(notes[:100]), "\n".join(notes[100:])]
    ids, num_experts = recorded(model, texts)
    loads = [counted(one, num_experts) for one in ids]
    pairs = {"itself": (1, 1), "same kind": (0, 1), "other kind": (2, 1)}
    print(
        f"\n{model.name}: {num_experts} experts on {ranks} ranks; loads of {[one.shape[1] for one in ids]} tokens. "
        "Balancedness on documentation, by the load that made the map.\n"
    )
    print("| placement | redundant | " + " | ".join(pairs) + " |\n" + "|---" * (2 + len(pairs)) + "|")
    for name, redundant in (("linear", 0), ("global", 0), ("global", ranks), ("global", 2 * ranks)):
        placement = Placement(name=name, ranks=ranks, num_experts=num_experts, redundant=redundant)
        first = placement.first(len(loads[0]))
        cells = [balancedness(loads[judge], placement.next(loads[maker], first)) for maker, judge in pairs.values()]
        print(f"| {name} | {redundant} |" + "".join(f" {cell:.2f} |" for cell in cells))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--eval", type=Path)
    args = parser.parse_args()
    print_balance()
    print_bytes(0.7)
    if args.model:
        print_recorded(args.model, args.eval)


if __name__ == "__main__":
    main()
