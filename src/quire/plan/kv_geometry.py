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

    Layers with equal components form a group.
    """
    size = block_size or (CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE)
    drafts = range(args.num_layers, args.num_layers + args.draft_layers * rank.last)
    groups: dict[tuple[KVComponent, ...], list[int]] = {}
    for own, layer in enumerate((*range(*rank.layers), *drafts)):
        groups.setdefault(kv_components(args.layers[layer].mixer, dtype, rank), []).append(own)
    found = (
        KVGroup(layers=tuple(layers), components=components, block_size=size) for components, layers in groups.items()
    )
    return KVGeometry(groups=tuple(found))


def resolve_geometry(
    components: tuple[KVComponent, ...], num_layers: int, block_size: int | None, default: int = CPU_BLOCK_SIZE
) -> KVGeometry:
    """Return the layout of KV blocks: `components` (keys, values) of all layers, `block_size` or `default` tokens."""
    group = KVGroup(layers=tuple(range(num_layers)), components=components, block_size=block_size or default)
    return KVGeometry(groups=(group,))
