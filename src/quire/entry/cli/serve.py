"""`quire serve`: an OpenAI-compatible server. Reads the configuration, warns of dangerous settings, starts the server.

Never imports torch: the engine runs in its own process.
"""

import argparse
import sys
from functools import partial

from quire.config import flags
from quire.config.exposure import bind_warnings, check_keys
from quire.config.peer_flags import add_peer_flags
from quire.config.serve import LEAST_WAITING, WAITING_PER_SLOT, ServerConfig
from quire.config.sources import CONFIG_FILE
from quire.entry.keyboard_interrupt import raise_on_interrupt
from quire.observe.log_lines import lost_lines, notice
from quire.observe.log_writer import log_written_apart
from quire.procs.held_signals import release

SUMMARY = "serve a model over HTTP with OpenAI's API"
CHECK = "read the configuration and the files of {}, start nothing, and exit: 0, or 3 for a mistake"
DESCRIPTION = """\
Serve a model over HTTP with OpenAI's API.

Order of precedence: command line, environment (QUIRE_PORT=8001), file of --config, default. Every vLLM flag is
accepted, ignored with a note, or rejected with a reason.
"""


def configure(parser: flags.FlagParser) -> None:
    """Add the flags of `quire serve`, and vLLM's other flags, which are ignored with a note or rejected."""
    parser.description = DESCRIPTION
    flags.add_model_argument(parser)
    parser.add_argument(
        "--config", dest=CONFIG_FILE, metavar="FILE", help="YAML file of options: `max-model-len: 4096`"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every value and its source, as a file for --config, and exit"
    )
    parser.add_argument("--check", action="store_true", help=CHECK.format("API keys, certificate, adapters, warm-up"))
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
        print(notice(note, "note", config.log.log_format), file=sys.stderr)
    if args.print_config:
        return 0
    if config.serve.headless:
        from quire.ranks.headless import serve_host

        if sys.stderr.isatty():
            release()  # the terminal goes, and this host with it; elsewhere it has no files to read again
        return serve_host(
            config.engine,
            "quire.assemble.rank_child",
            lambda line: print(f"quire: note: {line}", file=sys.stderr, flush=True),
        )
    from quire.assemble.obtain import check_options
    from quire.ranks.headless import check_first_host

    check_keys(config.access)
    check_first_host(config.engine.hosts)
    check_options(config.engine)
    if args.check:
        from quire.entry.http.access.files import check_files
        from quire.entry.http.lora.check import check_adapters

        files = check_files(config, by_priority=config.engine.scheduler.scheduling_policy == "priority")
        print("\n".join([*files, *check_adapters(config)]))
        return 0
    for warning in bind_warnings(config):
        print(notice(warning, "warning", config.log.log_format), file=sys.stderr)
    from quire.entry.http.console import Console
    from quire.entry.http.server import run as serve

    raise_on_interrupt()
    with log_written_apart(partial(lost_lines, log_format=config.log.log_format)):
        console = Console(config)
        try:
            return serve(config, console)
        finally:
            console.close()


def secret_notes(config: ServerConfig) -> list[str]:
    """Return notes about secrets that --print-config leaves out, and how to give them."""
    lines = []
    if config.access.api_key:
        lines.append("the API key is printed as ***: with this file, give it in QUIRE_API_KEY or with --api-key.")
    if config.engine.load.hf_token:
        lines.append("the hub token is printed as ***: with this file, give it in HF_TOKEN.")
    return lines
