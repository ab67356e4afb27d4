"""Parts of a request's prompt whose KV may be reused from other positions (CacheBlend)."""

from msgspec import structs

from quire.contracts.chunks import Chunking, no_blending
from quire.contracts.errors import InvalidParameter
from quire.contracts.request import Transfer
from quire.contracts.sampling import SamplingParams
from quire.entry.prompts import Prompt
from quire.entry.transfer import read_transfer
from quire.plan.meeting_rows.records import AskedFields
from quire.plan.meetings import check_fields
from quire.plan.sharing import SharePlan


def read_reuse(
    params: SamplingParams, token_ids: list[int], prompt: Prompt, chunking: Chunking, sharing: SharePlan, size: int
) -> tuple[Transfer | None, tuple[tuple[int, int], ...]]:
    """Return the transfer of a prompt's KV, which knows its first private block, and the prompt's chunks.

    size   tokens of a block
    Raises `InvalidParameter` as `read_transfer` and `read_chunks` do.
    """
    transfer = read_transfer(params.kv_transfer_params, sharing)
    chunks = read_chunks(params, token_ids, chunking, prompt.text is not None, transfer, prompt.chunks)
    if chunks and transfer is not None:
        transfer = structs.replace(transfer, private=chunks[0][0] // size)
    return transfer, chunks


def read_chunks(
    params: SamplingParams,
    token_ids: list[int],
    chunking: Chunking,
    text: bool,
    transfer: Transfer | None,
    marked: tuple[tuple[int, int], ...],
) -> tuple[tuple[int, int], ...]:
    """Return (first token, end) of a prompt's chunks: `marked`, `kv_chunks`, or the parts between separators.

    A request with prompt logprobs needs every row of the prompt, so it reuses no texts: it has none. Nor has one whose
    prompt another engine computes.
    text       True: the prompt was given as a text, whose tokens the caller does not count
    transfer   of the prompt's KV to another engine, or from one
    marked     chunks that are marked content parts of a conversation
    Raises `InvalidParameter` for parameters that do not fit the prompt, the request or the engine.
    """
    given = params.kv_chunks
    if not chunking.enabled and (given is not None or params.blend_ratio is not None):
        raise no_blending("kv_chunks" if given is not None else "blend_ratio")
    whole = (transfer is not None and bool(transfer.address)) or params.prompt_logprobs is not None
    if given or marked:
        check_fields(
            AskedFields(
                chunks="messages" if marked and not (given and text) else "kv_chunks",
                text=text and bool(given),
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
