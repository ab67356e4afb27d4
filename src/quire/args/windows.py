"""Reader of what config.json says of single layers: which have a sliding window, and which rotate heads. No torch."""

from quire.args.families import Family
from quire.args.keys import Keys

KINDS = {"full_attention": False, "sliding_attention": True}  # names in layer_types -> the layer has the window


def read_windows(keys: Keys, family: Family, context: int, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, the attending token included; None: full attention.

    context   most tokens of a sequence; a window of as many changes nothing
    rotated   of each layer, see `read_rotated`
    Raises ModelError or UnsupportedModel.
    """
    named, num_layers = keys.names("layer_types"), len(rotated)
    if other := sorted(set(named) - KINDS.keys()):
        raise keys.unsupported(f"layer_types holds {other[0]!r}, which is not implemented: use another model.")
    rule, window = family.window, keys.count("sliding_window", family.window.default)
    limit = keys.count("max_window_layers", 28) or 0
    if window is None or window >= context or (rule.by_flag and not keys.get("use_sliding_window")):
        return (None,) * num_layers
    if window == 0:
        raise keys.wrong("sliding_window=0 lets a token attend to nothing: give its length, or null for none.")
    if rule.layers == "" or (rule.layers == "all" and len(set(named)) > 1):
        what = "layer_types of two kinds" if rule.layers else f"sliding_window={window}"
        raise keys.unsupported(f"{what} is not implemented for this family, which has no such rule: use another model.")
    if named and rule.layers != "all":
        if len(named) < num_layers:
            raise keys.wrong(f"layer_types names {len(named)} of {num_layers} layers: correct the file.")
        return tuple(window if KINDS[one] else None for one in named[:num_layers])
    own = {
        "all": range(num_layers),
        "each": range(num_layers),
        "unrotated": [layer for layer, turns in enumerate(rotated) if not turns],
        "from": range(limit, num_layers),
        "even below": range(0, limit, 2),
    }[rule.layers]
    return tuple(window if layer in own else None for layer in range(num_layers))


def read_rotated(keys: Keys, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return, of each layer, True if it rotates queries and keys by their positions (RoPE). Raises ModelError."""
    if "no_rope_layers" not in family.keys:
        return (True,) * num_layers
    every = keys.size("no_rope_layer_interval", 4)
    listed = keys.checked(
        "no_rope_layers",
        lambda value: not value or (isinstance(value, list) and len(value) >= num_layers and set(value) <= {0, 1}),
        f"a list of {num_layers} numbers, 1 for a layer with RoPE and 0 for one without",
    )
    return tuple(bool(listed[layer]) if listed else (layer + 1) % every > 0 for layer in range(num_layers))
