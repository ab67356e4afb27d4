"""`quire trace`: run one request and show every function that it passes through."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.engine import ParallelConfig
from quire.config.env import client_key
from quire.config.flags import (
    FlagParser,
    add_engine_flags,
    add_model_argument,
    engine_config,
    given_options,
    settings_of,
)
from quire.contracts.errors import ConfigError, ModelNotFound
from quire.entry.cli.remote import RemoteServer, refuse_engine_flags
from quire.entry.keyboard_interrupt import raise_on_interrupt

if TYPE_CHECKING:
    from quire.observe.calls import Span

SUMMARY = "run one request, and show every function from the call to the kernels, with shapes and times"


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire trace`."""
    add_model_argument(parser)
    parser.add_argument(
        "prompt_argument",
        metavar="PROMPT",
        nargs="?",
        default="The quire is a stack of folded pages.",
        help="text to continue (default: a built-in one)",
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the same as PROMPT, without a MODEL before it")
    parser.add_argument("--max-tokens", type=int, default=4, metavar="N", help="tokens to generate (default: 4)")
    parser.add_argument(
        "--after", metavar="TEXT", default="", help="answer this text before: the request finds its cache"
    )
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
    parser.add_argument(
        "--url", metavar="URL", help="trace a request of this running server; without --request the next"
    )
    parser.add_argument("--request", metavar="ID", help="a request of --url that runs or waits")
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key of --url (default: $QUIRE_API_KEY or $OPENAI_API_KEY)"
    )
    parser.add_argument("--full", action="store_true", help="show repeated parts, too")
    parser.add_argument(
        "--lanes", action="store_true", help="what the CPU does while each step runs on the device, with two in flight"
    )
    parser.add_argument(
        "--step", action="store_true", help="halt at each stop, as a debugger would; h lists the commands"
    )
    parser.add_argument("--script", metavar="FILE", help="file with the commands of --step, one in a line")
    parser.add_argument("--json", action="store_true", help="print the tree of calls as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a trace that ui.perfetto.dev opens")
    add_engine_flags(parser, skip=("async_depth", "enforce_eager"))


def run(args: argparse.Namespace) -> int:
    """Run a request. Print the functions that it called, as a tree, and write the Perfetto trace of --out."""
    _check(args)
    if args.url is not None:
        return _print_live(args)
    if args.begin == "flag":
        return _print_flags(args)
    options = {"enable_lora": True} if args.adapter else {}
    options |= given_options(args)
    try:
        if args.begin == "http":
            return _print_http(args, options)
        if args.begin == "start":
            return _print_start(args, options)
        if args.lanes:
            return _print_lanes(args, options | {"async_depth": 2})
        return _print_request(args, options | {"async_depth": 1, "enforce_eager": True})
    except ModelNotFound as error:
        raise ModelNotFound(f"{error} For a prompt to the bundled model: quire trace -p PROMPT.") from None


def _check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that do not go together, and for a file that cannot be written."""
    if args.tensor is not None and args.begin != "load":
        raise ConfigError("--tensor names what --from load shows: add --from load.")
    if args.after and args.begin != "request":
        raise ConfigError("--after is for a trace of a request: leave it or --from out.")
    if args.url is None and (args.request is not None or args.api_key is not None):
        raise ConfigError("--request and --api-key belong to a server: add --url, or leave them out.")
    if args.url is not None:
        refuse_engine_flags(vars(args))
        if args.begin != "request" or args.prompt or args.after or args.adapter or args.full:
            words = "--from, --prompt, --after, --adapter and --full"
            raise ConfigError(f"--url shows a request that the server has, shortened: leave {words} out.")
    if args.script is not None and not args.step:
        raise ConfigError("--script has commands of --step: add --step.")
    if args.step and (args.begin != "request" or args.url or args.json or args.out or args.full):
        raise ConfigError("--step halts at stops of a request here: leave --from, --url, --json, --out and --full out.")
    if args.lanes and (args.begin != "request" or args.url or args.step or args.adapter or args.after or args.full):
        words = "--from, --url, --step, --adapter, --after and --full"
        raise ConfigError(f"--lanes shows the steps of a request here: leave {words} out.")
    asked = engine_config(args).parallel if args.step or args.lanes else ParallelConfig()
    if asked.tensor_parallel_size * asked.pipeline_parallel_size * asked.data_parallel_size > 1:
        words = "--lanes shows" if args.lanes else "--step halts"
        raise ConfigError(f"{words} this process, and ranks are processes of their own: leave -tp, -pp and -dp out.")
    if args.adapter and args.begin == "http":
        raise ConfigError("--from http sends a request without an adapter: leave --adapter out.")
    if args.out is not None and args.begin == "load":
        raise ConfigError("--from load has no times: leave --out out.")
    if args.json and args.begin in ("load", "flag"):
        raise ConfigError(f"--from {args.begin} has lines, no calls: leave --json out.")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"--out: the folder of {args.out} does not exist: make it first.")


def _print_request(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Build an engine. Run a request and print its calls, or print the way of a tensor."""
    from quire.contracts.adapters import LoRARequest
    from quire.entry.llm import LLM
    from quire.traces.trace import trace

    with LLM(**options) as llm:
        if args.begin == "load":
            from quire.traces.load_trace import load_lines

            print(*load_lines(llm, args.tensor), sep="\n")
            return 0
        asked = LoRARequest(Path(args.adapter).name, 1, args.adapter) if args.adapter else None
        given: dict[str, Any] = {"max_tokens": args.max_tokens, "lora_request": asked, "after": args.after}
        if args.step:
            from quire.traces.step_commands import step_through

            return step_through(llm, _prompt(args), args.script, **given)
        found = trace(llm, _prompt(args), **given)
    return _print_calls(args, found)


def _print_lanes(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run a request with two steps in flight, and print the device's steps with the CPU's calls."""
    from quire.entry.llm import LLM
    from quire.traces.lanes import lane_lines, trace_lanes

    with LLM(**options) as llm:
        found = trace_lanes(llm, _prompt(args), max_tokens=args.max_tokens)
    return _print_calls(args, found, lane_lines(found))


def _print_http(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Start a server, send a request, and print its calls in every process."""
    from quire.config.serve import ServerConfig
    from quire.traces.http_trace import trace_http

    raise_on_interrupt()
    config = ServerConfig.from_flat(**options, host="127.0.0.1", port=0, access_log=False)
    found = trace_http(config, _prompt(args), max_tokens=args.max_tokens, full=args.full)
    return _print_calls(args, found)


def _print_live(args: argparse.Namespace) -> int:
    """Print the calls of a request of a running server."""
    from quire.traces.live_trace import trace_live

    raise_on_interrupt()
    return _print_calls(args, trace_live(RemoteServer(args.url, args.api_key or client_key()), args.request))


def _print_start(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Build an engine, and print the calls of its start."""
    from quire.entry.llm import LLM
    from quire.traces.start_trace import start_lines, trace_start

    llm, found = trace_start(lambda: LLM(**options), "start")
    with llm:
        return _print_calls(args, found, start_lines(found))


def _print_calls(args: argparse.Namespace, found: "Span", lines: Iterable[str] | None = None) -> int:
    """Print a tree of calls, as `lines` if they are given, or as JSON. Write the file of --out."""
    from quire.observe.render_calls import events, render

    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        folded = args.begin == "http" or args.url is not None  # already
        print(*(lines or render(found, None if args.full or folded else set())), sep="\n")
    _write(args.out, events(found, found.begin))
    return 0


def _prompt(args: argparse.Namespace) -> str:
    return str(args.prompt or args.prompt_argument)


def _print_flags(args: argparse.Namespace) -> int:
    """Print the way of each given option of the engine."""
    from quire.config.engine import flat_names
    from quire.traces.flag_trace import flag_lines, flag_way

    settings, config = settings_of(args), engine_config(args)
    names = [name for name in settings.values if name in flat_names() and name != "model"]
    if not names:
        raise ConfigError("--from flag shows the way of flags that are given: add one, such as --quantization fp8.")
    for name in names:
        print(*flag_lines(flag_way(config, name, settings.origins[name])), sep="\n")
    return 0


def _write(out: Path | None, found: Iterator[dict[str, object]]) -> None:
    """Write events to the file of --out, if it is given. Raises `ConfigError` if it cannot be written."""
    if out is None:
        return
    try:
        out.write_bytes(msgspec.json.encode({"traceEvents": list(found)}))
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written ({error.strerror}): choose another file.") from None
