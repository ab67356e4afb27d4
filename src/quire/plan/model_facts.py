"""Facts of a model that `quire explain` shows beside its parameters: attention, rotary positions, router. No torch."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.plan.kinds import mixer, mixers


def model_facts(args: ModelArgs) -> dict[str, Any]:
    """Return plain values about a model under the names "attention", "rope" and "router".

    The value of "router" is None for a model without experts.
    """
    moe, facts = args.moe, [kind.facts() for kind in mixers(args)]
    attention = facts[0]
    windows = Counter(mixer(one.mixer).window for one in args.layers[: args.num_layers])
    full = windows.pop(None, 0)
    by_window = sorted(args.layers, key=lambda one: mixer(one.mixer).window is not None)  # full layers first
    rotations = list(dict.fromkeys(one.mixer.rotation for one in by_window))
    turning = [one for one in rotations if one.rope.kind != "none"]
    rotation = (turning or rotations)[0]
    unrotated = sum(one.mixer.rope.kind == "none" for one in args.layers[: args.num_layers])
    return {
        "attention": attention | {"windows": [[count, window] for window, count in windows.items()], "full": full},
        "rope": asdict(rotation.rope)
        | {"rotary_dim": rotation.rotated, "head_dim": args.mixers[0].head_dim, "without": unrotated}
        | {"others": [asdict(one.rope) for one in turning[1:]]},
        "router": moe and asdict(moe.routing) | {"layers": len(args.expert_layers), "shared_gate": moe.shared_gate},
    }


def fact_lines(attention: dict[str, Any], rope: dict[str, Any], router: dict[str, Any] | None) -> list[str]:
    """Return the values of `model_facts` as lines of text."""
    latent = attention["kind"] == "latent"
    kept = f"; values of {attention['value_dim']}" if latent else f" and {attention['kv_heads']} KV heads"
    heads = (
        f"{attention['heads']} query heads of {attention['head_dim']} dimensions{kept}"
        if latent
        else (f"{attention['heads']} query heads{kept} of {attention['head_dim']} dimensions")
    )
    normed = {"": "", "head": ", normalized queries and keys", "whole": ", queries and keys normalized over all heads"}
    more: str = normed[attention["qk_norm"]] + ", biased q, k and v" * attention["bias"]
    more += f", scores capped at {attention['soft_cap']:g}" if attention.get("soft_cap") else ""
    more += ", a sink for each head" * attention.get("sinks", False)
    windows = [f"{count} layers with a window of {window:,} tokens" for count, window in attention["windows"]]
    windows += [f"{attention['full']} layers without"] * (bool(windows) and attention["full"] > 0)
    lines = [
        "; ".join((f"attention: {attention['kind']}, {heads}{more}", *([", ".join(windows)] if windows else []))),
        f"rope: {_rope(rope, ' (partial)' * (not latent))}",
    ]
    return lines + ([f"router: {_router(router)}"] if router else [])


def _rope(rope: dict[str, Any], partial: str) -> str:
    part, whole = rope["rotary_dim"], rope["head_dim"]
    rotated = f"{part} of {whole} dimensions of a head rotated{partial}"
    words = [*_scaling(rope), f"all {whole} dimensions of a head rotated" if part == whole else rotated]
    others = "".join(f"; layers with a window: {', '.join(_scaling(one))}" for one in rope["others"])
    without = f"; {rope['without']} layers without" if rope["without"] else ""
    return ", ".join(words) + others + without


def _scaling(rope: dict[str, Any]) -> list[str]:
    words = [rope["kind"], f"theta {rope['theta']:,.10g}"]
    if rope["kind"] not in ("default", "none"):
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
