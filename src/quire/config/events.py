"""KV events as an engine is asked for them: the keys of vLLM's `kv_events_config`, and their meaning."""

import msgspec

from quire.config.engine import EngineConfig
from quire.config.serve import is_loopback
from quire.contracts.errors import ConfigError


class EventSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option kv_events_config, with vLLM's names.

    endpoint          ZeroMQ address; bound when it has a wildcard, names the interface `lo`, or is ipc; else connected
    replay_endpoint   address on which batches can be asked for again
    buffer_steps      batches that can be asked for again
    hwm               batches that wait for a slow subscriber; further ones are lost to it
    max_queue_size    batches that wait to be sent; further ones are lost
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://lo:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def exposed(self) -> tuple[str, ...]:
        """Addresses on which other machines can connect, without a key, and read the events."""
        pairs = (self.endpoint, self.bound), (self.replay_endpoint, True)
        return tuple(each for each, bound in pairs if each and bound and not _is_near(each))

    @property
    def bound(self) -> bool:
        """True when `endpoint` is an address of this machine, False when events are sent to another one."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("tcp://lo:", "ipc:"))


def read_events_config(config: EngineConfig) -> EventSettings | None:
    """Return the settings of KV events; None when none are asked for. Raises ConfigError."""
    try:
        settings = msgspec.convert(config.share.kv_events_config or {}, EventSettings)
        if settings.publisher not in (None, "null", "zmq"):
            raise ValueError(f"publisher={settings.publisher!r} does not exist: use zmq")
        if min(settings.buffer_steps, settings.hwm, settings.max_queue_size) < 1:
            raise ValueError("buffer_steps, hwm and max_queue_size must be 1 or more")
    except ValueError as error:  # which msgspec.ValidationError is
        raise ConfigError(
            f"kv_events_config: {error}. Its keys are {', '.join(EventSettings.__struct_fields__)}, as "
            'in {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.'
        ) from None
    if not settings.enable_kv_cache_events or settings.publisher == "null":
        return None
    return settings


def events_notes(config: EngineConfig) -> tuple[str, ...]:
    """Return the note about KV events that any machine can read. vLLM's form has no key, so none can be asked for."""
    settings = read_events_config(config)
    if settings is None or not settings.exposed:
        return ()
    return (
        f"kv_events_config: whoever can reach {' or '.join(settings.exposed)} reads the tokens of every prompt and "
        "answer: the protocol has no key. Let a firewall admit your routers alone, or use tcp://lo:5557, which this "
        "machine alone reaches.",
    )


def _is_near(endpoint: str) -> bool:
    """True for a ZeroMQ address that only this machine can reach."""
    scheme, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    return scheme != "tcp" or host == "lo" or is_loopback(host)
