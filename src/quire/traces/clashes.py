"""Flags of `quire trace` that do not go together."""

import argparse
from collections.abc import Iterator

from quire.config.engine import ParallelConfig
from quire.config.flags import engine_config
from quire.contracts.errors import ConfigError
from quire.entry.cli.remote import refuse_engine_flags
from quire.entry.cli.sampling import PREFIX as SAMPLING
from quire.traces.step_words import read_script


def check_flags(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that do not go together, a file that cannot be written, and a wrong script."""
    if args.url is not None:
        refuse_engine_flags(vars(args))
    if words := next((words for clash, words in _clashes(args) if clash), ""):
        raise ConfigError(words)
    if args.script is not None:
        read_script(args.script)


def _clashes(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Yield each clash, True where the flags have it, and the words for it."""
    other, out = args.begin != "request", args.out is not None
    yield args.tensor is not None and args.begin != "load", "--tensor names what --from load shows: add --from load."
    yield bool(args.after) and other, "--after is for a trace of a request: leave it or --from out."
    for name in ("prompt", "after"):
        yield getattr(args, name) == "", f"--{name} is an empty text: give it one, or leave it out."
    prompt = args.prompt is not None or args.prompt_argument is not None
    yield prompt and args.begin in ("start", "load", "flag"), f"--from {args.begin} sends no prompt: leave it out."
    belongs = "--request and --api-key belong to a server: add --url, or leave them out."
    sampling = next((name for name in vars(args) if name.startswith(SAMPLING)), "")
    elsewhere = args.url is not None or args.begin in ("start", "load", "flag")
    words = f"--{sampling.removeprefix(SAMPLING).replace('_', '-')} is of a request that the command makes: "
    yield bool(sampling) and elsewhere, f"{words}leave it, or --url and --from out."
    yield args.request == "", "--request is an empty text: give the id of a request, or leave it out for the next one."
    yield args.tensor == "", "--tensor is an empty text: give it a name, or leave it out."
    yield (
        args.max_tokens < 1,
        f"--max-tokens {args.max_tokens}: a trace is of a request that makes a token: give 1 or more.",
    )
    yield args.url is None and (args.request is not None or args.api_key is not None), belongs
    clash = _given(args, "begin", "prompt", "after", "adapter", "full")
    yield (
        args.url is not None and bool(clash),
        f"--url shows a request that the server has, shortened: leave {clash} out.",
    )
    yield args.script is not None and not args.step, "--script has commands of --step: add --step."
    clash = _given(args, "begin", "url", "json", "out", "full")
    yield args.step and bool(clash), f"--step halts at stops of a request here: leave {clash} out."
    clash = _given(args, "begin", "url", "step", "adapter", "after", "full")
    yield args.lanes and bool(clash), f"--lanes shows the steps of a request here: leave {clash} out."
    asked = engine_config(args).parallel if args.step or args.lanes else ParallelConfig()
    ranks = asked.tensor_parallel_size * asked.pipeline_parallel_size * asked.data_parallel_size
    words = "this process, and ranks are processes of their own: leave -tp, -pp and -dp out."
    yield ranks > 1, f"{'--lanes shows' if args.lanes else '--step halts'} {words}"
    http = "--from http sends a request without an adapter: leave --adapter out."
    yield bool(args.adapter) and args.begin == "http", http
    yield out and args.begin == "load", "--from load has no times: leave --out out."
    lines = f"--from {args.begin} has lines, no calls: leave --json out."
    yield args.json and args.begin in ("load", "flag"), lines
    missing = out and not args.out.resolve().parent.is_dir()
    yield missing, f"--out: the folder of {args.out} does not exist: make it first."


def _given(args: argparse.Namespace, *names: str) -> str:
    """Return those flags of `names` that are given, in words; "": none."""
    given = [name for name in names if getattr(args, name) not in (None, False, "request")]
    flags = [f"--{'from' if name == 'begin' else name}" for name in given]
    return " and ".join([", ".join(flags[:-1])] * (len(flags) > 1) + flags[-1:])
