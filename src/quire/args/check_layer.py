"""The layer at which a step with reused texts (CacheBlend) chooses the tokens that it computes in all layers."""

from quire.args.checkpoint import ModelArgs


def check_layer(args: ModelArgs) -> int:
    """Return the last layer that computes all tokens. It shows how far their moved KV is from new KV.

    It is the first layer with KV of its own behind a layer with full attention: behind windows alone, only the first
    tokens of a text differ. Layer 1 if no such layer has another one behind it.
    """
    full = [layer for layer, one in enumerate(args.layers) if getattr(one.mixer, "window", None) is None]
    behind = range(full[0] + 1 if full else 1, args.num_layers - 1)
    return next((layer for layer in behind if args.kept_by(layer) == layer), 1)
