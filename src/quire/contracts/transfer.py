"""Prefill-decode disaggregation as requests speak of it: vLLM's `kv_transfer_params`, which proxies pass on unread.

    to a prefill node   {"do_remote_decode": true}
    from it             {"do_remote_prefill": true, "remote_host", "remote_port", "remote_request_id", ...}
    to a decode node    the same

Blocks are found by their keys, which a decode node computes from the prompt; `remote_block_ids` only number them.
"""

import secrets
from typing import Annotated, Any

import msgspec

from quire.contracts.errors import InvalidParameter

PARAM = "kv_transfer_params"


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks of a prompt that one engine computes for another one.

    name        of the lease, by which the prefill node keeps the blocks until the decode node has them
    address     HOST:PORT of the prefill node; "": this engine is the prefill node
    num_tokens  tokens of the prompt whose blocks the prefill node has; 0 in the prefill node itself
    """

    name: str
    address: str = ""
    num_tokens: int = 0


class TransferRole(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an engine in disaggregation. `address`: HOST:PORT on which it shares blocks; "": it shares none.

    sends, takes   it computes prompts for others; it goes on with prompts that others have computed
    """

    sends: bool = False
    takes: bool = False
    address: str = ""
    block_size: int = 1


class _Given(msgspec.Struct):
    """The fields that are read; there may be others, of other engines."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: Annotated[str, msgspec.Meta(max_length=255)] | None = None
    remote_port: Annotated[int, msgspec.Meta(gt=0, lt=65536)] | None = None
    remote_request_id: Annotated[str, msgspec.Meta(max_length=255)] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


def read_transfer(params: dict[str, Any] | None, role: TransferRole) -> Transfer | None:
    """Return the transfer that a request asks for; None when it asks for none. Raises `InvalidParameter`."""
    if not params:
        return None
    try:
        given = msgspec.convert(params, _Given)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{PARAM}: {error}. Pass on what the prefill node has answered.", param=PARAM) from None
    if not given.do_remote_decode and not given.do_remote_prefill:
        return None
    if given.do_remote_decode and given.do_remote_prefill:
        raise InvalidParameter(f"{PARAM}: a node either prefills or decodes: set one of do_remote_decode and "
                               "do_remote_prefill.", param=PARAM)  # fmt: skip
    if not (role.sends if given.do_remote_decode else role.takes):
        asked, wanted = ("do_remote_decode", "kv_producer") if given.do_remote_decode else ("do_remote_prefill",
                                                                                            "kv_consumer")
        raise InvalidParameter(f"{PARAM}: {asked} needs an engine that was started with --kv-transfer-config "
                               f'\'{{"kv_connector": "QuireConnector", "kv_role": "{wanted}"}}\' or "kv_both".',
                               param=PARAM)  # fmt: skip
    if given.do_remote_decode:
        return Transfer(name=secrets.token_hex(16))
    if given.remote_host is None or given.remote_port is None or given.remote_request_id is None:
        raise InvalidParameter(f"{PARAM}: do_remote_prefill without remote_host, remote_port and remote_request_id: "
                               "pass on what the prefill node has answered.", param=PARAM)  # fmt: skip
    return Transfer(name=given.remote_request_id, address=f"{given.remote_host}:{given.remote_port}",
                    num_tokens=given.remote_num_tokens or 0)


def answer_transfer(transfer: Transfer | None, role: TransferRole, num_tokens: int) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` of a prefill node's answer for the decode node; None in other engines."""
    if transfer is None or transfer.address:
        return None
    host, _, port = role.address.rpartition(":")
    return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": role.address,
            "remote_request_id": transfer.name, "remote_host": host, "remote_port": int(port), "tp_size": 1,
            "remote_block_ids": list(range(num_tokens // role.block_size)), "remote_num_tokens": num_tokens}
