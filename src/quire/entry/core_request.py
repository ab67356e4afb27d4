"""Requests of the core, from a prompt's token ids and its parameters: checks, and the specification of the sampler.

Functions of their arguments: they keep nothing. `FrontEnd.start` calls them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.contracts.chunks import Chunking
from quire.contracts.errors import InvalidParameter, PromptTooLong, listed, shown
from quire.contracts.request import NewRequest
from quire.contracts.sampling import BIAS_LIMIT, COLDEST, SamplerSpec, SamplingParams
from quire.contracts.seeds import child_seed
from quire.contracts.step import F32
from quire.plan.meeting_rows.records import AskedFields
from quire.plan.meetings import check_fields
from quire.plan.sharing import SharePlan
from quire.text.tokenizer import Tokenizer

LONGEST = 1e9  # longest timeout of a request, in seconds


@dataclass(frozen=True, kw_only=True)
class FrontLimits:
    """Limits of an engine. Requests are checked against them.

    by_priority   requests may have a priority (scheduling_policy="priority")
    num_drafts    most drafts that a step verifies for a request
    sharing       part of the engine among others
    block_size    tokens per KV block
    chunking      way to find parts of prompts that reuse KV of other positions
    width         numbers of a prompt's embedding; 0: prompts are text or token ids alone
    processors    requests may have logits processors
    """

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    eos_ids: tuple[int, ...] = ()
    by_priority: bool = False
    num_drafts: int = 0
    sharing: SharePlan = SharePlan()
    block_size: int = 1
    chunking: Chunking = Chunking()
    width: int = 0
    processors: bool = False


def check_options(priority: int, timeout: float | None, limits: FrontLimits) -> None:
    """Raise `InvalidParameter` for a priority that cannot be used, or for a timeout that is not a number of seconds."""
    given: Any = priority  # callers may pass any type
    if not isinstance(given, int) or isinstance(given, bool) or not -(2**31) <= given < 2**31:
        raise InvalidParameter(f"priority={shown(given)}: must be a 32-bit integer.", param="priority")
    if given and not limits.by_priority:
        raise InvalidParameter(
            f"priority={given} needs scheduling_policy='priority'; this engine serves first come, first served.",
            param="priority",
        )
    seconds: Any = 1.0 if timeout is None else timeout
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST:
        raise InvalidParameter(f"timeout={shown(timeout)}: must be seconds, above 0 and at most 1e9.", param="timeout")


def check_request(
    params: SamplingParams,
    token_ids: list[int],
    limits: FrontLimits,
    tokenizer: Tokenizer | None,
    embeds: F32 | None = None,
) -> None:
    """Raise a `RequestError` for a prompt or for parameters that an engine with these limits cannot serve."""
    if not token_ids:
        raise InvalidParameter("the prompt is empty: give at least one token.", param="prompt")
    if embeds is not None:
        _check_embeds(embeds, params, limits)
    if params.logits_processors and not limits.processors:
        raise InvalidParameter(
            "logits_processors are functions, which run in the process of the model alone: use LLM with one rank (no "
            "-tp, -pp or -dp, no device=mock), or logit_bias, allowed_token_ids and bad_words.",
            param="logits_processors",
        )
    if len(token_ids) + (params.max_tokens != 0) > limits.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(token_ids)} tokens and the context {limits.max_model_len}: "
            "shorten the prompt, or raise max_model_len."
        )
    for name, values in (
        ("prompt_token_ids", token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
        ("logprob_token_ids", params.logprob_token_ids),
    ):
        check_ids(name, values or (), limits.vocab_size)
    for name, k in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if k is not None and limits.max_logprobs >= 0 and (k > limits.max_logprobs or k < 0):
            raise InvalidParameter(
                f"{name}={shown(k)} exceeds this engine's max_logprobs={limits.max_logprobs}: "
                "ask for fewer, or start the engine with a higher max_logprobs.",
                param=name,
            )
    if (params.speculative_tokens or 0) > limits.num_drafts:
        raise InvalidParameter(
            f"speculative_tokens={shown(params.speculative_tokens)} exceeds this engine's "
            f"{limits.num_drafts} drafts: ask for fewer, or start the engine with a "
            "--speculative-config of more.",
            param="speculative_tokens",
        )
    for name, given in (
        ("stop", params.stop_strings),
        ("bad_words", params.bad_words),
        ("structured_outputs", params.structured_outputs),
    ):
        if given and tokenizer is None:
            raise InvalidParameter(
                f"{name} needs a tokenizer, and this engine has none (skip_tokenizer_init): leave {name} out.",
                param=name,
            )


def _check_embeds(embeds: F32, params: SamplingParams, limits: FrontLimits) -> None:
    """Raise `InvalidParameter` for a prompt [tokens, hidden] that an engine with these limits cannot serve."""
    if not limits.width:
        raise InvalidParameter(
            "prompt_embeds: this engine takes texts and token ids: start it with --enable-prompt-embeds "
            "(enable_prompt_embeds=True).",
            param="prompt_embeds",
        )
    if embeds.shape[1] != limits.width:
        raise InvalidParameter(
            f"prompt_embeds has {embeds.shape[1]} numbers for each token: this model takes {limits.width}.",
            param="prompt_embeds",
        )
    check_fields(
        AskedFields(
            embeds=True,
            chunks="kv_chunks" if params.kv_chunks else "",
            transfer=params.kv_transfer_params is not None,
            prompt_logprobs=params.prompt_logprobs is not None,
            repetition=params.repetition_penalty != 1.0,
        )
    )


def check_ids(name: str, ids: Collection[int], size: int) -> None:
    """Raise `InvalidParameter` for ids, in the field `name`, outside a vocabulary of `size` tokens."""
    if ids and not (0 <= min(ids) and max(ids) < size):
        wrong = [token for token in ids if not 0 <= token < size]
        raise InvalidParameter(
            f"{name} holds {listed(wrong)}, outside the vocabulary of {size} tokens (0 to "
            f"{size - 1}): send ids of this model.",
            param=name,
        )


def check_first_token(params: SamplingParams, spec: SamplerSpec, vocab_size: int) -> None:
    """Raise `InvalidParameter` when the request forbids every possible first token."""
    words = {word[0] for word in spec.bad_words if len(word) == 1}
    ends = set(spec.stop_ids) if params.min_tokens else set[int]()
    allowed, forbidden = set(spec.allowed_ids), words | ends
    if params.max_tokens == 0 or (allowed - forbidden if allowed else len(forbidden) < vocab_size):
        return
    names = ["allowed_token_ids"] * bool(allowed) + ["bad_words"] * bool(words & allowed if allowed else words)
    names += ["min_tokens"] * bool(ends & allowed if allowed else ends)
    why = f" (stop_token_ids and end tokens cannot come before {params.min_tokens} others)" * ("min_tokens" in names)
    raise InvalidParameter(
        f"{' and '.join(names)}{why}: no token is left that the answer could begin with. Allow "
        "another token, or leave one of these fields out.",
        param=names[0],
    )


def sampler_spec(
    params: SamplingParams,
    seed: int,
    num_prompt: int,
    stop_ids: tuple[int, ...],
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> SamplerSpec:
    """Return the parameters of a checked request as the sampler reads them.

    num_prompt   number of prompt tokens
    stop_ids     tokens that end the completion
    """
    greedy = params.greedy
    bias = {i: max(-BIAS_LIMIT, min(BIAS_LIMIT, b)) for i, b in (params.logit_bias or {}).items()}
    bad_words: tuple[tuple[int, ...], ...] = ()
    if params.bad_words:
        assert tokenizer is not None
        bad_words = tokenizer.bad_word_ids(params.bad_words)
    return SamplerSpec(
        seed=seed,
        num_prompt=num_prompt,
        temperature=0.0 if greedy else max(params.temperature, COLDEST),
        top_k=0 if greedy else min(max(params.top_k, 0), vocab_size),
        top_p=1.0 if greedy else params.top_p,
        min_p=0.0 if greedy else params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_length=num_prompt + params.min_tokens,
        stop_ids=stop_ids,
        logit_bias=tuple(sorted(bias.items())),
        allowed_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=bad_words,
        num_logprobs=params.logprobs,
        logprob_ids=tuple(params.logprob_token_ids or ()),
        num_prompt_logprobs=params.prompt_logprobs,
        grammar=params.structured_outputs is not None,
    )


def child_request(parent: NewRequest, index: int, request_id: str) -> NewRequest:
    """Return the core's request of completion `index` of n. It shares the KV blocks of the prompt; its seed differs."""
    spec = msgspec.structs.replace(
        parent.sampler, seed=child_seed(parent.sampler.seed, index), num_prompt_logprobs=None
    )
    return msgspec.structs.replace(
        parent,
        handle=parent.handle + index,
        request_id=request_id,
        sampler=spec,
        parent=parent.handle,
        read_prefix_cache=True,
        transfer=None,
    )
