"""Reader of the kinds of layers of families with recurrent layers: which are recurrent, and their sizes. No torch."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from quire.args.delta import read_delta, read_kimi, read_olmo
from quire.args.keys import Keys
from quire.args.layers import RecurrentArgs
from quire.args.mamba import read_falcon, read_granite, read_nemotron
from quire.args.shortconv import read_shortconv

# Words in layer_types -> the layer is recurrent. LFM2 alone has "conv".
WORDS: Mapping[str, bool] = {
    "linear_attention": True,
    "mamba": True,
    "conv": True,
    "full_attention": False,
    "attention": False,
}
FEED_FORWARDS = ("mlp", "moe")  # further words of Nemotron-H, whose layers are one thing alone
# `Family.recurrent` -> reader of the sizes of its recurrent layers.
READERS: Mapping[str, Callable[[Keys], RecurrentArgs]] = {
    "qwen3_next": partial(read_delta, family="qwen3_next"),
    "qwen3_5": partial(read_delta, family="qwen3_5"),
    "olmo_hybrid": read_olmo,
    "kimi_linear": read_kimi,
    "lfm2": read_shortconv,
    "granitemoehybrid": read_granite,
    "nemotron_h": read_nemotron,
    "falcon_h1": read_falcon,
}


def read_recurrent(keys: Keys, family: str, num_layers: int) -> frozenset[int]:
    """Return the numbers of the recurrent layers of a family, a key of `READERS`.

    Without layer_types: all layers but those that attend by the family's own keys. Raises ModelError or
    UnsupportedModel.
    """
    named = keys.names("layer_types")
    if not named:
        found = frozenset(range(num_layers)) - frozenset(_attending(keys, family, num_layers))
        return _with_attention(keys, found, num_layers)
    known = WORDS.keys() - ({"conv"} if family != "lfm2" else set())
    known |= set(FEED_FORWARDS) if family == "nemotron_h" else set()
    if other := sorted(set(named) - known):
        raise keys.unsupported(f"layer_types holds {other[0]!r}, which is not implemented: use another model.")
    if len(named) < num_layers:
        raise keys.wrong(f"layer_types names {len(named)} of {num_layers} layers: correct the file.")
    found = frozenset(i for i in range(num_layers) if WORDS.get(named[i]))
    return _with_attention(keys, found, num_layers - sum(word in FEED_FORWARDS for word in named[:num_layers]))


def state_notes(keys: Keys) -> Iterator[str]:
    """Yield a note about a type of states in config.json that is not the type in which layers keep them by default."""
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if (value := keys.get(key)) not in (None, "float32"):
            yield (
                f"{key}={value!r} is not followed: recurrent layers keep their matrices in float32, unless "
                "--mamba-ssm-cache-dtype says otherwise"
            )


def _with_attention(keys: Keys, found: frozenset[int], num_mixers: int) -> frozenset[int]:
    if len(found) == num_mixers:
        raise keys.unsupported("a model of recurrent layers alone is not implemented: use one with attention, too.")
    return found


def _attending(keys: Keys, family: str, num_layers: int) -> Collection[int]:
    """Return the layers with attention where layer_types is missing."""
    if family == "lfm2":
        fits = lambda value: value is None or _numbers(value)  # noqa: E731
        listed = keys.checked("full_attn_idxs", fits, "a list of layers, or null")
        return range(num_layers) if listed is None else listed
    if family == "granitemoehybrid":
        return ()
    if family == "olmo_hybrid":
        return range(3, num_layers, 4) or (num_layers - 1,)
    if family == "kimi_linear":
        return _kimi_attending(keys, num_layers)
    every = keys.size("full_attention_interval", 4)
    return range(every - 1, num_layers, every)


def _kimi_attending(keys: Keys, num_layers: int) -> Collection[int]:
    """Return the layers of Kimi-Linear with attention. Its lists count layers from 1."""
    inner = Keys(keys.object("linear_attn_config") or {}, f"{keys.source}: linear_attn_config")
    lists = [
        inner.checked(key, lambda value: value is None or _numbers(value), "a list of layers, or null")
        for key in ("full_attn_layers", "kda_layers")
    ]
    if lists == [None, None]:
        return range(4, num_layers, 4)
    full, recurrent = (one or [] for one in lists)
    if sorted(full + recurrent) != list(range(1, num_layers + 1)):
        raise inner.wrong(
            f"full_attn_layers and kda_layers must together name each of the layers 1 to {num_layers} once."
        )
    return [layer - 1 for layer in full]


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
