"""Prefill-decode disaggregation as requests speak of it: vLLM's `kv_transfer_params`, which proxies pass on unread.

    to a prefill node   {"do_remote_decode": true}
    from it             {"do_remote_prefill": true, "remote_host", "remote_port", "remote_request_id", ...}
    to a decode node    the same

Blocks are found by their keys, which a decode node computes from the prompt; `remote_block_ids` only number them.
Blocks that depend on texts of other positions (CacheBlend) have keys with the name of the transfer in them, from number
`remote_private_block` on.
"""

import secrets
from typing import Annotated, Any

import msgspec

from quire.config.connectors import CONNECTOR
from quire.contracts.errors import InvalidParameter
from quire.contracts.request import Transfer
from quire.plan.sharing import SharePlan

PARAM = "kv_transfer_params"


class _Given(msgspec.Struct):
    """The fields that are read; there may be others, of other engines."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: Annotated[str, msgspec.Meta(max_length=255)] | None = None
    remote_port: Annotated[int, msgspec.Meta(gt=0, lt=65536)] | None = None
    remote_request_id: Annotated[str, msgspec.Meta(max_length=255)] | None = None
    remote_private_block: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


def read_transfer(params: dict[str, Any] | None, plan: SharePlan) -> Transfer | None:
    """Return the transfer that a request asks for; None when it asks for none. Raises `InvalidParameter`."""
    try:
        given = msgspec.convert(params or {}, _Given)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{PARAM}: {error}. Pass on what the prefill node has answered.", param=PARAM) from None
    first, second = bool(given.do_remote_decode), bool(given.do_remote_prefill)
    if not first and not second:
        return None
    if first and second:
        raise InvalidParameter(
            f"{PARAM}: a node either prefills or decodes: set one of do_remote_decode and do_remote_prefill.",
            param=PARAM,
        )
    if (first and not plan.sends) or (second and not plan.takes):
        asked, role = ("do_remote_decode", "kv_producer") if first else ("do_remote_prefill", "kv_consumer")
        raise InvalidParameter(
            f"{PARAM}: {asked} needs an engine that was started with --kv-transfer-config "
            f'\'{{"kv_connector": "{CONNECTOR}", "kv_role": "{role}"}}\' or "kv_both".',
            param=PARAM,
        )
    if first:
        return Transfer(name=secrets.token_hex(16))
    if given.remote_host is None or given.remote_port is None or given.remote_request_id is None:
        raise InvalidParameter(
            f"{PARAM}: do_remote_prefill without remote_host, remote_port and remote_request_id: "
            "pass on what the prefill node has answered.",
            param=PARAM,
        )
    return Transfer(
        name=given.remote_request_id,
        address=f"{given.remote_host}:{given.remote_port}",
        num_tokens=given.remote_num_tokens or 0,
        private=-1 if given.remote_private_block is None else given.remote_private_block,
    )


def answer_transfer(transfer: Transfer | None, plan: SharePlan, num_tokens: int, size: int) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` of a prefill node's answer for the decode node; None in other engines.

    size   tokens per block
    """
    if transfer is None or transfer.address or plan.place is None:
        return None
    host, port = plan.place
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{host}:{port}",
        "remote_request_id": transfer.name,
        "remote_host": host,
        "remote_port": port,
        "tp_size": plan.tp,
        "remote_block_ids": list(range(num_tokens // size)),
        "remote_num_tokens": num_tokens,
    } | ({"remote_private_block": transfer.private} if transfer.private >= 0 else {})
