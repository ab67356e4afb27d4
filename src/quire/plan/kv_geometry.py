"""Layout of the KV cache: the components of each layer, and the pages of a rank. Pure arithmetic."""

from collections.abc import Collection, Sequence
from math import prod

from quire.args.checkpoint import ModelArgs
from quire.args.layers import MixerArgs
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup, StateComponent, StateGroup
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Rank
from quire.kernels.latent_rows import DS_MLA
from quire.plan.kinds import mixer
from quire.plan.kinds.interfaces import StateTypes
from quire.plan.weight_bytes import ITEM_BYTES

CPU_BLOCK_SIZE = 32  # tokens: the best size for the CPU attention kernel (docs/design.md, section 5)
CUDA_BLOCK_SIZE = 128  # tokens: a kernel's tile of keys; smaller tiles divide it. Parts of divided blocks have half
Kept = tuple[int | None, tuple[KVComponent, ...]]  # window, and components of the cache
CACHE_BYTES = ITEM_BYTES | {"float8_e4m3fn": 1, "float8_e5m2": 1, DS_MLA: 1}


def kv_components(mixer_args: MixerArgs, dtype: str, rank: Rank | None = None) -> tuple[KVComponent, ...]:
    """Return the components of a layer's KV cache, in `dtype`, on a rank; None: of all heads."""
    if dtype not in CACHE_BYTES:
        raise ConfigError(f"a KV cache of dtype {dtype!r} is not possible: use one of {', '.join(CACHE_BYTES)}.")
    return mixer(mixer_args).components(dtype, CACHE_BYTES[dtype], rank)


def rank_geometry(
    args: ModelArgs,
    rank: Rank,
    *,
    dtype: str,
    states: StateTypes | None = None,
    device: str,
    block_size: int | None,
    sizes: Sequence[int] | None = None,
) -> KVGeometry:
    """Return the layout of a rank's KV cache, and of what its layers keep of requests besides.

    dtype        of the cache
    states       types of what layers keep besides; None: inputs have the type of the cache
    block_size   tokens of a rank's part of a block; None: the device's default. `block_sizes` adapts it to each group
    sizes        tokens of a block, by group; None: by `block_size`. Sizes behind those of all groups are ignored
    All ranks have the same groups in the same order, because a request has the same block tables everywhere. A stage
    of a pipeline has its layers of each.
    """
    grouped = layer_groups(args)
    if sizes is None:
        default = CUDA_BLOCK_SIZE // (1 + (rank.dcp > 1)) if device == "cuda" else CPU_BLOCK_SIZE
        own = block_sizes(args, grouped, rank, dtype=dtype, block_size=block_size or default)
        sizes = [rank.dcp * size for size in own]
    behind = range(args.num_layers, args.num_layers + args.draft_layers * rank.last)
    place_of = {layer: own for own, layer in enumerate((*range(*rank.layers), *behind))}
    found = list[KVGroup]()
    for layers, size in zip(grouped, sizes, strict=False):
        kept = {layer: kv_components(args.layers[layer].mixer, dtype, rank) for layer in layers}
        most, here = max(kept.values(), key=len), [layer for layer in layers if layer in place_of]
        found.append(
            KVGroup(
                layers=tuple(place_of[layer] for layer in here),
                components=most,
                block_size=size,
                parts=rank.dcp,
                window=mixer(args.layers[layers[0]].mixer).window,
                fewer=tuple((place_of[one], len(kept[one])) for one in here if len(kept[one]) < len(most)),
            )
        )
    assert len(found) == len(grouped), "each group has a block size"
    return KVGeometry(groups=tuple(found), states=state_groups(args, rank, states or StateTypes(dtype)))


def state_groups(args: ModelArgs, rank: Rank, types: StateTypes) -> tuple[StateGroup, ...]:
    """Return the states of a rank's layers. Layers with equal states are together."""
    found: dict[tuple[StateComponent, ...], list[int]] = {}
    for own, layer in enumerate(range(*rank.layers)):
        for one in args.layers[layer].mixers:
            if components := mixer(one).states(types, rank):
                found.setdefault(components, []).append(own)
    return tuple(StateGroup(layers=tuple(layers), components=parts) for parts, layers in found.items())


def block_sizes(
    args: ModelArgs, grouped: Sequence[Sequence[int]], rank: Rank, *, dtype: str, block_size: int
) -> tuple[int, ...]:
    """Return the tokens of a block of each group of layers, so that blocks fill their pages.

    The group with the most bytes per token has `block_size` tokens. Another one has the largest power of two times as
    many whose block has room in the same page, if also its layers have less per token. Gemma 4 has half as many bytes
    per token in a layer of full attention as in one with a window: its blocks of full attention hold twice the tokens.

    The sizes are those of the whole model, so all stages of a pipeline have the same. Draft layers count where they
    are a group of their own. All layers of a group count as those with the most components.
    """
    counts = [sum(layer < args.num_layers for layer in layers) or len(layers) for layers in grouped]
    most = [max((args.layers[layer].mixer for layer in layers), key=_num_components) for layers in grouped]
    kinds = [kv_components(one, dtype, rank) for one in most]

    def page(group: int, tokens: int) -> int:
        return counts[group] * sum(one.num_bytes(tokens) for one in kinds[group])

    layers = [sum(one.num_heads * one.head_dim * one.item_bytes for one in kind) for kind in kinds]  # bytes of a token
    room = max(page(group, block_size) for group in range(len(grouped)))
    sizes = list[int]()
    for group, (count, layer) in enumerate(zip(counts, layers, strict=True)):
        times = min(max(layers) // layer, max(map(prod, zip(counts, layers, strict=True))) // (count * layer))
        many = 1 << (times.bit_length() - 1)
        while many > 1 and page(group, many * block_size) > room:  # parts of a page are padded
            many //= 2
        sizes.append(many * block_size)
    return tuple(sizes)


def layer_groups(args: ModelArgs) -> list[list[int]]:
    """Return the layers of each KV group of a model, those that draft behind its own.

    A group has layers with the same window and components, whatever else they differ in. A layer with only the first
    of the components of others is in their group: it keeps fewer numbers of the same tokens. A page holds a block of
    the largest group, so a kind with many layers is divided: groups have as many layers as the rarest kind has, or as
    the most frequent one if that has less than half as many more. Neighbouring layers of a kind go to different groups,
    so that the stages of a pipeline have equally many of each. A layer that reads the cache of another one, or keeps
    nothing of tokens, is in no group.
    """
    kinds: dict[Kept, list[int]] = {}
    for layer in range(args.num_layers):
        if args.kept_by(layer) == layer and _kept(args, layer)[1]:
            kinds.setdefault(_kept(args, layer), []).append(layer)
    for kept in sorted(kinds, key=lambda one: len(one[1])):
        if (longer := next((one for one in kinds if _begins(one, kept)), None)) is not None:
            kinds[longer] = sorted((*kinds[longer], *kinds.pop(kept)))
    few, most = (bound(map(len, kinds.values())) for bound in (min, max))
    size = most if most < 1.5 * few else few
    groups = [own[i::num] for own in kinds.values() for num in (-(-len(own) // size),) for i in range(num)]
    for layer in range(args.num_layers, args.num_layers + args.draft_layers):
        alike = [group for group in groups if _joins(_kept(args, layer), {_kept(args, one) for one in group})]
        if alike:
            min(alike, key=len).append(layer)
        else:
            groups.append([layer])
    return groups


def _begins(longer: Kept, kept: Kept) -> bool:
    """Return True if a layer of the kind `longer` keeps the components of `kept`, and others behind them."""
    return longer[0] == kept[0] and len(longer[1]) > len(kept[1]) and longer[1][: len(kept[1])] == kept[1]


def _joins(kept: Kept, group: Collection[Kept]) -> bool:
    """Return True if a layer that keeps `kept` can be in a group of layers that keep these."""
    return kept in group or any(_begins(one, kept) for one in group)


def _num_components(mixer_args: MixerArgs) -> int:
    return len(mixer(mixer_args).components("", 1, None))


def _kept(args: ModelArgs, layer: int) -> Kept:
    """Return what decides on the KV group of a layer: its window, and the components of its cache."""
    kind = mixer(args.layers[layer].mixer)
    return kind.window, kind.components("", 1, None)


def resolve_geometry(
    components: tuple[KVComponent, ...], num_layers: int, block_size: int | None, default: int = CPU_BLOCK_SIZE
) -> KVGeometry:
    """Return the layout of KV blocks: `components` (keys, values) of all layers, `block_size` or `default` tokens."""
    group = KVGroup(layers=tuple(range(num_layers)), components=components, block_size=block_size or default)
    return KVGeometry(groups=(group,))
