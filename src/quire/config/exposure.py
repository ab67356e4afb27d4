"""Checks of the API keys of a server, and warnings about its address and its rules of access."""

from quire.config.env import PEER_KEY, peer_variables, refuse_empty, variable
from quire.config.serve import AccessConfig, ServerConfig, is_loopback
from quire.contracts.errors import ConfigError


def check_keys(access: AccessConfig) -> None:
    """Raise `ConfigError` when the environment names an API key, but there is none and the server would be open.

    A variable that a script or a secret left empty is such a name, and so is vLLM's variable.
    """
    if access.keyed:
        return
    refuse_empty(map(variable, ("api_key", "api_key_file")), "this server would be open to everyone")
    if PEER_KEY in peer_variables():
        raise ConfigError(
            f"{PEER_KEY} is set, and Quire does not read it: this server would be open to everyone. "
            f"Set QUIRE_API_KEY or --api-key, or unset {PEER_KEY}."
        )


def bind_warnings(config: ServerConfig) -> list[str]:
    """Return warnings about a dangerous address or dangerous access rules of a server."""
    http, keyed = config.http, config.access.keyed
    lines = []
    if http.uds is None and not is_loopback(http.host) and not keyed:
        lines.append(
            f"everyone who can reach {http.host}:{http.port} can use this server: set --api-key, or --host 127.0.0.1."
        )
    if http.uds is None and not is_loopback(http.host) and keyed and not http.ssl_certfile:
        lines.append("keys and texts travel unencrypted: put a proxy with TLS in front, or set --ssl-certfile.")
    if http.allowed_hosts and (http.uds is not None or keyed or not is_loopback(http.host)):
        lines.append(
            "--allowed-hosts has no effect here: host names are checked only without a key, on a loopback "
            "address. Leave it out."
        )
    if "*" in http.allowed_hosts and not keyed:
        lines.append("--allowed-hosts * without --api-key lets any web page that you visit use this server.")
    if "*" in http.allowed_origins and not keyed:
        lines.append("--allowed-origins * without --api-key lets any web page that you visit use this server.")
    return lines
