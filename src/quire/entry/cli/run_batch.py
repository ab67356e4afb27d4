"""`quire run-batch`: answer a file of requests in the format of OpenAI's batch API.

Never imports torch: the engine runs in its own process.
"""

import argparse
import asyncio
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import flags
from quire.config.peer_flags import add_peer_flags
from quire.config.serve import AccessConfig, DeadlineConfig, HttpConfig, ServeConfig, ServerConfig
from quire.config.sources import CONFIG_FILE
from quire.contracts.errors import ConfigError
from quire.entry.exit_codes import DONE, FAILED, INTERRUPTED
from quire.entry.keyboard_interrupt import raise_on_interrupt

if TYPE_CHECKING:
    from quire.entry.http.batch import Batch

SUMMARY = "answer a file of requests (OpenAI's batch format)"
DESCRIPTION = """\
Answer a file of requests, one JSON object per line:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The output holds one line per request, in the same order. An interrupted run goes on when it is started again: requests
that have an answer in the output are not run again.
"""
HTTP_OPTIONS = ("max_body_bytes", "trust_request_chat_template")  # options of `HttpConfig` that apply without a server
QUIET_SECONDS = 10.0  # between two lines of progress where the output is not a terminal


def configure(parser: flags.FlagParser) -> None:
    """Add the flags of `quire run-batch`, and vLLM's other flags, which are ignored with a note or rejected."""
    parser.description = DESCRIPTION
    flags.add_model_argument(parser)
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one per line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="file for the answers")
    parser.add_argument("--config", dest=CONFIG_FILE, metavar="FILE", help="YAML file of options, as for `quire serve`")
    flags.add_engine_flags(parser)
    flags.add_flags(parser, (option for option in flags.options_of(HttpConfig) if option[1].name in HTTP_OPTIONS))
    flags.add_flags(parser, flags.options_of(DeadlineConfig))
    flags.add_flags(parser, flags.options_of(ServeConfig))
    add_peer_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer a file of requests. Exit code 1 when all requests failed or the engine died, 130 when interrupted."""
    settings = flags.settings_of(args, server=True)
    settings.values.setdefault("queue_timeout", math.inf)  # no client waits for these answers
    config = replace(flags.server_config(settings), access=AccessConfig())  # nobody calls, whatever QUIRE_API_KEY is
    for note in settings.notes:
        print(f"quire: note: {note}", file=sys.stderr)
    if args.input_file.absolute() == args.output_file.absolute():
        raise ConfigError("--output-file is the input: choose another file.")
    from quire.entry.http.batch import Batch

    batch = Batch(args.input_file, args.output_file, config.http.max_body_bytes)
    raise_on_interrupt()
    try:
        if batch.done:
            print(f"quire: note: {batch.done} of {batch.total} were answered by an earlier run.", file=sys.stderr)
        code = asyncio.run(_answer(batch, config)) if batch.done < batch.total else DONE
        if code == DONE:
            answers, errors, commonest = batch.finish()
            why = commonest and f"; the commonest error: {commonest}"
            print(f"quire: {answers} answers and {errors} errors in {args.output_file}{why}", file=sys.stderr)
            code = FAILED if errors and not answers else DONE
        return code
    finally:
        batch.close()


async def _answer(batch: "Batch", config: ServerConfig) -> int:
    """Load the engine and run the requests until all are answered or a signal comes. Return the exit code."""
    from quire.entry.http.app import build_app
    from quire.entry.http.console import Console
    from quire.entry.http.engine import ServedEngine
    from quire.entry.http.server import settle_memory
    from quire.entry.signals import StopRequests
    from quire.observe.metrics import Metrics
    from quire.observe.progress import Progress

    metrics = Metrics(config.serve.metrics_prefix, config.model_names[0])
    engine, console, told = ServedEngine(config, metrics=metrics), Console(config), time.monotonic()

    async def work() -> int:
        for text in (await engine.start(console.loading)).notes:
            console.note(text)
        console.close()
        settle_memory()
        with Progress("answered", batch.total, enabled=True, unit="") as bar:

            def report() -> None:
                nonlocal told
                bar.update(batch.done, batch.total)
                if not sys.stderr.isatty() and time.monotonic() - told >= QUIET_SECONDS:
                    told = time.monotonic()
                    print(f"quire: {batch.done} of {batch.total} answered", file=sys.stderr)

            await batch.run(build_app(engine, config, metrics), report)
        return DONE

    with StopRequests() as stop:
        working, stopped = asyncio.create_task(work()), asyncio.create_task(stop.first.wait())
        try:
            await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else INTERRUPTED if stop.code == INTERRUPTED else FAILED
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await engine.close()
            console.close()
            if 0 < batch.done < batch.total:
                print(
                    f"quire: note: {batch.done} of {batch.total} answers are kept: run the same command to go on.",
                    file=sys.stderr,
                )
