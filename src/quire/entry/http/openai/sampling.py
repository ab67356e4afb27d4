"""Conversion of a request's fields to `SamplingParams`. Fields of the request override the server's defaults."""

import math
import re
from typing import Any

from quire.contracts.errors import InvalidParameter, QuireError, RequestFailed, shown
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.contracts.structured import KINDS, StructuredOutputsParams
from quire.entry.http.errors import HttpError
from quire.entry.http.openai.schema import MAX_CHOICES, MAX_PROMPTS, SamplingFields
from quire.plan.meeting_rows.records import AskedFields
from quire.plan.meetings import check_fields

SAME_NAME = (  # fields that mean the same in a request and in SamplingParams
    "n temperature frequency_penalty presence_penalty stop logit_bias top_k min_p repetition_penalty min_tokens "
    "ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
    "allowed_token_ids bad_words prompt_logprobs logprob_token_ids skip_reading_prefix_cache "
    "speculative_tokens kv_transfer_params kv_chunks blend_ratio"
).split()
MAX_LISTED = 2**18  # list entries times completions of a request, since each completion sends them to the engine
OUR_GRAMMAR = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?|\n +\d+ \| .*", re.S)  # in error messages
SMALLEST_TOP_P = 1e-9  # OpenAI allows 0, which means the likeliest token only


def sampling_params(
    request: SamplingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    stream_interval: int,
) -> SamplingParams:
    """Make the sampling parameters of a request. Raises `InvalidParameter`.

    max_tokens, logprobs   as the route reads them from the request
    stream_interval        the server's; a request can only raise it
    """
    given: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(request, name)) is not None}
    if request.top_p is not None:
        given["top_p"] = max(request.top_p, SMALLEST_TOP_P)
    if request.seed is not None:
        if not -(2**63) <= request.seed < 2**64:
            raise InvalidParameter(f"seed={shown(request.seed)}: must be an integer in [-2^63, 2^64).", param="seed")
        # OpenAI's seeds are signed 64-bit numbers; ours unsigned, with -1 for a random one.
        given["seed"] = request.seed if request.seed >= -1 else request.seed + 2**64
    check_fields(
        AskedFields(
            chunks="kv_chunks" if request.kv_chunks else "",
            truncated=request.truncate_prompt_tokens is not None,
            transfer=bool((request.kv_transfer_params or {}).get("do_remote_decode")),
            stream=bool(request.stream),
        )
    )
    if request.stream:
        interval = max(stream_interval, request.stream_interval or 1)
        given["stream_interval"] = interval if interval > 1 else None
        given["output_kind"] = OutputKind.DELTA
    else:
        given["output_kind"] = OutputKind.FINAL_ONLY
    if (constraint := structured(request)) is not None:
        given["structured_outputs"] = constraint
    if request.logprob_token_ids and logprobs is None and request.prompt_logprobs is None:
        raise InvalidParameter("logprob_token_ids needs logprobs: send logprobs, too.", param="logprob_token_ids")
    return defaults.clone(**given, max_tokens=max_tokens, logprobs=logprobs)


def structured(request: SamplingFields) -> StructuredOutputsParams | None:
    """Return the structured output that a request asks for; None for free text."""
    wanted, asked = request.response_format, request.structured_outputs
    given = {name: value for name in KINDS if (value := getattr(asked, name, None)) is not None}
    free = wanted is None or wanted.type == "text"
    if given.get("json_object") is False and (len(given) > 1 or not free):
        del given["json_object"]
    if wanted is None or free:
        tight = asked is not None and bool(asked.disable_any_whitespace)
        return StructuredOutputsParams(**given, disable_any_whitespace=tight) if given else None
    if given:
        raise InvalidParameter(
            "response_format and structured_outputs both set the format of the answer: send one of them.",
            param="structured_outputs",
        )
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None:
        raise InvalidParameter(
            "response_format of type json_schema needs the field json_schema, with a schema.", param="response_format"
        )
    return StructuredOutputsParams(json=wanted.json_schema.schema)


def grammar_error(
    error: RequestFailed | InvalidParameter, request: SamplingFields, params: SamplingParams, tools: bool
) -> QuireError:
    """Return an engine error about the grammar or the allowed tokens, rewritten to name fields of the request.
    The engine knows one grammar only, which may have been made from schemas in the request. Other errors are returned
    unchanged. `tools`: the model may call tools."""
    wanted = request.response_format
    names = (
        ["tools"] * tools
        + ["response_format"] * (wanted is not None and wanted.type != "text")
        + (["structured_outputs"] * (request.structured_outputs is not None))
    )
    code = error.code if isinstance(error, RequestFailed) else "" if error.param == "structured_outputs" else None
    if code == "no_token":
        grammar_names = (names or ["thinking_token_budget"]) if params.structured_outputs is not None else []
        given = [*(name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)), *grammar_names]
        if given:
            given += ["min_tokens"] * bool(params.min_tokens)
            return HttpError(
                400,
                f"{' and '.join(given)}: no token is left that could come next in the answer. Allow "
                "another token, or leave one of these fields out.",
                code="invalid_value",
                param=given[0],
            )
    if code not in ("", "invalid_grammar", "grammar_failed") or not names:
        return error
    words = str(error)
    if names != ["structured_outputs"]:
        words = words.replace("structured_outputs: the grammar", f"{' or '.join(names)}: the schema")
        words = OUR_GRAMMAR.sub("", words)
    return HttpError(400, words, code=code or "invalid_value", param=names[0])


def check_choices(num_prompts: int, request: SamplingFields) -> None:
    """Raise `InvalidParameter` for too many completions, or too many list entries (counted once per completion)."""
    n = request.n or 1
    if num_prompts * n > (MAX_CHOICES if n > 1 else MAX_PROMPTS):
        raise InvalidParameter(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} completions: ask for "
            f"at most {MAX_CHOICES} per request, or {MAX_PROMPTS} with n=1.",
            param="n" if n > 1 else "prompt",
        )
    for name in ("allowed_token_ids", "stop_token_ids", "logit_bias", "bad_words"):
        entries = getattr(request, name) or ()
        if len(entries) * num_prompts * n > MAX_LISTED:
            raise InvalidParameter(
                f"{name} has {len(entries)} entries for each of {num_prompts * n} completions: a request may have "
                f"{MAX_LISTED} in all; shorten the list, or send fewer prompts or a smaller n.",
                param=name,
            )


def request_timeout(header: str | None) -> float | None:
    """Return the seconds of the X-Request-Timeout header; None without one. The engine adds the server's own limit."""
    if header is None:
        return None
    try:
        asked = float(header)
    except ValueError:
        asked = math.nan
    if not (math.isfinite(asked) and asked > 0):
        raise InvalidParameter(
            f"X-Request-Timeout={shown(header)}: must be a number of seconds above 0.", param="X-Request-Timeout"
        )
    return asked
