"""`quire serve`: an OpenAI-compatible server. Reads the configuration, says what is odd about it, and starts it.

Never imports torch: the engine runs in a process of its own.
"""

import argparse
import sys

from quire.config.flags import (
    FlagParser,
    add_flags,
    add_model_argument,
    server_config,
    server_options,
    settings_of,
)
from quire.config.peer_args import add_peer_flags
from quire.config.serve import ServerConfig, is_loopback
from quire.config.sources import CONFIG_FILE
from quire.entry.cli.flags_page import flags_page

SUMMARY = "serve a model over HTTP, as OpenAI's API"
DESCRIPTION = """\
Serve a model over HTTP, as OpenAI's API.

A value comes from the command line, else from the environment (QUIRE_PORT=8001), else from the file of --config, else
it is the default. Flags of vLLM are taken where they mean something here, and answered where they do not.
"""


def configure(parser: FlagParser) -> None:
    """Add the command's flags, vLLM's included."""
    parser.description = DESCRIPTION
    add_model_argument(parser)
    parser.add_argument("--config", dest=CONFIG_FILE, metavar="FILE",
                        help="YAML file of options: `max-model-len: 4096`")
    parser.add_argument("--print-config", action="store_true",
                        help="print every value and where it came from, as a file for --config, and leave")
    parser.add_argument("--print-flags", action="store_true",
                        help="print a page about every flag, and what vLLM's mean here, and leave")
    add_flags(parser, server_options())
    add_peer_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Exit code 0 after a clean stop, 1 when the engine died."""
    if args.print_flags:
        print(flags_page(), end="")
        return 0
    settings = settings_of(args, server=True)
    config = server_config(settings)
    if args.print_config:
        print(settings.describe(server_options()))
        return 0
    for note in settings.notes:
        print(f"quire: note: {note}", file=sys.stderr)
    for warning in bind_warnings(config):
        print(f"quire: warning: {warning}", file=sys.stderr)
    from quire.entry.cli.console import Console
    from quire.entry.http.server import run as serve

    console = Console(config)
    try:
        return serve(config, console)
    finally:
        console.close()


def bind_warnings(config: ServerConfig) -> list[str]:
    """What is dangerous about where a server listens and whom it lets in."""
    http = config.http
    lines = []
    if http.uds is None and not is_loopback(http.host) and not http.api_key:
        lines.append(f"anybody who can reach {http.host}:{http.port} can use this server: set --api-key, or "
                     f"--host 127.0.0.1.")
    if http.uds is None and not is_loopback(http.host) and http.api_key and not http.ssl_certfile:
        lines.append("keys and texts travel unencrypted: put a proxy with TLS in front, or set --ssl-certfile.")
    if "*" in http.allowed_origins and not http.api_key:
        lines.append("--allowed-origins * without --api-key lets any web page that you visit use this server.")
    return lines
