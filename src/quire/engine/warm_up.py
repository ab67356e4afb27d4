"""The first steps of an engine, before it takes requests: load, compile and record what the first use needs."""

from contextlib import suppress

import numpy as np

from quire.contracts.errors import InvalidParameter
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.structured import StructuredOutputsParams
from quire.engine.replicas import Core, Replicas

TOKENS = 3  # of the answer: a step of a prompt, and decodes, of which the second replays what the first recorded
GRAMMAR = StructuredOutputsParams(json_object=True)  # its process starts, and llguidance is loaded, beside the steps


def warm_up(core: Core) -> None:
    """Run short requests on every replica of an engine that has had none, one of them with a grammar where the engine
    has a tokenizer. Later requests do not find their blocks."""
    facts = core.facts
    if (tokens := min(TOKENS, facts.max_model_len - 1)) < 1:
        return
    cores = core.cores if isinstance(core, Replicas) else [core]
    for handle in range(len(cores)):
        core.add(_request(handle, tokens, None))
    for handle in range(len(cores), 2 * len(cores)):
        with suppress(InvalidParameter):  # there is no tokenizer
            core.add(_request(handle, tokens, GRAMMAR.spec()), places=0)
    while core.has_work:
        core.step()
    for one in cores:
        one.scheduler.admitter.prefix_queries = 0  # counts what users ask
        one.scheduler.drafts.forget()


def _request(handle: int, tokens: int, grammar: str | None) -> NewRequest:
    return NewRequest(
        handle=handle,
        request_id="",
        token_ids=np.zeros(1, "<u4").tobytes(),
        max_tokens=tokens,
        min_tokens=tokens if grammar is None else 0,
        sampler=SamplerSpec(seed=0, num_prompt=1, temperature=0.0),
        cache_salt="warm-up",
        read_prefix_cache=False,
        grammar=grammar,
    )
