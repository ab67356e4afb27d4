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
        prompt, separator = ("".join(map(chr, ids)) for ids in (token_ids, self.separator))  # str.split is fast
        parts, at = list[tuple[int, int]](), 0
        for part in prompt.split(separator) if separator and separator in prompt else ():
            if part:
                parts.append((at, at + len(part)))
            at += len(part) + len(separator)
        return tuple(parts)


def read_chunks(
    params: SamplingParams,
    token_ids: list[int],
    chunking: Chunking,
    text: bool,
    transfer: Transfer | None,
    marked: tuple[tuple[int, int], ...],
) -> tuple[tuple[int, int], ...]:
    """Return (first token, end) of a prompt's chunks: `marked`, `kv_chunks`, or the parts between separators.

    A request that needs every row of the prompt, or shares the prompt's KV with another engine, has none.
    text       True: the prompt was given as a text, whose tokens the caller does not count
    transfer   of the prompt's KV to another engine, or from one
    marked     chunks that are marked content parts of a conversation
    Raises `InvalidParameter` for parameters that do not fit the prompt, the request or the engine.
    """
    given = params.kv_chunks
    if not chunking.enabled and (given is not None or params.blend_ratio is not None):
        raise no_blending("kv_chunks" if given is not None else "blend_ratio")
    if given and text:
        raise InvalidParameter(
            "kv_chunks counts tokens, and the prompt is a text: send token ids, put the engine's "
            "--blend-separator between the parts of the text, or mark content parts of messages "
            'with "kv_chunk": true.',
            param="kv_chunks",
        )
    others = (
        "kv_transfer_params: another engine finds KV by the whole prompt before it"
        if transfer is not None
        else "prompt_logprobs and echo with logprobs, which need every row of the prompt"
        if params.prompt_logprobs is not None
        else ""
    )
    if others and (given or marked):
        name, param = ('"kv_chunk": true in messages', "messages") if marked else ("kv_chunks", "kv_chunks")
        raise InvalidParameter(f"{name} excludes {others}: leave one of them out.", param=param)
    if given and given[-1][1] > len(token_ids):
        raise InvalidParameter(
            f"kv_chunks ends at token {given[-1][1]}, and the prompt has {len(token_ids)} tokens: "
            "send positions in this prompt.",
            param="kv_chunks",
        )
    if not chunking.enabled or others:
        return ()
    return marked or (chunking.between(token_ids) if given is None else tuple((first, last) for first, last in given))


def no_blending(name: str, param: str = "") -> InvalidParameter:
    """Return the error for a field that an engine without CacheBlend cannot serve. param: "": the field itself."""
    return InvalidParameter(
        f"{name}: this engine reuses KV at its own positions only: leave the field out, or start "
        "the engine with --enable-cache-blend.",
        param=param or name,
    )
