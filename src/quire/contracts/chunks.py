"""Parts of a prompt whose KV may be reused from other positions (CacheBlend), as requests name them."""

from collections.abc import Sequence

import msgspec

from quire.contracts.errors import InvalidParameter
from quire.contracts.request import Transfer
from quire.contracts.sampling import SamplingParams


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
        size, found = len(self.separator), list[int]()
        for at, token in enumerate(token_ids) if size else ():
            if token == self.separator[0] and (not found or at >= found[-1] + size):
                found += [at] if tuple(token_ids[at : at + size]) == self.separator else []
        parts = zip([0, *(at + size for at in found)], [*found, len(token_ids)], strict=True)
        return tuple((first, last) for first, last in parts if first < last) if found else ()


def read_chunks(params: SamplingParams, token_ids: list[int], chunking: Chunking, *, text: bool = False,
                transfer: Transfer | None = None) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Return (first token, end) of a prompt's chunks: `kv_chunks`, or the parts between separators.

    A request that needs every row of the prompt, or shares the prompt's KV with another engine, has none.
    text       True: the prompt was given as a text, whose tokens the caller does not count
    transfer   of the prompt's KV to another engine, or from one
    Raises `InvalidParameter` for parameters that do not fit the prompt, the request or the engine.
    """
    given = params.kv_chunks
    if not chunking.enabled and (given is not None or params.blend_ratio is not None):
        name = "kv_chunks" if given is not None else "blend_ratio"
        raise InvalidParameter(f"{name}: this engine reuses KV at its own positions only: leave the field out, or "
                               "start the engine with --enable-cache-blend.", param=name)
    if given and text:
        raise InvalidParameter("kv_chunks counts tokens, and the prompt is a text: send token ids, or put the engine's "
                               "--blend-separator between the parts of the text.", param="kv_chunks")
    others = ("kv_transfer_params: another engine finds KV by the whole prompt before it" if transfer is not None else
              "prompt_logprobs and echo with logprobs, which need every row of the prompt"
              if params.prompt_logprobs is not None else "")  # fmt: skip
    if given and others:
        raise InvalidParameter(f"kv_chunks excludes {others}: leave one of them out.", param="kv_chunks")
    if given and given[-1][1] > len(token_ids):
        raise InvalidParameter(f"kv_chunks ends at token {given[-1][1]}, and the prompt has {len(token_ids)} tokens: "
                               "send positions in this prompt.", param="kv_chunks")
    if not chunking.enabled or others:
        return ()
    return chunking.between(token_ids) if given is None else tuple((first, last) for first, last in given)
