"""Why a prompt was not taken from the prefix cache as far as it could be."""

from enum import StrEnum

import msgspec


class Miss(StrEnum):
    """Why a block of a prompt was not reused."""

    NEW = "new"  # after the same beginning, no remembered prompt has a block there
    TOKENS = "tokens"  # those that have one have other tokens in it
    EXTRAS = "extras"  # a remembered prompt has the same tokens under another salt or adapter
    NAMESPACE = "namespace"  # or of another model, cache type or block size
    DROPPED = "dropped"  # it was there: `detail` says evicted (its block was needed), reset or distrusted
    PENDING = "pending"  # a remembered prompt has it, and it was not computed yet, or dropped too long ago to be known
    LIMIT = "limit"  # nothing broke: the last token, and prompt rows to be scored, are always computed
    OFF = "off"  # the request, or the engine, reuses nothing


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why not all full blocks of a prompt came from the prefix cache.

    num_reused, num_blocks   blocks that did, and full blocks of the prompt
    block, position          the first block that did not, and its first token's position
    nearest      request id of the remembered prompt that this is said by; "" where it is by none
    differs_at   TOKENS: position of the first token that differs from the nearest prompt's
    detail       EXTRAS: the tags that differ, without their values;  DROPPED: how;  seconds since then
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
