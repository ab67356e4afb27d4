"""The router: one HTTP address in front of several servers, vLLM's or Quire's, behind `quire route`.

    settings.py   the flags, checked            app.py         the ASGI application, and the operators' paths
    prompts.py    a request's prompt            exchange.py    one request: backend, retries, the stream
    affinity.py   remembered prefixes           split.py       prefill on one backend, decode on another
    events.py     KV events of backends         upstream.py    HTTP/1.1 to a backend
    policy.py     the choice of a backend       backends.py    backends, their load, health checks
    metrics.py    /metrics

The router keeps no state that may not be lost: a restart forgets prefixes, and no more. It reads no tokenizer.
"""
