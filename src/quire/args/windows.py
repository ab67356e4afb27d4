"""Reader of the rules of single layers in config.json: which have a window or chunks, and which rotate. No torch."""

from collections.abc import Collection
from typing import NamedTuple

from quire.args.families import Family
from quire.args.keys import Keys

KINDS = {
    "full_attention": False,
    "attention": False,
    "sliding_attention": True,
}  # names in layer_types -> the layer has the window
CHUNK_KINDS = {"full_attention": False, "chunked_attention": True}  # -> the layer attends in chunks


class LayerRule(NamedTuple):
    """The rule of a layer's attention.

    sliding   the layer is one of those with a window or chunks, be they as long as the context
    window    as in `GroupedArgs`
    rotated   it rotates queries and keys by their positions (RoPE)
    """

    sliding: bool
    window: int | None
    rotated: bool


def read_layer_rules(keys: Keys, family: Family, context: int, num_layers: int) -> tuple[LayerRule, ...]:
    """Return the rule of each layer. Raises ModelError or UnsupportedModel.

    context   most tokens of a sequence; a window of as many changes nothing
    """
    limit = keys.count("max_window_layers", 28) or 0
    listed = _listed(keys, family, num_layers)
    if family.window.chunk:
        return _chunk_rules(keys, family.window.chunk, context, listed, num_layers)
    window = keys.count("sliding_window", family.window.default)
    named = keys.names("layer_types")
    if other := sorted(set(named) - KINDS.keys()):
        raise keys.unsupported(f"layer_types holds {other[0]!r}, which is not implemented: use another model.")
    off = window is None or (family.window.by_flag and not keys.get("use_sliding_window"))
    if window == 0 and not off:
        raise keys.wrong("sliding_window=0 lets a token attend to nothing: give its length, or null for none.")
    short = not off and window is not None and window < context
    sliding: Collection[int] = ()
    if off and family.heads.by_kind:
        raise keys.wrong("sliding_window=null leaves open which layers have a window: give its length.")
    if short or (not off and (family.window.plain or family.heads.unrotated in ("listed", "without window", "full"))):
        sliding = _sliding(keys, family, limit, listed)
    unrotated: Collection[int] = listed if family.heads.unrotated == "listed" else ()
    if family.heads.unrotated == "all" or (family.heads.unrotated == "unless named" and not _named_rope(keys)):
        unrotated = range(num_layers)
    if family.heads.unrotated == "without window" or (family.heads.unrotated == "full" and not off):
        unrotated = [layer for layer in range(num_layers) if layer not in sliding]
    return tuple(
        LayerRule(layer in sliding, window if short and layer in sliding else None, layer not in unrotated)
        for layer in range(num_layers)
    )


def _named_rope(keys: Keys) -> bool:
    """True if position_embedding_type is "rope"."""
    fits = lambda value: value in (None, "rope", "nope")  # noqa: E731
    return bool(keys.checked("position_embedding_type", fits, '"rope", "nope" or null') == "rope")


def _chunk_rules(
    keys: Keys, default: int, context: int, unrotated: Collection[int], num_layers: int
) -> tuple[LayerRule, ...]:
    """Return the rules of layers that attend in chunks where they rotate heads, unless layer_types says otherwise.

    default   attention_chunk_size when config.json lacks the key; null: no layer attends in chunks
    """
    chunk, named = keys.count("attention_chunk_size", default), keys.names("layer_types")
    if chunk == 0:
        raise keys.wrong("attention_chunk_size=0 lets a token attend to nothing: give its length, or null for none.")
    if other := sorted(set(named) - CHUNK_KINDS.keys()):
        raise keys.unsupported(f"layer_types holds {other[0]!r}, which is not implemented: use another model.")
    if named and len(named) < num_layers:
        raise keys.wrong(f"layer_types names {len(named)} of {num_layers} layers: correct the file.")
    chunked = [CHUNK_KINDS[named[i]] if named else bool(chunk) and i not in unrotated for i in range(num_layers)]
    if any(chunked) and chunk is None:
        raise keys.wrong("attention_chunk_size=null leaves open the chunks of layer_types: give their length.")
    window = -chunk if chunk is not None and chunk < context else None
    return tuple(LayerRule(own, window if own else None, i not in unrotated) for i, own in enumerate(chunked))


def _sliding(keys: Keys, family: Family, limit: int, unrotated: Collection[int]) -> Collection[int]:
    """Return the layers with the window. limit: max_window_layers; unrotated: layers without RoPE by no_rope_layers."""
    rule, num_layers, named = family.window, keys.size("num_hidden_layers"), keys.names("layer_types")
    if rule.layers == "" or (rule.layers == "all" and len(set(named)) > 1):
        what = "layer_types of two kinds" if rule.layers else f"sliding_window={keys.get('sliding_window')}"
        raise keys.unsupported(f"{what} is not implemented for this family, which has no such rule: use another model.")
    if named and rule.layers != "all":
        if len(named) < num_layers:
            raise keys.wrong(f"layer_types names {len(named)} of {num_layers} layers: correct the file.")
        return [layer for layer in range(num_layers - rule.last_full) if KINDS[named[layer]]]
    if rule.layers == "between":
        return [layer for layer in _between(keys, rule.period, num_layers) if layer < num_layers - rule.last_full]
    own: dict[str, Collection[int]] = {
        "all": range(num_layers),
        "each": range(num_layers),
        "unrotated": unrotated,
        "from": range(limit, num_layers),
        "even below": range(0, limit, 2),
    }
    return own[rule.layers]


def _between(keys: Keys, period: int, num_layers: int) -> Collection[int]:
    """Return the layers between full ones: each `sliding_window_pattern`-th is full, or those with a G in it."""
    pattern = keys.get("sliding_window_pattern", period)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # the last layer is always full
        return [layer for layer in range(num_layers - 1) if pattern[layer % len(pattern)] == "L"]
    every = keys.size("sliding_window_pattern", period)
    return [layer for layer in range(num_layers) if (layer + 1) % every]


def _listed(keys: Keys, family: Family, num_layers: int) -> Collection[int]:
    """Return the layers that no_rope_layers names as such, or each `no_rope_layer_interval`-th."""
    if family.heads.unrotated != "listed":
        return ()
    every = keys.size("no_rope_layer_interval", 4)
    listed = keys.checked(
        "no_rope_layers",
        lambda value: not value or (isinstance(value, list) and len(value) >= num_layers and _bits(value)),
        f"a list of {num_layers} numbers, 1 for a layer with RoPE and 0 for one without",
    )
    return [layer for layer in range(num_layers) if not (listed[layer] if listed else (layer + 1) % every)]


def _bits(values: list[object]) -> bool:
    return all(type(one) is int and one in (0, 1) for one in values)
