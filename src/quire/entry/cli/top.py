"""`quire top`: what a server or a router with its backends does, in a terminal, several times a second.

Never imports torch; rich only when it runs.
"""

import argparse

from quire.config.env import client_key
from quire.config.flags import FlagParser
from quire.entry.cli.remote import RemoteServer
from quire.entry.exit_codes import DONE
from quire.entry.keyboard_interrupt import raise_on_interrupt

SUMMARY = "watch a running server or router in the terminal: requests, steps, KV blocks, latencies"
URL = "http://127.0.0.1:8000"


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire top`."""
    parser.add_argument("--url", metavar="URL", default=URL, help=f"the server or the router (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY or $OPENAI_API_KEY)")
    parser.add_argument("--once", action="store_true", help="print one picture, and end")
    parser.add_argument("--no-color", action="store_true", help="no colours; so does the environment variable NO_COLOR")


def run(args: argparse.Namespace) -> int:
    """Watch until Ctrl-C. Raises `QuireError` when the server cannot be watched."""
    from quire.entry.cli.top_watch import watch

    raise_on_interrupt()
    server = RemoteServer(args.url, args.api_key or client_key())
    try:
        watch(server, once=args.once, color=not args.no_color)
    except KeyboardInterrupt:
        pass  # the way to end it
    return DONE
