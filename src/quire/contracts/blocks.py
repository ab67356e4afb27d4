"""Geometry of the paged KV cache: the numbers shared by `kv/` (bookkeeping) and `kvstore/` (bytes)."""

import msgspec

NULL_BLOCK = 0  # reserved: padding reads and writes this block; it is never allocated
PAGE_ALIGN = 256  # bytes; every component of a page starts at a multiple of this


class KVComponent(msgspec.Struct, frozen=True):
    """A tensor of a KV block for each layer of its group, such as keys or values. Layout: `[head][token][dim]`."""

    name: str
    num_heads: int
    head_dim: int
    dtype: str
    item_bytes: int

    def num_bytes(self, block_size: int) -> int:
        """Bytes of this component for one layer in one block of `block_size` tokens, rounded up to PAGE_ALIGN."""
        exact = self.num_heads * block_size * self.head_dim * self.item_bytes
        return -(-exact // PAGE_ALIGN) * PAGE_ALIGN


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A set of layers whose KV has the same lifetime. Each request has one block table per group.

    window   tokens that a query attends to, its own included; None for full attention
    drafts   components of the last `num_drafts` layers, which are those of a draft model
    """

    layers: tuple[int, ...]
    components: tuple[KVComponent, ...]
    window: int | None = None
    drafts: tuple[KVComponent, ...] = ()
    num_drafts: int = 0

    def of(self, layer: int) -> tuple[KVComponent, ...]:
        """Return the components of a layer of the group."""
        return self.drafts if layer in self.layers[len(self.layers) - self.num_drafts :] else self.components

    def num_behind(self, position: int, block_size: int) -> int:
        """Return the number of leading blocks that the window has passed for all queries from `position` on."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a KV block and the groups of layers. A block holds `block_size` tokens of every layer of one group."""

    block_size: int
    groups: tuple[KVGroup, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the memory of a KV block; equal for all groups (checked when the geometry is resolved)."""
        group = self.groups[0]
        return sum(c.num_bytes(self.block_size) for layer in group.layers for c in group.of(layer))

    def request_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks, over all groups, that hold `num_tokens` tokens of a request.

        A group with a window gives blocks back early, so the request may need fewer.
        """
        return len(self.groups) * self.num_blocks(num_tokens)

    def most_tokens(self, num_blocks: int) -> int:
        """Return the length in tokens of the longest request that fits into `num_blocks` blocks over all groups."""
        return num_blocks // len(self.groups) * self.block_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
