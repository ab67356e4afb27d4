"""The first steps of an engine, before it takes requests: load, compile and record what the first use needs."""

import numpy as np

from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.replicas import Core, Replicas

TOKENS = 3  # of the answer: a step of a prompt, and decodes, of which the second replays what the first recorded


def warm_up(core: Core) -> None:
    """Run a short request on every replica of an engine that has had none. Later requests do not find its blocks."""
    facts = core.facts
    if (tokens := min(TOKENS, facts.max_model_len - 1)) < 1:
        return
    cores = core.cores if isinstance(core, Replicas) else [core]
    for handle in range(len(cores)):
        core.add(
            NewRequest(
                handle=handle,
                request_id="",
                token_ids=np.zeros(1, "<u4").tobytes(),
                max_tokens=tokens,
                sampler=SamplerSpec(seed=0, num_prompt=1, temperature=0.0),
                cache_salt="warm-up",
                read_prefix_cache=False,
            )
        )
    while core.has_work:
        core.step()
    for one in cores:
        one.scheduler.admitter.prefix_queries = 0  # counts what users ask
        one.scheduler.drafts.forget()
