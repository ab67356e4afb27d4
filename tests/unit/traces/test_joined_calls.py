"""Calls of the processes of a server in one tree."""

from quire.observe.calls import Span
from quire.observe.render_calls import CORE, HTTP
from quire.procs.request_trace import TracedRequest, TracedStep
from quire.traces.http_trace import joined


def test_a_stay_of_which_every_call_goes_on_ends_where_the_next_one_begins() -> None:
    """The core begins its step before the HTTP process has finished the one call that began in between."""
    seen = [Span("POST /", "", begin=0, end=0)]
    calls = [
        Span("CoreClient.send", "", begin=10, end=20),
        Span("Messages.decode", "", "", "Outputs", begin=52, end=70),
    ]
    steps = [
        TracedStep(step=number, kind="decode", first=0, count=1, requests=1, tokens=1, calls=[call])
        for number, call in enumerate(
            (Span("EngineCore.step", "", begin=30, end=50), Span("EngineCore.step", "", begin=55, end=90))
        )
    ]
    traced = TracedRequest(request_id="a", num_prompt=1, calls=[], steps=steps, ended=True)
    stays = [(one.name, one.begin, one.end) for one in joined(calls, seen, traced).inside]
    assert stays == [
        ("client", 0, 0),
        (HTTP, 10, 20),
        (CORE, 30, 50),
        ("wire from the core", 50, 52),
        (HTTP, 52, 55),
        (CORE, 55, 90),
    ]
