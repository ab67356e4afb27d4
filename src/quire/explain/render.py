"""A described plan as a tree for a terminal. Equal layers are shown once, the experts of a layer as a single name."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import floor
from typing import Any

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from quire.contracts.scheme import Wire
from quire.entry.cli.table import format_bytes as size
from quire.explain.render_floors import add_floors
from quire.explain.render_ranks import Plan, add, add_ranks, folded, not_runnable
from quire.kernels.experts_plan import kind_words
from quire.kernels.routing_plan import MOST_ROWS
from quire.plan.kinds.latent import NEVER
from quire.reports.model import fact_lines, window_words
from quire.reports.states import state_words


def render(plan: Plan, full: bool = False) -> Group:
    """Return the plan as a terminal tree. Lines about missing features stand above it, a load error below it.

    full   `plan` is cut to one layer (`one_layer`): draw only that layer, with every checkpoint name and file
    """
    last = plan["load_error"] and f"would not load: {plan['load_error']}"
    return Group(*not_runnable(plan["missing"]), _tree(plan, full), *[Text(last)] * bool(last))


def _tree(plan: Plan, full: bool) -> Tree:
    tree = Tree(
        Text(
            "{name}  {type} ({architecture}), {parameters:,} parameters, {size}; computed in {dtype} "
            "({dtype_reason}); weights {format}".format(size=size(plan["model"]["bytes"]), **plan["model"])
        )
    )
    if full:
        for name, alike in folded_layers(plan["layers"]):
            _layer(tree, name, alike, full=True)
        return tree
    model = plan["model"]
    for line in (
        *(f"note: {note}" for note in model["notes"]),
        *fact_lines(model["attention"], model["rope"], model["router"], model["foreign"]),
        f"embeddings of texts: {model['embedding']}",
        f"device: {plan['machine']}",
    ):
        add(tree, line)
    _kernels(add(tree, "kernels, and why not others"), plan)
    layers = add(tree, "layers: weights from the checkpoint, then the calls of a step in order")
    for name, alike in folded_layers(plan["layers"]):
        _layer(layers, name, alike)
    _memory(tree, plan["memory"], plan["ranks"])
    if (drafts := plan["speculation"]) is not None:
        branch = add(tree, f"speculation: {drafts['drafter']}")
        held = f"{size(drafts['weights'])} of weights and {size(drafts['cache'])} of the KV cache per token"
        add(branch, f"the drafter has {held if drafts['weights'] else 'no weights and no part of the KV cache'}")
        if drafts["shared_choice"]:
            words = f"the {drafts['shared_choice']:,} tokens that the first pass of a step has chosen (IndexShare)"
            add(branch, f"later passes attend to {words}: they score none")
        costs = ", ".join(f"{size(bytes_)} with k = {k}" for k, bytes_ in drafts["read"].items())
        add(branch, f"weights that a step of one decode reads: {costs}")
    if (blend := plan["blend"]) is not None:
        add(
            tree,
            "CacheBlend: prompts reuse texts cached alone, between separators {separator!r} or by kv_chunks; "
            "{ratio:.0%} of their tokens are computed again behind layer {check_layer}, the first "
            "{first_tokens} of each text before those whose KV differs most".format(**blend),
        )
    if (adapters := plan["adapters"]) is not None:
        _adapters(add(tree, f"adapters (LoRA) up to rank {adapters['rank']}"), adapters)
    add_ranks(tree, plan)
    add_floors(tree, plan)
    left = [
        name + " (multi-token prediction)" * name.endswith(".*") + f"  {number:,} tensors" * (number > 1)
        for name, number in plan["not_read"].items()
    ]
    for title, lines in (("not read", left), ("start-up, in order", list(map(": ".join, plan["phases"].items())))):
        branch = add(tree, title) if lines else tree
        for line in lines:
            add(branch, line)
    return tree


def folded_layers(layers: Sequence[Plan]) -> Iterator[tuple[str, list[Plan]]]:
    """Yield layers of a described plan, neighbours that are alike together, with a name such as "layers 0-47"."""
    for _, some in groupby(layers, key=_likeness):
        alike = list(some)
        first, last = alike[0]["layer"], alike[-1]["layer"]
        yield f"layers {first}-{last}" if len(alike) > 1 else f"{'layer ' * first.isdecimal()}{first}", alike


def _likeness(layer: Plan) -> tuple[Any, ...]:
    weights = [(one["name"].split(".", 2)[-1], *one["shape"], one["dtype"], one["run"]) for one in layer["weights"]]
    return layer["kind"], *weights


def _layer(tree: Tree, name: str, alike: Sequence[Plan], full: bool = False) -> None:
    layer, more = alike[0], len(alike) > 1
    branch = add(
        tree,
        f"{name}: {layer['kind']}; {layer['parameters']:,} parameters, {size(layer['bytes'])}{' each' * more}",
    )
    for one in layer["weights"]:
        name = one["name"].split(".", 2)[-1] if one["name"].startswith("layers.") else one["name"]
        cut = f", cut by {one['shard']}" if one["shard"] else ""
        node = add(branch, f"{name}  {_shape(one)}{_parts(one)} {one['dtype']}, {size(one['bytes'])}{cut}")
        elsewhere = one["load_device"] != one["device"]
        moved = (
            f"{size(one['raw_bytes'])} are loaded on {one['load_device']}, {size(one['bytes'])} kept on {one['device']}"
        )
        if one["stored_as"] or one["decided_by"]:
            stored = f", stored as {one['stored_as']}" if one["stored_as"] not in ("", one["dtype"]) else ""
            add(node, f"format {one['format']}{stored}; decided by {one['decided_by']}; {moved}")
        elif elsewhere:
            add(node, moved)
        for line in _origin(one, layer["layer"] if more else "", full):
            add(node, f"<- {line}")
        steps = (_short(one[step]) for step in ("load", "convert", "pack", "run") if one[step])
        add(node, " -> ".join(dict.fromkeys(steps)))
    add(branch, f"calls {', '.join(map(_call, layer['calls']))}")


def _call(call: Plan) -> str:
    return _short(call["function"]) + (f" ({call['when']})" if call["when"] else "")


def _shape(one: Plan) -> str:
    return " x ".join(map(str, one["shape"]))


def _parts(one: Plan) -> str:
    """Return the parts of a fused parameter with their shapes; of stacked experts, the parts of a single expert."""
    if len(one["parts"]) == 1 and not one["experts"]:
        return ""
    parts = ", ".join(f"{part['name']} {_shape(part)}".strip() for part in one["parts"])
    return f" ({one['experts']} experts of {parts})" if one["experts"] else f" ({parts})"


def _origin(one: Plan, layer: str, full: bool) -> Iterator[str]:
    """Yield names and files of a parameter; `layer`: number of the layer that stands for all equal layers, or ""."""
    if full:
        for file in dict.fromkeys(one["stored"].values()):  # experts of a file are a line for each of their matrices
            own = folded(name for name, held in one["stored"].items() if held == file)
            yield from (f"{name} in {file}" if file else name for name in own)
        return
    files = list(dict.fromkeys(filter(None, one["stored"].values())))
    place = "" if layer or not files else f" in {files[0]}{f' to {files[-1]}' * (len(files) > 1)}"
    yield ", ".join(folded(one["stored"])).replace(f".layers.{layer}.", ".layers.{i}.") + place


ROUTERS = f"in steps of up to {MOST_ROWS} rows routing.normed: norm, product and choice; in others three kernels"


def _short(function: str) -> str:
    return function.removeprefix("quire.").removeprefix("kernels.")


def _kernels(branch: Tree, plan: Plan) -> None:
    for choice in plan["kernels"]:
        features = f"; features: {', '.join(choice['features'])}" if choice["features"] else ""
        weights = f" of {' '.join(choice['weights'])} weights" if choice["weights"] else ""
        node = add(branch, f"{choice['op']}{weights}: {choice['name']} ({choice['reason']}{features})")
        for name, why in choice["rejected"]:
            add(node, f"not {name}: {why}")
    _joined(branch, plan["joined"])
    if plan["joined_router"] is not None:
        words = f"norm, product and choice are kernels of their own: {plan['joined_router']}"
        add(branch, f"routers: {words if plan['joined_router'] else ROUTERS}")
    if plan["latent"]:
        latent, most = plan["latent"], plan["latent"]["break_even"]
        when = f"for up to {floor(most)} query tokens per sequence, expanded K/V above" if most < NEVER else "always"
        add(branch, f"MLA cache: {latent['kv_rank']} + {latent['rope_dim']} values per token; absorbed {when}")
    if plan["chosen"]:
        _chosen(branch, plan["chosen"])
    for phases, one in _phases(plan["moe"]):
        if isinstance(one, str):
            add(branch, one)
            continue
        for plan in (one, *one["others"]):
            _experts(branch, phases, plan, f" of {kind_words(plan['weights'])}" if one["others"] else "")


def _joined(branch: Tree, every: Sequence[Plan]) -> None:
    """Add the forms in which layers attend for decodes."""
    for one in every:
        some, kernel = one["sequences"] or one["rows"], "latent_clusters" if one["latent"] else "decode_clusters"
        pair = ("latent.prepare", "latent.absorbed") if one["latent"] else ("heads", "attention")
        of = f" of {len(one['layers'])} layers" * (len(every) > 1)
        parts = add(branch, f"decodes{of}{'' if some else ': {}, then {}'.format(*pair)}")
        if most := one["sequences"]:
            words = f"of at most {most} sequences" if most > 1 else "of one sequence"
            words += f", of at most {one['context']:,} tokens of context" * bool(one["context"])
            add(parts, f"in steps {words}: joined.{kernel}, {' and '.join(pair)} ({one['why_sequences']})")
        else:
            add(parts, f"not joined.{kernel}: {one['why_sequences']}")
        if one["rows"]:
            rows = "{}steps of {} to {} rows".format("other " * bool(most), *one["rows"])
            add(parts, f"in {rows}: joined.decode_attention, heads and attention ({one['why']})")
        elif one["why"] != one["why_sequences"]:
            add(parts, f"not joined.decode_attention: {one['why']}")
        if some:
            add(parts, "in other steps: {}, then {}".format(*pair))


def _chosen(branch: Tree, one: Plan) -> None:
    """Add the layers that attend to chosen tokens, and the costs beside those of attention to all."""
    layers = f"{len(one['indexed'])} layers choose" if one["shared"] else "each layer chooses"
    also = f"; {len(one['shared'])} others share the tokens of the last one before them" * bool(one["shared"])
    heads = f"an indexer of {one['heads']} heads of {one['head_dim']}"
    node = add(branch, f"sparse latent attention: {layers} {one['top_k']:,} tokens by {heads}{also}")
    if one["length"] <= one["top_k"]:
        add(node, f"dense in this engine: no context exceeds {one['length']:,} tokens")
        return
    add(node, f"up to {one['top_k']:,} tokens of context: dense; the indexer writes its keys alone")
    each = f"{one['latent_bytes']:,} B of the latent, {one['index_bytes']:,} B of the indexer's key"
    add(node, f"a token in a layer's cache: {each}")
    for length, whole, some in one["reads"]:
        words = f"{size(whole)} to all tokens, {size(some)} to chosen ones ({whole / some:.1f} times less)"
        add(node, f"bytes that a decode at {length:,} tokens reads, over all layers: {words}")
    decode, prompt = one["decode_break_even"], one["prompt_break_even"]
    few = "never" if decode is None else f"above {decode:,} tokens of context"
    many = "never, with the heads of a rank" if prompt is None else f"above {prompt:,} tokens"
    add(node, f"selection pays in decodes (bytes, absorbed) {few}; in prompts (operations, beside expanded) {many}")


def _experts(branch: Tree, phases: str, one: Plan, weights: str) -> None:
    """Add a plan of experts; `weights`: their kind, where layers differ in it."""
    result = f"to be summed over {' and '.join(one['partial_over'])}" if one["partial_over"] else "whole"
    can = f" ({', '.join(one['features'])})" if one["features"] else ""
    words = f"dispatcher {one['dispatcher']}, kernel {one['experts']}{can}; shared experts {one['shared']}, "
    words += f"result {result}"
    node = add(branch, f"experts{weights} in {phases}: {words} ({one['decided']})")
    if one["dispatcher"] != "none":
        add(node, f"rows travel to experts {Wire(**one['wire']['form'])}: {one['wire']['decided']}")
    for dispatcher, kernel, why in one["candidates"]:
        if why and (dispatcher, kernel) != (one["dispatcher"], one["experts"]):
            words = kernel or "any kernel"
            pair = f"{words} without a dispatcher" if dispatcher == "none" else f"{dispatcher} with {words}"
            add(node, f"not {pair}: {why}")


def _phases(moe: Plan) -> Iterator[tuple[str, Any]]:
    """Yield (phases, plan) of the expert layers; phases with the same plan are joined."""
    same = {
        phase: one.replace(f"in {phase} on", "in {} on")
        if isinstance(one, str)
        else {**one, "phase": "", "others": [{**other, "phase": ""} for other in one["others"]]}
        for phase, one in moe.items()
    }
    first, *others = same.values() or [None]
    if others and all(first == other for other in others):
        phases = " and ".join(moe)
        yield phases, first.replace("{}", phases) if isinstance(first, str) else first
    else:
        yield from moe.items()


def _memory(tree: Tree, memory: Plan, ranks: Sequence[Plan]) -> None:
    whose = f" of rank {memory['rank']}, which has least room" if len(ranks) > 1 else ""
    branch = add(tree, f"memory{whose}: {size(memory['weights'])} of weights")
    parts = _components(memory["components"])
    if memory["draft_layers"]:
        parts += f"; of the last {memory['draft_layers']}, which draft: {_components(memory['draft_components'])}"
    each = f" (each: {parts})" * (len(_block_words(memory)) == 1)
    held = Counter((rank["device"], rank["bytes"]) for rank in ranks)
    for line in (
        "weights by device: "
        + ", ".join(
            f"{number:,} x {device} {size(count)}" + " each" * (number > 1) for (device, count), number in held.items()
        ),
        *([_host_words(memory["host_layers"])] if memory["host_layers"] else []),
        f"KV cache: {size(memory['kv_bytes_per_token'])} per token in {memory['full_layers']} layers{each}"
        + _cache_words(memory),
        *[
            f"windows: {count} group{'s' * (count > 1)} of up to {memory['page_layers']} layers keep the last "
            f"{abs(window):,} tokens of a request" + ", those of a chunk" * (window < 0)
            for count, window in memory["windows"]
        ],
        *_block_words(memory),
        *[
            f"buffers for exchanges with other ranks: {size(memory['buffers'])}"
            + "; NCCL's own come on top" * (ranks[0]["device"] == "cuda")
        ]
        * (len(ranks) > 1),
        *[_scratch_words(memory)] * (memory["scratch"] > 0),
        _loading_words(memory["loading"], ranks[0]["device"]),
    ):
        add(branch, line)
    if "refused" in memory:
        add(branch, memory["refused"])
        return
    for line in (
        f"{memory['num_blocks']:,} pages = {memory['num_tokens']:,} tokens in {size(memory['kv_bytes'])}",
        "longest context {max_model_len:,} tokens; {full_sequences:,} such requests at once, at most {sequences:,} in "
        "all".format(**memory),
        memory["graphs"] and f"CUDA graphs: {memory['graphs']}",
        memory["states"] and f"states of recurrent layers: {state_words(memory['states'])}",
        *map(_tier_words, memory["tiers"]),
        *memory["notes"],
        memory["budget"],
    ):
        if line:
            add(branch, line)


def _host_words(host: Plan) -> str:
    """Return the layers whose weights lie in host memory, in words."""
    return (
        f"{size(host['num_bytes'])} of them in host memory, of the layers {', '.join(map(str, host['layers']))} "
        f"({host['reason']}); they come to {size(host['slot_bytes'])} of the device"
    )


def _block_words(memory: Plan) -> list[str]:
    """Return lines about the blocks of KV groups: one, or one for each kind of groups if their blocks differ."""
    groups, page = memory["groups"], size(memory["page_bytes"])
    if len({(one["block_size"], str(one["components"])) for one in groups}) == 1:
        return [
            f"a block of {memory['block_size']} tokens: {size(memory['block_bytes'])} per layer; a page, the block of "
            f"{memory['page_layers']} layers: {page}"
        ]
    return [
        f"{one['count']} group{'s' * (one['count'] > 1)} of up to {one['layers']} layers "
        + ("of full attention" if one["window"] is None else "with " + window_words(one["window"]))
        + f": blocks of {one['block_size']} tokens take {size(one['bytes'])} of a page of {page} "
        f"(each layer: {_components(one['components'])})"
        for one in groups
    ]


def _loading_words(loading: Plan, device: str) -> str:
    """Return the most memory that loading takes, in words; device: where the weights are kept."""
    where = "host memory" if loading["device"] == "cpu" else loading["device"]
    weights = "the weights, " * (loading["device"] == device)
    each = " for each rank that loads" if loading["device"] != device else ""
    return (
        f"while loading at most {size(loading['bytes'])} of {where}{each}: {weights}{size(loading['units'])} for two "
        f"units that are loaded, {size(loading['packed'])} for a matrix that is packed"
    )


def _adapters(branch: Tree, plan: Plan) -> None:
    """Add the slots of adapters, their bytes, and what an adapter may change."""
    add(branch, "{slots:,} slots on the device, ".format(**plan) + f"{size(plan['slot_bytes'])} each on a rank")
    add(branch, f"all slots: {size(plan['bytes'])} on a rank; host memory holds {plan['held']:,} adapters")
    add(branch, f"{plan['linears']:,} linear layers, of the modules {', '.join(plan['modules'])}")


def _scratch_words(memory: Plan) -> str:
    """Return the use of the scratch for an 8-bit KV cache on Hopper, and the steps that do not use it, in words."""
    most = {one: number for number, one in reversed([*enumerate(memory["widened_tokens"])]) if one}
    tokens = " or ".join(f"{one:,}" + f" (KV group {number})" * (len(most) > 1) for one, number in sorted(most.items()))
    return (
        f"scratch of {size(memory['scratch'])}: keys and values that prompts read are widened to two bytes, as the "
        "hopper kernel reads no others; CUDA graphs, and steps whose prompts read more than "
        f"{tokens} tokens or have few rows for them, run the triton kernel, which reads 8 bits"
    )


def _components(components: Sequence[Sequence[object]]) -> str:
    return ", ".join(f"{name} {heads} x {dim} {dtype}" for name, heads, dim, dtype in components)


def _tier_words(tier: Plan) -> str:
    """Return a tier of KV blocks below the device in words."""
    if tier["policy"] == "read":
        place = "host memory of" if tier["name"] == "peer" else "GPUs of this machine, of"
        return f"{tier['name']} tier: blocks in {place} {', '.join(tier['addresses'])}"
    where = f"files in {tier['folder']}, at most" if tier["folder"] else "host memory,"
    return (
        f"{tier['name']} tier, {tier['policy']}: {where} {size(tier['bytes'])} = {tier['blocks']:,} pages = "
        f"{tier['tokens']:,} tokens" + f", and {tier['checkpoints']:,} checkpoints" * bool(tier["checkpoints"])
    )


def _cache_words(memory: Plan) -> str:
    """Return the scales of an 8-bit KV cache and the reason for its type, in words; "" for another cache."""
    if not memory["components"][0][3].startswith("float8"):
        return ""
    names = [name.rpartition("self_attn.")[2] for name in (memory["cache_scales"] or [()])[0]]
    scales = f"scales of the checkpoint ({', '.join(dict.fromkeys(names))})" if names else "all scales are 1"
    return f": {memory['cache_reason']}; {scales}"
