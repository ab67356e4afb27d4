"""Reports about prefix cache misses."""

from enum import StrEnum

import msgspec


class Miss(StrEnum):
    """Reason why a block of a prompt was not reused."""

    NEW = "new"  # no remembered prompt with the same beginning has a block there
    TOKENS = "tokens"  # remembered prompts with the same beginning have other tokens in this block
    EXTRAS = "extras"  # a remembered prompt has the same tokens under another salt or adapter
    NAMESPACE = "namespace"  # a remembered prompt has the same tokens for another model, cache dtype or block size
    DROPPED = "dropped"  # the block left the cache; `detail`: evicted (its memory was needed), reset or distrusted
    PENDING = "pending"  # a remembered prompt has this block: not computed yet, or dropped too long ago to be known
    LIMIT = "limit"  # no block was missing: the last token, and prompt rows to be scored, are always computed
    STATE = "state"  # the block is cached, but recurrent layers have no checkpoint of their state there
    OFF = "off"  # the request, or the engine, does not read the prefix cache


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on a prompt whose full blocks did not all come from the prefix cache.

    num_reused, num_blocks   reused blocks, and full blocks of the prompt
    block, position          index of the first block that was not reused, and the position of its first token
    nearest      request id of the remembered prompt that explains the miss; "" if there is none
    differs_at   for `Miss.TOKENS`: position of the first token that differs from the nearest prompt
    detail       for `Miss.EXTRAS`: names, not values, of the properties that differ, such as "salt";
                 for `Miss.DROPPED`: "evicted", "reset" or "distrusted" (the block's KV may be wrong)
                 for `Miss.STATE`: reason why the last known checkpoint there cannot be used: "evicted", "reset",
                 "distrusted", or "pending" (a running request takes it or holds it); "none": none was taken there
    seconds      for `Miss.DROPPED`: time since the block was dropped; for `Miss.STATE`: since the checkpoint was
    num_cached   for `Miss.STATE`: tokens whose blocks are cached
    """

    num_reused: int
    num_blocks: int
    block: int
    position: int
    why: Miss
    nearest: str = ""
    differs_at: int | None = None
    detail: str = ""
    seconds: float | None = None
    num_cached: int = 0

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        near = f", nearest {self.nearest}" if self.nearest else ""
        where = f", tokens differ at {self.differs_at}" if self.differs_at is not None else ""
        return f"from block {self.block} on: {self.why}{detail}{near}{where}"
