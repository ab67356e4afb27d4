"""Facts of a model that `quire explain` shows beside its parameters: attention, rotary positions, router. No torch."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.args.layers import AttentionArgs, ForeignArgs, RecurrentArgs
from quire.plan.kinds import mixer


def model_facts(args: ModelArgs) -> dict[str, Any]:
    """Return plain values about a model under the names "attention", "rope" and "router".

    The value of "router" is None for a model without experts. Layers of full attention come first, where there are any.
    """
    moe, kinds = args.moe, sorted(args.attending, key=lambda one: mixer(one).window is not None)
    facts = [mixer(one).facts() for one in kinds]
    own = [one.mixer for one in args.layers[: args.num_layers]]
    recurrent = [one for one in args.mixers if isinstance(one, RecurrentArgs)]
    more = {
        "others": [one for one in _each(facts)[1:] if _sizes(one) != _sizes(facts[0])],
        "sharing": sum(args.kept_by(layer) != layer for layer in range(args.num_layers)),
        "inputs": args.inputs,
        "recurrent": [
            mixer(one).facts() | {"layers": sum(one in layer.mixers for layer in args.layers[: args.num_layers])}
            for one in recurrent
        ],
    }
    windows = Counter(mixer(one).window for one in own if one in kinds)
    full = windows.pop(None, 0)
    rotations = list(dict.fromkeys(one.rotation for one in kinds))
    turning = [one for one in rotations if one.rope.kind != "none"]
    rotation = (turning or rotations)[0]
    unrotated = sum(one.rope.kind == "none" for one in own if isinstance(one, AttentionArgs))
    return {
        "attention": facts[0]
        | {"windows": [[count, window] for window, count in windows.items()], "full": full}
        | {"qk_norm": next((one["qk_norm"] for one in facts if one["qk_norm"]), "")}
        | more,
        "rope": asdict(rotation.rope)
        | {"rotary_dim": rotation.rotated, "head_dim": kinds[0].head_dim, "without": unrotated}
        | {"others": [asdict(one.rope) for one in turning[1:]]},
        "foreign": _foreign(args),
        "router": None
        if moe is None or args.foreign is not None
        else asdict(moe.routing) | {"layers": len(args.expert_layers), "shared_gate": moe.shared_gate},
    }


def _foreign(args: ModelArgs) -> dict[str, Any] | None:
    """Return facts about the layers of a decoder of transformers, each kind once; None: a model of Quire's own."""
    if args.foreign is None:
        return None
    own = [one.mixer for one in args.layers if isinstance(one.mixer, ForeignArgs)]
    kinds = list(dict.fromkeys(own))
    return {
        "architecture": args.architecture,
        "module": args.foreign.module,
        "version": args.foreign.version,
        "entry": list(args.foreign.entry_operations),
        "kinds": [mixer(one).facts()["foreign"] | {"layers": own.count(one)} for one in kinds],
    }


def _foreign_lines(foreign: dict[str, Any]) -> list[str]:
    """Return lines about the layers of a decoder of transformers: the parts that are ours, and those that are not."""
    lines = [f"layers: code of transformers {foreign['version']} ({foreign['architecture']} in {foreign['module']})"]
    for one in foreign["kinds"]:
        ours = ["projections", "norms", "cache", "attention"]
        ours += ["preparation of heads"] * (not one["apart"]) + [f"activation {act}" for act in one["gates"]]
        left = one["operations"]
        words = f"{len(left)} operation{'s' * (len(left) != 1)} outside kernels in each ({_shortened(left)})"
        rest = f"the module's {words}, which layers of Quire's own do not have" if left else "nothing is the module's"
        why = f"; the module prepares heads, because {one['apart']}" * bool(one["apart"])
        lines.append(f"{one['layers']} layers: ours are {', '.join(ours)}; {rest}{why}")
    if foreign["entry"]:
        lines.append(f"before the first layer, the module's: {_shortened(foreign['entry'])}")
    return lines


def _shortened(operations: list[str]) -> str:
    """Return the names of operations with their numbers, most frequent first."""
    counted = Counter(operations).most_common()
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counted)


def _sizes(facts: dict[str, Any]) -> list[Any]:
    return [facts[key] for key in ("heads", "kv_heads", "head_dim")]


def _each(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each of the facts once."""
    return [one for i, one in enumerate(facts) if one not in facts[:i]]


def fact_lines(
    attention: dict[str, Any],
    rope: dict[str, Any],
    router: dict[str, Any] | None,
    foreign: dict[str, Any] | None = None,
) -> list[str]:
    """Return the values of `model_facts` as lines of text."""
    latent = attention["kind"] == "latent"
    heads = _heads(attention)
    normed = {"": "", "head": ", normalized queries and keys", "whole": ", queries and keys normalized over all heads"}
    normed["plain"] = normed["head"] + " where they are rotated"
    more: str = normed[attention["qk_norm"]] + ", biased q, k and v" * attention["bias"]
    more += ", gated output" * attention.get("gated", False)
    more += f", scores capped at {attention['soft_cap']:g}" if attention.get("soft_cap") else ""
    more += ", a sink for each head" * attention.get("sinks", False)
    more += {"normed": ", normalized values", "keys": ", normalized keys as values"}.get(
        attention.get("values", ""), ""
    )
    others = [f"layers with a window: {_heads(one)}" for one in attention["others"]]
    others += [f"{attention['sharing']} layers read the KV of an earlier one"] * bool(attention["sharing"])
    others += [f"each layer has an embedding of {attention['inputs']} numbers"] * bool(attention["inputs"])
    others += [_recurrent(one) for one in attention["recurrent"]]
    windows = [f"{count} layers with {window_words(window)}" for count, window in attention["windows"]]
    windows += [f"{attention['full']} layers without"] * (bool(windows) and attention["full"] > 0)
    lines = [
        "; ".join(
            (f"attention: {attention['kind']}, {heads}{more}", *others, *([", ".join(windows)] if windows else []))
        ),
        f"rope: {_rope(rope, ' (partial)' * (not latent)) if foreign is None else 'as the module rotates'}",
        *(_foreign_lines(foreign) if foreign is not None else ()),
    ]
    return lines + ([f"router: {_router(router)}"] if router else [])


def _recurrent(facts: dict[str, Any]) -> str:
    begin = f"{facts['layers']} recurrent layers ({facts['kind']})"
    end = f"convolution of {facts['taps']} tokens"
    if "state_dim" in facts:
        sizes = "{heads} heads of {head_dim} dimensions with states of {state_dim}, {groups} groups".format(**facts)
        return f"{begin}: {sizes}, {end}"
    if "key_dim" not in facts:
        return f"{begin}: {end}"
    heads = f"{facts['heads']} heads, {facts['key_heads']} of keys"
    return f"{begin}: {heads}, of {facts['key_dim']} and {facts['value_dim']} dimensions, {end}"


def window_words(window: int) -> str:
    """Return words for a window as of `KVGroup`."""
    return f"a window of {window:,} tokens" if window > 0 else f"attention in chunks of {-window:,} tokens"


def _heads(attention: dict[str, Any]) -> str:
    queries, dims = f"{attention['heads']} query heads", f"{attention['head_dim']} dimensions"
    if attention["kind"] == "latent":
        return f"{queries} of {dims}; values of {attention['value_dim']}"
    return f"{queries} and {attention['kv_heads']} KV heads of {dims}"


def _rope(rope: dict[str, Any], partial: str) -> str:
    if rope["kind"] == "none":
        return "none: no layer rotates heads"
    part, whole = rope["rotary_dim"], rope["head_dim"]
    rotated = f"{part} of {whole} dimensions of a head rotated{partial}"
    words = _scaling(rope)
    if rope["kind"] != "proportional":
        words += [f"all {whole} dimensions of a head rotated" if part == whole else rotated]
    others = "".join(f"; layers with a window: {', '.join(_scaling(one))}" for one in rope["others"])
    without = f"; {rope['without']} layers without" if rope["without"] else ""
    return ", ".join(words) + others + without


def _scaling(rope: dict[str, Any]) -> list[str]:
    words = [rope["kind"], f"theta {rope['theta']:,.10g}"]
    if rope["kind"] == "proportional":
        return [*words, f"the first {100 * rope['part']:g} % of a head's pairs rotated"]
    if rope["kind"] != "default":
        trained = rope["original_max_position"]
        words.append(f"factor {rope['factor']:g}" + (f" over {trained:,} trained positions" if trained else ""))
    return words


def _router(router: dict[str, Any]) -> str:
    words = ["top {top_k} of {num_experts} experts".format(**router)]
    if router["num_groups"] > 1:
        score = {"max": "best expert", "top2": "two best experts"}[router["group_score"]]
        groups = "from the best {top_groups} of {num_groups} groups".format(**router)
        words.append(f"{groups} (by their {score})")
    biased = " of biased logits" * router["logit_bias"] + " with a bias that only chooses" * router["correction"]
    words.append(f"{router['scoring']} scores{biased}")
    words.append(f"weights {'' if router['normalize'] else 'not '}renormalized")
    words += [f"scaled by {router['scaling']:g}"] * (router["scaling"] != 1)
    return ", ".join([*words, *["scaled for each expert"] * router["expert_scale"]])
