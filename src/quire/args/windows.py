"""Reader of sliding windows in config.json: which layers have one, and its length. No torch."""

from quire.args.families import Family
from quire.args.keys import Keys

KINDS = {"full_attention": False, "sliding_attention": True}  # names in layer_types -> the layer has the window


def read_windows(keys: Keys, family: Family, context: int, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, the attending token included; None: full attention.

    context   most tokens of a sequence; a window of as many changes nothing
    Raises ModelError or UnsupportedModel.
    """
    named = keys.names("layer_types")
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
        "from": range(limit, num_layers),
        "even below": range(0, limit, 2),
    }[rule.layers]
    return tuple(window if layer in own else None for layer in range(num_layers))
