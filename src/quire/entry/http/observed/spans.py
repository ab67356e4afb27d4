"""The span of an HTTP request: a middleware that begins and ends it, and its attributes, with vLLM's names and OTel's.

The middleware exists only with --otlp-traces-endpoint. It puts the span into the request's state, where routes find it.
Attributes are made once, at the end, from what the engine has counted anyway. docs/operating.md lists them.
"""

import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.access.limits import Ticket
from quire.observe.tracing import Answering, ServerSpan, Tracer, own

OPERATIONS = {
    "/v1/completions": "text_completion",
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
    "/v1/embeddings": "embeddings",
    "/pooling": "pooling",
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}  # path -> gen_ai.operation.name; other paths have no spans
GENERATING = ("chat", "text_completion")
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")
MOST_CHARS = 16_384  # of a text in a span
MOST_IDS = 16_384  # of a prompt that are turned back into text


class TracedRequests:
    """Middleware: a span of each POST request on a path in `OPERATIONS`, whatever its answer is."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path not in OPERATIONS or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        operation, state = OPERATIONS[path], scope.setdefault("state", {})
        attributes = {"http.request.method": "POST", "http.route": path, "gen_ai.operation.name": operation}
        span = state["span"] = self._tracer.begin(operation, scope["headers"], attributes)
        answering = Answering(self._app, span, ClientDisconnect)
        try:
            await answering.run(scope, receive, send)
        finally:
            _end(span, scope, answering.status)


def note_model(scope: Scope, model: str) -> None:
    """Note the model of an HTTP request, if it is traced: the span's name has it."""
    if (span := scope.get("state", {}).get("span")) is not None and span.records:
        span.rename(f"{OPERATIONS[scope['path']]} {model}")
        span.notes |= {"gen_ai.request.model": model, "gen_ai.response.model": model}


async def in_own_span(scope: Scope, work: Awaitable[None]) -> None:
    """Do the work of a request whose HTTP request is answered already, in a span below that of the HTTP request."""
    above: ServerSpan | None = scope.get("state", {}).get("span")
    if above is None:
        return await work
    span = scope["state"]["span"] = above.below("background")
    try:
        await work
    except BaseException as error:
        span.error = span.error or type(error).__name__
        raise
    finally:
        _end(span, scope, 0)


def _end(span: ServerSpan, scope: Scope, status: int) -> None:
    if not span.records:
        return span.end(status)
    state = scope["state"]
    span.error = span.error or state.get("error", "")
    found: dict[str, Any] = {"gen_ai.provider.name": "quire"}
    if request_id := state.get("request_id"):
        found["gen_ai.request.id"] = request_id
    if name := caller_of(scope).name:
        found |= own(key=name)
    ticket: Ticket | None = state.get("ticket")
    if ticket is not None and ticket.generations:
        found |= account(ticket.generations)
        if OPERATIONS[scope["path"]] in GENERATING:
            found |= asked(ticket.generations[0].params)
        if span.content:
            found |= texts(ticket.generations)
        for event, at in zip(("scheduled", "first_token"), _times(ticket.generations)[:2], strict=True):
            if at is not None:
                span.event(event, at)
        ends = (each for one in ticket.generations for each in one.completions if each.finish_reason == "error")
        span.error = span.error or next((str(each.stop_reason) for each in ends), "")
    span.end(status, found)


def asked(params: SamplingParams) -> dict[str, Any]:
    """Return what a request asked for, defaults included, but for what is off. Stop strings are texts: left out."""
    given = {name: getattr(params, name) for name in SAMPLING}
    found = {f"gen_ai.request.{name}": value for name, value in given.items() if value or name == "temperature"}
    return found | ({"gen_ai.request.choice.count": params.n} if params.n > 1 else {})


def account(generations: list[Generation]) -> dict[str, Any]:
    """Return the attributes of a request that the engine took. The times are those of all its prompts together."""
    completions = [completion for generation in generations for completion in generation.completions]
    began, first, end = _times(generations)
    arrival = generations[0].metrics.arrival_time
    times = {
        "time_in_queue": None if began is None else began - arrival,
        "time_to_first_token": None if first is None else first - arrival,
        "time_in_model_prefill": None if first is None or began is None else first - began,
        "time_in_model_decode": None if first is None else end - first,
        "time_in_model_inference": None if began is None else end - began,
        "e2e": end - arrival,
    }
    drafts = [completion.drafts for completion in completions if completion.drafts]
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(len(one.prompt_token_ids) for one in generations),
        "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in completions),
        "gen_ai.usage.cache_read.input_tokens": sum(one.num_cached or 0 for one in generations),
        "gen_ai.usage.num_sequences": len(completions),
        "gen_ai.response.finish_reasons": [one.finish_reason or "abort" for one in completions],
        **{f"gen_ai.latency.{name}": seconds for name, seconds in times.items() if seconds is not None},
        **own(preemptions=sum(one.num_preemptions for one in generations)),
    }
    if drafts:
        accepted = sum(sum(right) for _, *right in drafts)
        found |= own(drafts_made=sum(made for made, *_ in drafts), drafts_accepted=accepted)
    for generation in generations[:1]:
        if (report := generation.metrics.prefix) is not None:
            found |= own(prefix_not_reused=report.why.value)
        for tier, blocks in Counter(one.tier.value for one in generation.metrics.origins.values()).items():
            found |= own(**{f"kv_blocks_from_{tier}": blocks})
        if (transfer := generation.transfer) is not None:
            found |= own(kv_transfer="decode" if transfer.address else "prefill")
    return found


def texts(generations: list[Generation]) -> dict[str, str]:
    """Return the texts of a request, as the conventions write them: JSON, of each text at most `MOST_CHARS`."""
    said = [
        {"role": "user", "parts": [_part(one.tokenizer.decode(one.prompt_token_ids[:MOST_IDS]))]}
        for one in generations
        if one.tokenizer is not None
    ]
    answers = [
        {
            "role": "assistant",
            "parts": [_part("" if each.text is None else each.text.text)],
            "finish_reason": each.finish_reason or "abort",
        }
        for one in generations
        for each in one.completions
    ]
    messages = {"gen_ai.input.messages": said, "gen_ai.output.messages": answers}
    return {name: msgspec.json.encode(value).decode() for name, value in messages.items()}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "content": text[:MOST_CHARS]}


def _times(generations: list[Generation]) -> tuple[float | None, float | None, float]:
    """Return when the first prompt was scheduled, when the first token came, and when the last completion ended."""
    began = [one.began for one in generations if one.began is not None]
    first = [at for one in generations if (at := one.metrics.first_token_time) is not None]
    ends = [at for one in generations if (at := one.metrics.finished_time) is not None]
    start = min([*began, *first], default=None) if began or first else None
    return start, min(first, default=None), max(ends) if len(ends) == len(generations) else time.monotonic()
