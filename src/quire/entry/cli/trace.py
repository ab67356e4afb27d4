"""`quire trace`: run one request and show every function that it passes through."""

import argparse
from pathlib import Path

import msgspec

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, given_options
from quire.contracts.errors import ConfigError, ModelNotFound

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
    parser.add_argument("--adapter", metavar="PATH", help="adapter (LoRA) of the request: its folder, or hub id")
    parser.add_argument("--full", action="store_true", help="show repeated parts, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a trace that ui.perfetto.dev opens")
    add_engine_flags(parser, skip=("async_depth", "enforce_eager"))


def run(args: argparse.Namespace) -> int:
    """Run a request. Print the functions that it called, as a tree, and write the Perfetto trace of --out."""
    from quire.contracts.adapters import LoRARequest
    from quire.entry.llm import LLM
    from quire.explain.trace import events, render, trace

    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"--out: the folder of {args.out} does not exist: make it first.")
    adapters = {"enable_lora": True} if args.adapter else {}
    try:
        llm = LLM(**adapters | given_options(args) | {"async_depth": 1, "enforce_eager": True})
    except ModelNotFound as error:
        raise ModelNotFound(f"{error} For a prompt to the bundled model: quire trace -p PROMPT.") from None
    with llm:
        asked = LoRARequest(Path(args.adapter).name, 1, args.adapter) if args.adapter else None
        found = trace(llm, args.prompt or args.prompt_argument, max_tokens=args.max_tokens, lora_request=asked)
    print(*render(found, None if args.full else set()), sep="\n")
    if args.out is not None:
        try:
            args.out.write_bytes(msgspec.json.encode({"traceEvents": list(events(found, found.begin))}))
        except OSError as error:
            raise ConfigError(f"--out: {args.out} cannot be written ({error.strerror}): choose another file.") from None
    return 0
