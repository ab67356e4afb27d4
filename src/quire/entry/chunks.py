"""Parts of a request's prompt whose KV may be reused from other positions (CacheBlend)."""

from quire.contracts.chunks import Chunking, no_blending
from quire.contracts.errors import InvalidParameter
from quire.contracts.request import Transfer
from quire.contracts.sampling import SamplingParams
from quire.plan.meeting_rows.records import AskedFields
from quire.plan.meetings import check_fields


def read_chunks(
    params: SamplingParams,
    token_ids: list[int],
    chunking: Chunking,
    text: bool,
    transfer: Transfer | None,
    marked: tuple[tuple[int, int], ...],
) -> tuple[tuple[int, int], ...]:
    """Return (first token, end) of a prompt's chunks: `marked`, `kv_chunks`, or the parts between separators.

    A request with prompt logprobs needs every row of the prompt, so it reuses no texts: it has none. Nor has one that
    shares the prompt's KV with another engine.
    text       True: the prompt was given as a text, whose tokens the caller does not count
    transfer   of the prompt's KV to another engine, or from one
    marked     chunks that are marked content parts of a conversation
    Raises `InvalidParameter` for parameters that do not fit the prompt, the request or the engine.
    """
    given = params.kv_chunks
    if not chunking.enabled and (given is not None or params.blend_ratio is not None):
        raise no_blending("kv_chunks" if given is not None else "blend_ratio")
    whole = transfer is not None or params.prompt_logprobs is not None
    if given or marked:
        check_fields(
            AskedFields(
                chunks="messages" if marked and not (given and text) else "kv_chunks",
                text=text and bool(given),
                transfer=transfer is not None,
            )
        )
    if given and given[-1][1] > len(token_ids):
        raise InvalidParameter(
            f"kv_chunks ends at token {given[-1][1]}, and the prompt has {len(token_ids)} tokens: "
            "send positions in this prompt.",
            param="kv_chunks",
        )
    if not chunking.enabled or whole:
        return ()
    return marked or (chunking.between(token_ids) if given is None else tuple((first, last) for first, last in given))
