"""Adapters (LoRA) as requests, core and ranks speak of them: names, content, slots."""

from dataclasses import dataclass

import msgspec

NO_ADAPTERS = "this engine serves no adapters: start it with --enable-lora (enable_lora=True)."
TAG = "adapter"  # domain of the tag that keeps KV of adapters apart in the prefix cache


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, as vLLM's class of this name.

    lora_name     name of the adapter; another adapter must have another name
    lora_int_id   number of the adapter in vLLM, which Quire does not need
    lora_path     folder, or id on the hub, of the adapter
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class Adapter(msgspec.Struct, frozen=True):
    """An adapter whose files were read once.

    folder   folder of adapter_config.json and adapter_model.safetensors
    digest   sha256 of both files, in hexadecimal digits: two adapters with one digest are the same
    """

    name: str
    folder: str
    digest: str


class AdapterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a plan: bring an adapter into a slot of the device, from host memory or from its files.

    It begins when all earlier steps are done, and no step waits for it: the report comes in a later result.

    id       number of the job, unique among the jobs of an engine core
    slot     slot that no step uses before the report
    forget   digests of the adapters that host memory forgets
    """

    id: int
    slot: int
    adapter: Adapter
    forget: tuple[str, ...] = ()


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a job that has ended.

    error     reason why the slot has no adapter; "": it has
    seconds   time from begin to end, of the slowest rank
    read      True: the files were read, False: host memory had the adapter
    """

    id: int
    error: str = ""
    seconds: float = 0.0
    read: bool = False


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of an engine at a moment, and counts since its start.

    slots      slots of the device
    resident   names of the adapters in slots -> their live requests
    waiting    requests whose adapter is not on the device
    loads      adapters that came into a slot
    reads      of these, adapters that were read from files
    failed     adapters that could not be loaded
    """

    slots: int = 0
    resident: dict[str, int] = {}
    waiting: int = 0
    loads: int = 0
    reads: int = 0
    failed: int = 0
