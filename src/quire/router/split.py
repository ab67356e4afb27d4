"""Prefill on one backend, decode on another, by vLLM's fields: the way of its `toy_proxy_server.py`.

prefill   the request with kv_transfer_params {do_remote_decode: true, ...}, for one token, not streamed
decode    the request with the kv_transfer_params of that answer, unread: it says where the blocks are
"""

from typing import Any

import msgspec

from quire.router.backends import Backend
from quire.router.prompts import RoutedBody
from quire.router.upstream import Header, UpstreamError

SPLIT_PATHS = ("/v1/completions", "/v1/chat/completions")
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ONE_TOKEN: dict[str, Any] = {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
LEFT_OUT = ("stream_options", "min_tokens", "min_completion_tokens")


class Prefilled(msgspec.Struct):
    """Answer of a prefill backend."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


async def prefilled(
    backend: Backend, target: bytes, headers: list[Header], body: RoutedBody, timeout: float
) -> bytes | None:
    """Let a backend compute a prompt. Return the body for the backend that decodes.

    None: it failed, or keeps nothing for others; then the backend that decodes computes the prompt, too.
    """
    one = ONE_TOKEN | ({"max_completion_tokens": 1} if body.given("max_completion_tokens") else {})
    try:
        status, answer = await backend.pool.fetch(b"POST", target, headers, body.with_fields(one, LEFT_OUT), timeout)
        params = msgspec.json.decode(answer, type=Prefilled).kv_transfer_params if status == 200 else None
    except UpstreamError as error:
        backend.failed(error)
        return None
    except msgspec.DecodeError:
        return None
    if params is None or bytes(params) in (b"null", b"{}"):
        return None
    return body.with_fields({"kv_transfer_params": params})
