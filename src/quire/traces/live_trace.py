"""Trace of one request of a running server: `quire trace --url URL [--request ID]`. Never imports torch."""

from urllib.parse import quote

import msgspec

from quire.entry.cli.remote import RemoteServer
from quire.observe.calls import Span
from quire.observe.render_calls import CORE
from quire.procs.request_trace import TracedRequest, TracedStep
from quire.traces.decisions import decisions_of, with_decisions


def trace_live(server: RemoteServer, request_id: str | None) -> Span:
    """Return the calls of a request of a server, in its core and model runners. Raises `QuireError`.

    request_id   of a request that lives; None: wait for the next one
    """
    found = server.read("/debug/trace" + (f"?request={quote(request_id, safe='')}" if request_id else ""))
    traced = msgspec.json.decode(found, type=TracedRequest)
    plan = msgspec.json.decode(server.read("/debug/plan")) or {}
    return with_decisions(live_calls(traced, server.where), decisions_of(plan))


def live_calls(traced: TracedRequest, where: str) -> Span:
    """Return one tree of the calls of a traced request. where: address of its server"""
    inside = list(traced.calls)
    for step in traced.steps:
        begin, end = step.calls[0].begin, max(one.end for one in step.calls)
        inside.append(Span(CORE, "", phase=phase_of(step), begin=begin, end=end, inside=step.calls))
    ended = "; it has ended" * traced.ended
    name = f"request {traced.request_id} of {where}, {traced.num_prompt} tokens of prompt{ended}; eager, step by step"
    begin, end = (inside[0].begin, inside[-1].end) if inside else (0, 0)
    return Span(name, "", begin=begin, end=end, inside=inside)


def phase_of(step: TracedStep, number: int | None = None) -> str:
    """Return a step in words. number: of the step among those of the request; None: all requests count"""
    if number is not None:
        return f"step {number}: {step.kind}, {_number(step.count, 'token')}"
    whole = f"{_number(step.requests, 'request')}, {_number(step.tokens, 'token')} in the step"
    return f"step {step.step}: {step.kind}, {_number(step.count, 'token')} from {step.first} on; {whole}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
