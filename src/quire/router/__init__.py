"""The router: one HTTP address in front of several servers, vLLM's or Quire's, behind `quire route`.

    settings.py    the flags, checked               app.py         the ASGI application, and the operators' paths
    asked.py       a request, a refusal             exchange.py    one request: backend, retries, the stream
    prompts.py     a request's prompt               attempt.py     one try of a request on a backend, or two at once
    policy.py      the choice of a backend          upstream.py    HTTP/1.1 to a backend
    affinity.py    remembered prefixes              split.py       prefill on one backend, decode on another
    rendezvous.py  homes of sessions by hashing     backends.py    backends, their load, health checks
    events.py      KV events of backends            breaker.py     circuit breakers
    addresses.py   URLs and weights                 budget.py      the budget of retries
    discovery.py   files and DNS that name them     fleet.py       the backends, which come and go
    srv.py         SRV records                      state.py       what a restart must not forget
    metrics.py     /metrics                         gate.py        where limits of callers are asked
    stored.py      backends of stored responses     spans.py       spans of requests

The router keeps no state that may not be lost but the backends that are drained. It reads no tokenizer.
"""
