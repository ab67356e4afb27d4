"""Routes of OpenAI's, Anthropic's and vLLM's APIs that clients ask for and that are not there yet.

The answer is 404 and not 501, because clients retry every 5xx. Knows paths only.
"""

TEXT_ONLY = "models read and write text only"
GENERATES = "models generate text only"
CHAT = "use /v1/chat/completions"
NO_STORE = "nothing is kept between requests"
NOT_SERVED = {  # path, everything below it included -> why, or what to use
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/complete": "use /v1/completions",
    "/v1/realtime": CHAT,
    "/v1/embeddings": GENERATES, "/embeddings": GENERATES, "/embed": GENERATES,
    "/pooling": GENERATES, "/classify": GENERATES, "/v1/moderations": GENERATES,
    "/score": GENERATES, "/v1/score": GENERATES,
    "/rerank": GENERATES, "/v1/rerank": GENERATES, "/v2/rerank": GENERATES,
    "/v1/audio": TEXT_ONLY, "/v1/images": TEXT_ONLY, "/v1/videos": TEXT_ONLY,
    "/v1/files": NO_STORE, "/v1/uploads": NO_STORE, "/v1/vector_stores": NO_STORE, "/v1/assistants": NO_STORE,
    "/v1/threads": NO_STORE, "/v1/conversations": NO_STORE, "/v1/containers": NO_STORE,
    "/v1/batches": "send the requests one by one; the server batches what comes at the same time",
    "/v1/fine_tuning": "models are not trained here", "/v1/evals": "models are not evaluated here",
    "/v1/load_lora_adapter": "adapters cannot be loaded", "/v1/unload_lora_adapter": "adapters cannot be loaded",
}  # fmt: skip


def why_unserved(path: str) -> str | None:
    """Why a path that other servers know is not served here; None for any other path."""
    return next((why for known, why in NOT_SERVED.items() if path == known or path.startswith(known + "/")), None)
