"""`quire serve`: an OpenAI-compatible server. Reads the configuration, says what is odd about it, and starts it.

Never imports torch: the engine runs in a process of its own.
"""

import argparse
import sys

from quire.config import flags
from quire.config.env import PEER_KEY, peer_variables
from quire.config.peer_flags import add_peer_flags
from quire.config.serve import LEAST_WAITING, WAITING_PER_SLOT, ServerConfig, is_loopback
from quire.config.sources import CONFIG_FILE
from quire.contracts.errors import ConfigError
from quire.entry.leaving import raise_on_interrupt

SUMMARY = "serve a model over HTTP, as OpenAI's API"
DESCRIPTION = """\
Serve a model over HTTP, as OpenAI's API.

A value comes from the command line, else from the environment (QUIRE_PORT=8001), else from the file of --config, else
it is the default. Every vLLM flag is accepted, ignored with a note, or rejected with a reason.
"""


def configure(parser: flags.FlagParser) -> None:
    """Add the command's flags, vLLM's included."""
    parser.description = DESCRIPTION
    flags.add_model_argument(parser)
    parser.add_argument("--config", dest=CONFIG_FILE, metavar="FILE",
                        help="YAML file of options: `max-model-len: 4096`")
    parser.add_argument("--print-config", action="store_true",
                        help="print every value and where it came from, as a file for --config, and leave")
    flags.add_flags(parser, flags.server_options())
    add_peer_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Exit code 0 after a clean stop, 1 when the engine died."""
    settings = flags.settings_of(args, server=True)
    config = flags.server_config(settings)
    if args.print_config:
        if settings.values.get("max_waiting") is None:
            origin = f"default: {WAITING_PER_SLOT} x max_num_seqs, at least {LEAST_WAITING}"
            settings.put("max_waiting", config.max_waiting, origin)
        print(settings.describe(flags.server_options()))
    for note in [*settings.notes, *(secret_notes(config) if args.print_config else ())]:
        print(f"quire: note: {note}", file=sys.stderr)
    if args.print_config:
        return 0
    check_peer_key(config)
    for warning in bind_warnings(config):
        print(f"quire: warning: {warning}", file=sys.stderr)
    from quire.entry.http.console import Console
    from quire.entry.http.server import run as serve

    raise_on_interrupt()
    console = Console(config)
    try:
        return serve(config, console)
    finally:
        console.close()


def secret_notes(config: ServerConfig) -> list[str]:
    """What --print-config leaves out, and how to give it."""
    lines = []
    if config.http.api_key:
        lines.append("the API key is printed as ***: with this file, give it in QUIRE_API_KEY or with --api-key.")
    if config.engine.load.hf_token:
        lines.append("the hub token is printed as ***: with this file, give it in HF_TOKEN.")
    return lines


def check_peer_key(config: ServerConfig) -> None:
    """Refuse to start open where the environment names a key for vLLM; raises `ConfigError`."""
    if PEER_KEY in peer_variables() and not config.http.api_key:
        raise ConfigError(f"{PEER_KEY} is set and not read here: without a key of its own this server would be open. "
                          f"Set QUIRE_API_KEY or --api-key, or unset {PEER_KEY}.")


def bind_warnings(config: ServerConfig) -> list[str]:
    """What is dangerous about where a server listens and whom it lets in."""
    http = config.http
    lines = []
    if http.uds is None and not is_loopback(http.host) and not http.api_key:
        lines.append(f"anybody who can reach {http.host}:{http.port} can use this server: set --api-key, or "
                     f"--host 127.0.0.1.")
    if http.uds is None and not is_loopback(http.host) and http.api_key and not http.ssl_certfile:
        lines.append("keys and texts travel unencrypted: put a proxy with TLS in front, or set --ssl-certfile.")
    if http.allowed_hosts and (http.uds is not None or http.api_key or not is_loopback(http.host)):
        lines.append("--allowed-hosts changes nothing here: names are looked at only without a key, on this machine's "
                     "own address.")
    if "*" in http.allowed_hosts and not http.api_key:
        lines.append("--allowed-hosts * without --api-key lets any web page that you visit use this server.")
    if "*" in http.allowed_origins and not http.api_key:
        lines.append("--allowed-origins * without --api-key lets any web page that you visit use this server.")
    return lines
