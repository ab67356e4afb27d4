"""`quire explain`: prints all choices the engine would make for a model, without its weights. Never imports torch."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config import flags
from quire.config.engine import EngineConfig
from quire.config.option_parsers import parse_device, parse_size
from quire.config.peer_flags import add_peer_flags
from quire.config.sources import CONFIG_FILE
from quire.contracts.errors import ConfigError
from quire.entry.terminal_messages import wrapped

SUMMARY = "show what would run, where and why: layers, weights, kernels, memory, ranks"
if TYPE_CHECKING:
    from quire.platforms.cpu import CpuFacts

WIDTH = 200  # characters per line where the output is not a terminal
OUTPUT = ("--json", "--rank", "--layer", "--cost", "--diff", "--svg", "--batch", "--context", "--layouts")
CHANGE = ("path", "one", "other")


def configure(parser: flags.FlagParser) -> None:
    """Add the flags of `quire explain`, which include those of `quire serve`."""
    from quire.explain.describe import GPUS

    flags.add_model_argument(parser)
    parser.elsewhere = {"--expert": "--rank N tells the rank of each expert"}
    parser.add_argument("--json", action="store_true", help="print JSON: all names of all layers")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--rank", metavar="N", type=int, help="show one rank: its groups, exchanges and slices")
    part.add_argument("--layer", metavar="N", help="show one layer in full: a number, embed or head")
    part.add_argument(
        "--cost", action="store_true", help="show what a step costs: bytes, operations and a forecast, kernel by kernel"
    )
    part.add_argument(
        "--diff", metavar="WORDS", help="what changes with these flags or for this model: --diff='-q fp8 -tp 4'"
    )
    part.add_argument(
        "--svg", metavar="FOLDER", type=flags.reporting(_folder), help="write drawings of the plan to this folder"
    )
    parser.add_argument(
        "--batch", metavar="N", type=_positive, help="requests of the decode step of --cost (default: 1)"
    )
    parser.add_argument(
        "--context",
        metavar="N",
        type=_positive,
        help="tokens of each of its requests: 4k is 4,000, 4K 4,096 (default: 4K, or all)",
    )
    parser.add_argument(
        "--layouts", action="store_true", help="with --cost: what other divisions among GPUs send, and a forecast"
    )
    parser.add_argument("--config", dest=CONFIG_FILE, metavar="FILE", help="YAML file of options")
    parser.add_argument(
        "--device",
        type=flags.reporting(parse_device),
        choices=("auto", "cpu", "cuda", *GPUS),
        help="a device of this machine, or a GPU model to plan for",
    )
    flags.add_flags(parser, ((title, option) for title, option in flags.server_options() if option.name != "device"))
    add_peer_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan of an engine (layers, weights, kernels, memory, ranks) as a tree, or as JSON."""
    from quire.explain.describe import one_layer, plan_engine
    from quire.platforms.cpu import read_cpu_facts
    from quire.reports.ranks import describe_one

    _check(args)
    config, described, refused = _asked(args)
    if args.cost:
        return _print_cost(args, config, described)
    facts = read_cpu_facts()
    report = plan_engine(config, described, facts=facts)
    if args.rank is not None:
        plan = describe_one(report, args.rank)
    else:
        plan = one_layer(report.describe(), args.layer) if args.layer is not None else report.describe()
    plan["missing"] += refused
    if args.diff is not None:
        return _print_differences(args, plan, facts)
    if args.svg is not None:
        from quire.explain.cost import describe_cost
        from quire.explain.drawings import write_drawings

        cost = describe_cost(config, described, args.batch or 1, args.context)
        print(*write_drawings(plan, cost, args.svg), sep="\n")
        return 0
    if args.json:
        print(msgspec.json.format(json.dumps(plan), indent=1))  # `json` itself is slow where it indents
        return 0
    from quire.explain.render import render
    from quire.explain.render_ranks import render_rank

    _print(render(plan, args.layer is not None) if args.rank is None else render_rank(plan))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not go together."""
    of_cost = args.layouts or args.svg is None and (args.batch is not None or args.context is not None)
    if of_cost and not args.cost:
        raise ConfigError("--batch, --context and --layouts say what --cost shows: add --cost.")
    if args.svg is not None and args.json:
        raise ConfigError("--svg writes drawings, and --json prints the plan: leave one out.")
    if args.svg is not None and args.svg.suffix.lower() == ".svg":
        raise ConfigError(f"--svg writes a file for each drawing, and {args.svg} is a name of one: give a folder.")


def _asked(args: argparse.Namespace) -> tuple[EngineConfig, str, list[dict[str, Any]]]:
    """Return the configuration, the GPU to plan for ("": a device of this machine), and what serve refuses."""
    from quire.explain.describe import GPUS
    from quire.plan.meeting_rows.records import REFUSED
    from quire.plan.meetings import Meeting

    settings = flags.settings_of(args, server=True, planned=True)
    described = args.device if args.device in GPUS else ""
    if args.device is not None and not described:
        settings.put("device", args.device, "flag --device")
    for note in settings.notes:
        print(wrapped(f"quire: note: {note}", WIDTH), file=sys.stderr)
    refused = [Meeting(one.split()[0].rstrip(":"), one, "", REFUSED) for one in settings.refusals]
    for one in refused:
        print(wrapped(f"quire: refused by quire serve: {one.reason}.", WIDTH), file=sys.stderr)
    return flags.server_config(settings).engine, described, [one._asdict() for one in refused]


def _print_differences(args: argparse.Namespace, plan: dict[str, Any], facts: "CpuFacts") -> int:
    """Print the values that differ when the words of --diff stand behind the other flags."""
    from quire.explain.describe import plan_engine
    from quire.explain.differences import differences

    parser = flags.FlagParser(prog="quire explain", configure=configure)
    try:
        words = shlex.split(args.diff)
    except ValueError as error:
        raise ConfigError(f"--diff {args.diff}: {error}: quote its words once more.") from None
    if not words:
        raise ConfigError("--diff compares with other flags or another model: give it some, such as --diff='-q fp8'.")
    for word in words:
        if word.partition("=")[0] in OUTPUT:
            raise ConfigError(
                f"--diff: {word} says what is printed, not what is planned: put it before --diff, or leave it out."
            )
    given = parser.parse_args(words, argparse.Namespace(**vars(args)))
    if not words or words[0].startswith("-"):
        given.model_argument = args.model_argument
    config, described, refused = _asked(given)
    other = plan_engine(config, described, facts=facts).describe()
    other["missing"] += refused
    found = differences(plan, other)
    if args.json:
        print(msgspec.json.format(json.dumps([dict(zip(CHANGE, one, strict=True)) for one in found]), indent=1))
        return 0
    for path, one, two in found:
        print(f"{path}: {one} -> {two}")
    if not found:
        print("Both plans are the same.")
    return 0


def _print_cost(args: argparse.Namespace, config: EngineConfig, described: str) -> int:
    """Print the costs of steps, see `quire.explain.cost`."""
    from quire.explain.cost import describe_cost

    cost = describe_cost(config, described, args.batch or 1, args.context, layouts=args.layouts)
    if args.json:
        print(msgspec.json.format(json.dumps(cost), indent=1))
        return 0
    from quire.explain.render_cost import render_cost

    _print(render_cost(cost))
    return 0


def _print(shown: object) -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
        return
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n")  # tables are padded to their width


def _folder(text: str) -> Path:
    if not text:
        raise ValueError("an empty text: give the folder of the drawings")
    return Path(text)


def _positive(text: str) -> int:
    """Return the number that `text` names, such as 4096 or 32k."""
    try:
        number = parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number such as 64 or 4k") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
