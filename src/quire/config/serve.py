"""The configuration of a server, beside the engine's: where it listens, whom it lets in, how it answers."""

from dataclasses import dataclass

from quire.config.engine import EngineConfig, option


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where the server listens and whom it lets in."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 takes requests from anywhere")
    port: int = option(8000, "port to listen on; 0: any free one")
    uds: str | None = option(None, "listen on this Unix domain socket instead of a port")
    root_path: str = option("", "path under which a proxy serves this server")
    api_key: tuple[str, ...] = option((), "keys of which every request must show one as a bearer token")
    allowed_origins: tuple[str, ...] = option((), "origins whose pages may call this server (CORS); * for all")
    ssl_keyfile: str | None = option(None, "private key file for HTTPS")
    ssl_certfile: str | None = option(None, "certificate file for HTTPS")
    max_body_bytes: int = option(8 * 2**20, "largest request body; more is answered 413")
    max_header_bytes: int = option(64 * 2**10, "most bytes of request line and headers; more is answered 431",
                                   flags=("--h11-max-incomplete-event-size",))
    max_headers: int = option(100, "most headers of a request; more are answered 431",
                              flags=("--h11-max-header-count",))
    access_log: bool = option(False, "log a line per HTTP request")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How requests are answered."""

    served_model_name: tuple[str, ...] = option((), "names under which the model is served (default: the model's)")
    queue_timeout: float = option(60.0, "seconds a request may wait to start; then it is answered 408")
    request_timeout: float | None = option(None, "seconds a request may take in all; then it is answered 504")
    keep_alive_interval: float = option(15.0, "seconds of silence on a stream after which a comment is sent; 0: never",
                                        flags=("--sse-keep-alive-interval",))
    shutdown_timeout: float = option(30.0, "seconds that SIGTERM gives running requests")
    hang_timeout: float = option(60.0, "seconds after which a step counts as hung and /ready says so")
    stream_interval: int = option(1, "tokens per streamed event")
    enable_force_include_usage: bool = option(False, "send usage with every stream, asked or not")
    enable_log_requests: bool = option(False, "log the id, sizes and end of every request")
    disable_log_stats: bool = option(False, "no line of statistics every 10 s")
    metrics_prefix: str = option("quire", "first part of the names of /metrics; vllm suits existing dashboards")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything a server is built from."""

    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
    serve: ServeConfig = ServeConfig()
