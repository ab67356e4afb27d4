"""Files that a server's options name, read once without a server: API keys, certificate and requests of the warm-up."""

from datetime import UTC, datetime

from quire.config.serve import ServerConfig
from quire.entry.http.access.certificate import check_certificate, end_of
from quire.entry.http.access.keyring import Keyring


def check_files(config: ServerConfig, *, by_priority: bool) -> list[str]:
    """Return sentences about the configuration and the files that it names. Raises `ConfigError` for one that cannot be
    used. by_priority: requests are served by priority"""
    access, certificate = config.access, config.http.ssl_certfile
    lines = ["The files can be used. What depends on model and devices is checked by a start, and by quire explain."]
    if access.api_key_file is not None:
        keyring = Keyring(access, by_priority=by_priority)
        lines.append(f"{keyring.num_named} API keys are in {access.api_key_file}.")
    check_certificate(config.http)
    if certificate is not None and (end := end_of(certificate)) is not None:
        lines.append(f"The certificate in {certificate} ends on {datetime.fromtimestamp(end, UTC):%Y-%m-%d}.")
    if config.http.warmup_requests is not None:
        from quire.entry.http.life.warm_up import read_warm_up  # here: it imports the routes

        lines.append(f"{len(read_warm_up(config.http))} requests are in {config.http.warmup_requests}.")
    return lines
