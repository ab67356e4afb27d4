"""`quire trace`: run one request and show every function that it passes through."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.env import client_key
from quire.config.flags import (
    FlagParser,
    add_engine_flags,
    add_model_argument,
    engine_config,
    given_options,
    settings_of,
)
from quire.config.peer_flags import add_peer_flags
from quire.contracts.errors import ModelNotFound
from quire.entry.cli.remote import RemoteServer
from quire.entry.cli.sampling import add_sampling_flags, sampling_values
from quire.entry.keyboard_interrupt import raise_on_interrupt

if TYPE_CHECKING:
    from quire.observe.calls import Span

BUILT_IN = "The quire is a stack of folded pages."  # prompt
SUMMARY = "run one request, and show every function from the call to the kernels, with shapes and times"


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire trace`."""
    add_model_argument(parser)
    parser.add_argument(
        "prompt_argument",
        metavar="PROMPT",
        nargs="?",
        help="text to continue (default: a built-in one)",
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the same as PROMPT, without a MODEL before it")
    parser.add_argument("--max-tokens", type=int, default=4, metavar="N", help="tokens to generate (default: 4)")
    add_sampling_flags(parser, skip=("--max-tokens", "--ignore-eos"))
    parser.add_argument("--after", metavar="TEXT", help="answer this text before: the request finds its cache")
    parser.add_argument("--adapter", metavar="PATH", help="adapter (LoRA) of the request: its folder, or hub id")
    parser.add_argument(
        "--from",
        dest="begin",
        choices=("request", "http", "start", "load", "flag"),
        default="request",
        help="request = from the call to the kernels; http = from the socket of a server through all its processes; "
        "start = from the options to an engine that is ready; load = the way of a stored tensor into a kernel's "
        "memory; flag = the way of each given flag's value (default: request)",
    )
    parser.add_argument("--tensor", metavar="NAME", help="tensor of --from load (default: the first query projection)")
    parser.add_argument("--url", metavar="URL", help="trace a request of this server; without --request the next")
    parser.add_argument("--request", metavar="ID", help="a request of --url that runs or waits")
    parser.add_argument("--api-key", metavar="KEY", help="of --url (default: $QUIRE_API_KEY or $OPENAI_API_KEY)")
    parser.add_argument("--full", action="store_true", help="show repeated parts, too")
    parser.add_argument("--lanes", action="store_true", help="what the CPU does while the device runs each step")
    parser.add_argument("--step", action="store_true", help="halt at each stop as a debugger; h lists the commands")
    parser.add_argument("--script", metavar="FILE", help="file with the commands of --step, one in a line")
    parser.add_argument("--json", action="store_true", help="print the tree of calls as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a trace that ui.perfetto.dev opens")
    add_engine_flags(parser, skip=("async_depth", "enforce_eager", "seed"))
    add_peer_flags(parser)
    parser.elsewhere = {
        "--enforce-eager": "a trace runs eagerly, and --lanes as the engine does: leave it out",
        "--async-depth": "a trace has one step in flight, and --lanes two: leave it out",
    }


def run(args: argparse.Namespace) -> int:
    """Run a request. Print the functions that it called, as a tree, and write the Perfetto trace of --out."""
    from quire.traces.clashes import check_flags

    check_flags(args)
    sampling_values(args)
    for note in settings_of(args).notes:
        print(f"quire: note: {note}", file=sys.stderr)
    if args.begin == "flag":
        from quire.traces.flag_trace import given_flag_lines

        print(*given_flag_lines(settings_of(args), engine_config(args)), sep="\n")
        return 0
    options = {"enable_lora": True} if args.adapter else {}
    options |= given_options(args)
    try:
        if args.url is None and args.begin != "http":
            return _in_process(args, options)
        raise_on_interrupt()
        return _print_calls(args, _of_server(args, options))
    except ModelNotFound as error:
        hint = " For a prompt to the bundled model: quire trace -p PROMPT." * (args.prompt is None)
        raise ModelNotFound(f"{error}{hint}") from None


def _of_server(args: argparse.Namespace, options: dict[str, Any]) -> "Span":
    """Return the calls of a request: in a server that runs, or in every process of one that starts for it."""
    if args.url is not None:
        from quire.traces.live_trace import trace_live

        return trace_live(RemoteServer(args.url, args.api_key or client_key()), args.request)
    from quire.config.serve import ServerConfig
    from quire.traces.http_trace import trace_http

    config = ServerConfig.from_flat(**options, host="127.0.0.1", port=0, access_log=False)
    return trace_http(config, _prompt(args), max_tokens=args.max_tokens, full=args.full, **sampling_values(args))


def _in_process(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Build an engine here, and print what the flags ask for."""
    from quire.contracts.adapters import LoRARequest
    from quire.entry.llm import LLM
    from quire.traces.lanes import lane_lines, trace_lanes
    from quire.traces.load_trace import check_tensor, load_lines
    from quire.traces.start_trace import start_lines, trace_start
    from quire.traces.step_commands import step_through
    from quire.traces.trace import trace

    if args.begin == "start":
        llm, found = trace_start(lambda: LLM(**options), "start")
        with llm:
            return _print_calls(args, found, start_lines(found))
    if args.begin == "load" and args.tensor is not None:
        check_tensor(engine_config(args), args.tensor)
    with LLM(**options | ({"async_depth": 2} if args.lanes else {"async_depth": 1, "enforce_eager": True})) as llm:
        if args.begin == "load":
            print(*load_lines(llm, args.tensor), sep="\n")
            return 0
        if args.lanes:
            found = trace_lanes(llm, _prompt(args), max_tokens=args.max_tokens, **sampling_values(args))
            return _print_calls(args, found, lane_lines(found))
        asked = LoRARequest(Path(args.adapter).name, 1, args.adapter) if args.adapter else None
        given: dict[str, Any] = {"max_tokens": args.max_tokens, "lora_request": asked, "after": args.after or ""}
        given |= sampling_values(args)
        if args.step:
            return step_through(llm, _prompt(args), args.script, **given)
        return _print_calls(args, trace(llm, _prompt(args), **given))


def _print_calls(args: argparse.Namespace, found: "Span", lines: Iterable[str] | None = None) -> int:
    """Print a tree of calls, as `lines` if they are given, or as JSON. Write the file of --out."""
    from quire.observe.render_calls import render, write_events

    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        folded = args.begin == "http" or args.url is not None  # already
        print(*(lines or render(found, None if args.full or folded else set())), sep="\n")
    if args.out is not None:
        write_events(args.out, found)
    return 0


def _prompt(args: argparse.Namespace) -> str:
    return str(args.prompt or args.prompt_argument or BUILT_IN)
