"""Layout of the KV cache: the components of each layer, and the pages of a rank. Pure arithmetic."""

from quire.args.checkpoint import ModelArgs
from quire.args.layers import MixerArgs
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Rank
from quire.plan.kinds import mixer
from quire.plan.weight_bytes import ITEM_BYTES

CPU_BLOCK_SIZE = 32  # tokens: the best size for the CPU attention kernel (docs/design.md, section 5)
CUDA_BLOCK_SIZE = 128  # tokens: a kernel's tile of keys; smaller tiles divide it
CACHE_BYTES = ITEM_BYTES | {"float8_e4m3fn": 1, "float8_e5m2": 1}


def kv_components(mixer_args: MixerArgs, dtype: str, rank: Rank | None = None) -> tuple[KVComponent, ...]:
    """Return the components of a layer's KV cache, in `dtype`, on a rank; None: of all heads."""
    if dtype not in CACHE_BYTES:
        raise ConfigError(f"a KV cache of dtype {dtype!r} is not possible: use one of {', '.join(CACHE_BYTES)}.")
    return mixer(mixer_args).components(dtype, CACHE_BYTES[dtype], rank)


def rank_geometry(args: ModelArgs, rank: Rank, *, dtype: str, device: str, block_size: int | None) -> KVGeometry:
    """Return the layout of a rank's KV cache. dtype: of the cache; block_size: None: the device's default.

    All ranks have the same groups in the same order, because a request has the same block tables everywhere. A stage
    of a pipeline has its layers of each.
    """
    size = block_size or (CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE)
    drafts = range(args.num_layers, args.num_layers + args.draft_layers * rank.last)
    place_of = {layer: own for own, layer in enumerate((*range(*rank.layers), *drafts))}
    found = list[KVGroup]()
    for layers in layer_groups(args):
        mixer_args = args.layers[layers[0]].mixer
        found.append(
            KVGroup(
                layers=tuple(place_of[layer] for layer in layers if layer in place_of),
                components=kv_components(mixer_args, dtype, rank),
                block_size=size,
                window=mixer(mixer_args).window,
            )
        )
    return KVGeometry(groups=tuple(found))


def layer_groups(args: ModelArgs) -> list[list[int]]:
    """Return the layers of each KV group of a model, those that draft behind its own.

    A group has layers with the same window and components. A page holds a block of the largest group, so a kind with
    many layers is divided: groups have as many layers as the rarest kind has, or as the most frequent one if that has
    less than half as many more. Neighbouring layers of a kind go to different groups, so that the stages of a pipeline
    have equally many of each.
    """
    kinds: dict[MixerArgs, list[int]] = {}
    for layer, one in enumerate(args.layers[: args.num_layers]):
        kinds.setdefault(one.mixer, []).append(layer)
    few, most = (bound(map(len, kinds.values())) for bound in (min, max))
    size = most if most < 1.5 * few else few
    groups = [own[i::num] for own in kinds.values() for num in (-(-len(own) // size),) for i in range(num)]
    for layer in range(args.num_layers, args.num_layers + args.draft_layers):
        alike = [group for group in groups if args.layers[group[0]].mixer == args.layers[layer].mixer]
        if alike:
            min(alike, key=len).append(layer)
        else:
            groups.append([layer])
    return groups


def resolve_geometry(
    components: tuple[KVComponent, ...], num_layers: int, block_size: int | None, default: int = CPU_BLOCK_SIZE
) -> KVGeometry:
    """Return the layout of KV blocks: `components` (keys, values) of all layers, `block_size` or `default` tokens."""
    group = KVGroup(layers=tuple(range(num_layers)), components=components, block_size=block_size or default)
    return KVGeometry(groups=(group,))
