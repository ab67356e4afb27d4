"""Parts of a prompt whose KV may be reused from other positions (CacheBlend), as requests name them."""

from collections.abc import Sequence

import msgspec

from quire.contracts.errors import InvalidParameter


class Chunking(msgspec.Struct, frozen=True):
    """An engine's way to find chunks in prompts.

    enabled     False: KV is reused at its own positions only
    ratio       share of reused tokens that is computed again, unless a request says
    separator   tokens between parts of a prompt that are chunks; (): only `kv_chunks` names chunks
    """

    enabled: bool = False
    ratio: float = 0.0
    separator: tuple[int, ...] = ()

    def between(self, token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return (first token, end) of the parts between separators; () for a prompt without a separator."""
        prompt, separator = ("".join(map(chr, ids)) for ids in (token_ids, self.separator))  # str.split is fast
        parts, at = list[tuple[int, int]](), 0
        for part in prompt.split(separator) if separator and separator in prompt else ():
            if part:
                parts.append((at, at + len(part)))
            at += len(part) + len(separator)
        return tuple(parts)


def no_blending(name: str, param: str = "") -> InvalidParameter:
    """Return the error for a field that an engine without CacheBlend cannot serve. param: "": the field itself."""
    return InvalidParameter(
        f"{name}: this engine reuses KV at its own positions only: leave the field out, or start "
        "the engine with --enable-cache-blend.",
        param=param or name,
    )
