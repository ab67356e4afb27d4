"""Embedding requests, which end with a vector instead of text: their parameters, their outputs, similarity of vectors.

`LLM`, `AsyncLLM` and the server share it.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from quire.args.pooling import PoolingPlan
from quire.contracts.errors import EngineClosed, InvalidParameter, RequestFailed
from quire.contracts.output import EmbeddingOutput, EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.contracts.step import F32
from quire.entry.completion import Generation

TASK = "embed"  # the only task of pooling
TASKS = 'say task "embed": no supported checkpoint has a head that classifies or rewards, or gives a vector per token.'
First, Second = TypeVar("First"), TypeVar("Second")


def embed_params() -> SamplingParams:
    """Return the sampling parameters of a request that generates no tokens."""
    return SamplingParams(temperature=0.0, max_tokens=0, detokenize=False, output_kind=OutputKind.FINAL_ONLY)


def vector_of(generation: Generation, plan: PoolingPlan, dimensions: int | None = None) -> F32:
    """Return the embedding of a finished request: its first `dimensions` numbers (None: all), scaled as `plan` says.
    Raises `RequestFailed` when the request failed, `EngineClosed` when the stopping engine aborted the request."""
    ended = generation.completions[0]
    if ended.finish_reason == "error":
        code = str(ended.stop_reason)
        raise RequestFailed(f"request {generation.request_id} failed: {code}.", code=code)
    if ended.vector is None:
        raise EngineClosed("the request was aborted because the engine is stopping: send it again.")
    return plan.finish(ended.vector, dimensions)


def embedding_output(generation: Generation, plan: PoolingPlan, dimensions: int | None) -> EmbeddingRequestOutput:
    """Make the output of `LLM.embed`. A failed request has an empty embedding and the code of its error."""
    ended = generation.completions[0]
    failed = ended.finish_reason == "error"
    outputs = EmbeddingOutput(
        embedding=[] if failed else vector_of(generation, plan, dimensions).tolist(),
        error=str(ended.stop_reason) if failed else None,
    )
    return EmbeddingRequestOutput(
        request_id=generation.request_id,
        prompt=generation.prompt,
        prompt_token_ids=generation.prompt_token_ids,
        outputs=outputs,
        num_cached_tokens=generation.num_cached,
    )


def pooling_output(one: EmbeddingRequestOutput) -> PoolingRequestOutput:
    """Return the output of `LLM.encode` from that of `LLM.embed`."""
    return PoolingRequestOutput(
        request_id=one.request_id,
        prompt_token_ids=one.prompt_token_ids,
        outputs=PoolingOutput(data=np.array(one.outputs.embedding, np.float32), error=one.outputs.error),
        num_cached_tokens=one.num_cached_tokens,
    )


def paired(first: Sequence[First], second: Sequence[Second]) -> list[tuple[int, int]]:
    """Return the pairs of texts to compare, as (index in `first`, index in `second`). Texts with the same index are a
    pair; a single text in `first` makes a pair with each of `second`. Raises `InvalidParameter` for other lengths."""
    if len(first) not in (1, len(second)) or not first:
        raise InvalidParameter(
            f"{len(first)} texts cannot be compared with {len(second)}: give one text and a list, "
            "or two lists of the same length.",
            param="text_2",
        )
    return [(0 if len(first) == 1 else i, i) for i in range(len(second))]


def likeness(one: F32, other: F32) -> float:
    """Return the cosine similarity of two vectors; 0 when one of them has length 0."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.clip(a @ b / length, -1.0, 1.0)) if length else 0.0
