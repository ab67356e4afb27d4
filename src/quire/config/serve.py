"""Configuration of a server, beside the engine's: address, access and handling of requests."""

import ipaddress
import re
from dataclasses import dataclass, fields
from typing import Any

from quire.config.adapters import NamedAdapterConfig, read_modules
from quire.config.bundled import NAME
from quire.config.engine import EngineConfig, by_part, check_types, flat_names
from quire.config.option import option
from quire.contracts.errors import ConfigError

WAITING_PER_SLOT = 8  # a server takes nine times as many requests as can run (the running ones included), not ten times
LEAST_WAITING = 1_024  # with few slots, so that any single request within the schema's bounds fits
HOST_NAME = re.compile(r"\*|[a-zA-Z0-9_][a-zA-Z0-9._-]*")
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}  # of Python's `logging`
COLLECTOR = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/@?#:\[\]]+)(?::(\d+))?(/[^\s@?#]*)?")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """HTTP server, TLS, origins, hosts and size limits."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 takes requests from anywhere")
    port: int = option(8000, "port to listen on; 0: any free one")
    uds: str | None = option(None, "listen on this Unix domain socket instead of a port")
    root_path: str = option("", "path under which a proxy serves this server")
    allowed_origins: tuple[str, ...] = option((), "origins whose web pages may call this server (CORS); * for all")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names, beside localhost, that are allowed in Host headers when the "
        "server has no keys and listens on localhost; * for all",
    )
    ssl_keyfile: str | None = option(None, "private key file for HTTPS")
    ssl_certfile: str | None = option(None, "certificate file for HTTPS")
    max_body_bytes: int = option(8 * 2**20, "largest request body in bytes; more is answered 413", least=1)
    max_header_bytes: int = option(
        64 * 2**10,
        "largest request line and headers in bytes; more is answered 431",
        flags=("--h11-max-incomplete-event-size",),
        least=1,
    )
    max_headers: int = option(
        100, "maximum number of headers of a request; more are answered 431", flags=("--h11-max-header-count",), least=1
    )
    web: bool = option(True, "serve the page at / and the live view: what the engine does, and the lives of requests")
    warmup_requests: str | None = option(
        None, "file of requests, as `quire run-batch` reads it, that are answered before /ready says yes"
    )
    trust_request_chat_template: bool = option(False, "accept chat templates in requests, rendered in a child process")


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """API keys of a server."""

    api_key: tuple[str, ...] = option((), "API keys; every request must send one of them as a bearer token")
    api_key_file: str | None = option(
        None, "file of API keys with names and limits, TOML (.toml) or JSON; SIGHUP reads it again"
    )
    share_prefix_cache_across_keys: bool = option(
        False, "share the prefix cache between API keys; a key can then find out which prompts another key has sent"
    )

    @property
    def keyed(self) -> bool:
        """True when requests need an API key."""
        return bool(self.api_key) or self.api_key_file is not None


@dataclass(frozen=True, kw_only=True)
class DeadlineConfig:
    """Time limits of requests, in seconds."""

    queue_timeout: float = option(60.0, "seconds a request may wait to start; then it is answered 408", above=0)
    first_token_timeout: float | None = option(
        None, "seconds from the arrival of a request to its first token; then it is answered 504", above=0
    )
    request_timeout: float | None = option(None, "seconds a request may take in all; then it is answered 504", above=0)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Model names, streaming, parsers and processes of a server."""

    served_model_name: tuple[str, ...] = option((), "names under which the model is served (default: the model's)")
    keep_alive_interval: float = option(
        15.0,
        "seconds of silence on a stream after which a comment is sent; 0: never",
        flags=("--sse-keep-alive-interval",),
        least=0,
    )
    shutdown_timeout: float = option(30.0, "seconds that SIGTERM gives running requests", least=0)
    hang_timeout: float = option(
        60.0, "seconds after which a step counts as hung: /ready says so, and a line on stderr names it", above=0
    )
    stream_interval: int = option(1, "tokens per streamed event", least=1)
    tool_call_parser: str | None = option(None, "format of tool calls; none: no tools (default: the chat template's)")
    reasoning_parser: str | None = option(None, "format of reasoning; none: it is text (default: the chat template's)")
    exclude_tools_when_tool_choice_none: bool = option(False, "leave tools out of the prompt when tool_choice is none")
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "default variables of the chat template; a request can replace them"
    )
    enable_force_include_usage: bool = option(False, "send usage with every stream, even if not requested")
    api_server_count: int = option(
        1, "processes that speak HTTP, all on one port, in front of one engine core", flags=("-asc",), least=1
    )
    headless: bool = option(False, "serve no HTTP: run ranks of the engine whose server is on host 0 (--node-rank)")
    metrics_prefix: str = option("quire", "prefix of the metric names in /metrics; vllm suits existing dashboards")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Log lines of a server."""

    access_log: bool = option(False, "log a line per HTTP request")
    disable_access_log_for_endpoints: str = option(
        "", "paths without a line in the access log, separated by commas: /live,/ready,/health,/metrics"
    )
    enable_log_requests: bool = option(False, "log the id, sizes and finish reason of every request")
    disable_log_stats: bool = option(False, "do not log a line of statistics every 10 s")
    log_format: str = option("text", "lines on standard error: text, or a JSON object each", choices=("text", "json"))
    log_level: str = option(
        "info",
        "least urgent messages that are logged; debug: a line per HTTP request and generation, too; while it runs "
        "SIGUSR1 chooses debug, and SIGUSR2 this level",
        choices=("debug", "info", "warning", "error"),
    )

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Paths without a line in the access log."""
        return frozenset(filter(None, map(str.strip, self.disable_access_log_for_endpoints.split(","))))

    @property
    def level(self) -> int:
        """The number of `log_level` in Python's `logging`."""
        return LEVELS[self.log_level]


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Spans of requests, for OpenTelemetry. The SDK's own variables apply, too: OTEL_SERVICE_NAME and so on."""

    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector that gets a span of each request, by OTLP over HTTP: http://host:4318; needs the "
        "extra quire[otel]",
    )
    otlp_traces_sample_rate: float | None = option(
        None,
        "share of requests that are traced, 0 to 1, where the caller's traceparent does not decide (default: as "
        "OTEL_TRACES_SAMPLER says, else all)",
        least=0,
    )
    otlp_traces_content: bool = option(False, "put the texts of prompts and answers into spans")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Complete configuration of a server."""

    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
    access: AccessConfig = AccessConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    serve: ServeConfig = ServeConfig()
    log: LogConfig = LogConfig()
    lora: NamedAdapterConfig = NamedAdapterConfig()
    tracing: TracingConfig = TracingConfig()

    @property
    def max_waiting(self) -> int:
        """Maximum number of waiting requests; never unlimited, unlike the engine's option max_waiting."""
        scheduler = self.engine.scheduler
        if scheduler.max_waiting is not None:
            return scheduler.max_waiting
        return max(scheduler.sequences() * WAITING_PER_SLOT, LEAST_WAITING)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served, the main one first."""
        return self.serve.served_model_name or (self.engine.model.model or NAME,)

    @classmethod
    def from_flat(cls, **values: Any) -> "ServerConfig":
        """Build a configuration from flat option names of server and engine: `port=8000`. Raises `ConfigError`."""
        parts = by_part(values, server_names())
        own = {name: kind(**parts.get(name, {})) for name, kind in server_parts().items()}
        config = cls(engine=EngineConfig.from_flat(**parts.get("engine", {})), **own)
        check_server(config)
        return config


def server_parts() -> dict[str, type[Any]]:
    """Return field name -> class for the parts of `ServerConfig` ("http": `HttpConfig`, ...), without the engine."""
    return {part.name: type(part.default) for part in fields(ServerConfig) if part.name != "engine"}


def server_names() -> dict[str, str]:
    """Return option name -> the field of `ServerConfig` that holds the option, "engine" for the engine's options."""
    own = {option.name: part for part, kind in server_parts().items() for option in fields(kind)}
    return dict.fromkeys(flat_names(), "engine") | own


def is_loopback(host: str) -> bool:
    """True for "localhost" and loopback addresses, which only this machine can reach."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_server(config: ServerConfig) -> None:
    """Raise `ConfigError` for values that can never work, and for options that contradict each other."""
    http, serve = config.http, config.serve
    for part in server_parts():
        check_types(getattr(config, part))
    if not 0 <= http.port <= 65535:
        raise ConfigError(f"port={http.port}: must be in 0..65535.")
    if not http.host and http.uds is None:
        raise ConfigError("host='': give an address: 127.0.0.1 for this machine only, 0.0.0.0 for all.")
    if (http.ssl_keyfile is None) != (http.ssl_certfile is None):
        raise ConfigError("ssl_keyfile and ssl_certfile go together: give both, or none.")
    if http.warmup_requests is not None and (serve.api_server_count > 1 or serve.headless):
        raise ConfigError(
            "warmup_requests needs one HTTP process: further ones (api_server_count) would take requests meanwhile; "
            "with headless there is none."
        )
    if http.root_path and not http.root_path.startswith("/"):
        raise ConfigError(f"root_path={http.root_path!r}: must begin with a slash.")
    if not all(key and key.isprintable() and key == key.strip() and key.isascii() for key in config.access.api_key):
        raise ConfigError("api_key: a key must be printable ASCII without spaces around it, and not empty.")
    for origin in http.allowed_origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(f"allowed_origins={origin!r}: must be * or like https://example.org, without a path.")
    for path in config.log.quiet_paths:
        if not path.startswith("/"):
            raise ConfigError(f"disable_access_log_for_endpoints: {path!r} must be a path, such as /health.")
    for name in http.allowed_hosts:
        if not HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"allowed_hosts={name!r}: must be * or a name like host.docker.internal, without a port; "
                "give several as several values."
            )
    check_names(config)
    check_tracing(config.tracing)
    if not all(serve.served_model_name):
        raise ConfigError("served_model_name: a name must not be empty: give a name, or leave the option out.")
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", serve.metrics_prefix):
        raise ConfigError(
            f"metrics_prefix={serve.metrics_prefix!r}: must be letters, digits and underscores, "
            "and not begin with a digit."
        )


def check_tracing(tracing: TracingConfig) -> None:
    """Raise `ConfigError` for a collector that cannot be one, and for options that do nothing without a collector."""
    endpoint, rate = tracing.otlp_traces_endpoint, tracing.otlp_traces_sample_rate
    if endpoint is None:
        for name, value in (("sample_rate", rate), ("content", tracing.otlp_traces_content or None)):
            if value is not None:
                raise ConfigError(f"otlp_traces_{name} needs otlp_traces_endpoint: name the collector, too.")
        return
    found = COLLECTOR.fullmatch(endpoint)
    if found is None or int(found[2] or 0) > 65535:
        raise ConfigError(
            "otlp_traces_endpoint: must be like http://host:4318 or https://host/v1/traces, with a host and without a "
            "query: spans go by OTLP over HTTP, not over gRPC. Give credentials in OTEL_EXPORTER_OTLP_HEADERS."
        )
    if rate is not None and rate > 1:
        raise ConfigError(f"otlp_traces_sample_rate={rate}: must be in 0..1: 0.01 traces one request of a hundred.")


def check_names(config: ServerConfig) -> None:
    """Raise `ConfigError` for names of adapters that cannot be served."""
    lora = config.lora
    modules, served = read_modules(lora.lora_modules), config.model_names
    if (modules or lora.lora_folder or lora.allow_runtime_lora_updating) and not config.engine.adapters.enable_lora:
        given = "lora_modules" if modules else "lora_folder" if lora.lora_folder else "allow_runtime_lora_updating"
        raise ConfigError(f"{given} needs enable_lora: add it, or leave {given} out.")
    if taken := [name for name in modules if name in served]:
        raise ConfigError(f"lora_modules: {taken[0]!r} is the name of the served model: give the adapter another name.")
    if lora.allow_runtime_lora_updating and config.serve.api_server_count > 1:
        raise ConfigError(
            f"allow_runtime_lora_updating: one of {config.serve.api_server_count} HTTP processes would learn of a new "
            "name: leave api_server_count out, or use lora_folder."
        )
