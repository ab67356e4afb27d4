"""`quire explain`: prints all choices the engine would make for a model, without its weights. Never imports torch."""

import argparse
import json
import sys

import msgspec

from quire.config import flags
from quire.config.peer_flags import add_peer_flags
from quire.config.sources import CONFIG_FILE
from quire.entry.terminal_messages import wrapped

SUMMARY = "show what would run, where and why: layers, weights, kernels, memory, ranks"
WIDTH = 200  # characters per line where the output is not a terminal


def configure(parser: flags.FlagParser) -> None:
    """Add the flags of `quire explain`, which include those of `quire serve`."""
    from quire.explain.describe import GPUS

    flags.add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: all names of all layers")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--rank", metavar="N", type=int, help="show one rank: its groups, exchanges and slices")
    part.add_argument("--layer", metavar="N", help="show one layer in full: a number, embed or head")
    parser.add_argument("--config", dest=CONFIG_FILE, metavar="FILE", help="YAML file of options")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", *GPUS), help="a device of this machine, or a GPU model to plan for"
    )
    flags.add_flags(parser, ((title, option) for title, option in flags.server_options() if option.name != "device"))
    add_peer_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan of an engine (layers, weights, kernels, memory, ranks) as a tree, or as JSON."""
    from quire.explain.describe import GPUS, one_layer, plan_engine
    from quire.plan.meeting_rows.records import REFUSED
    from quire.plan.meetings import Meeting
    from quire.reports.ranks import describe_one

    settings = flags.settings_of(args, server=True, planned=True)
    described = args.device if args.device in GPUS else ""
    if args.device is not None and not described:
        settings.put("device", args.device, "flag --device")
    for note in settings.notes:
        print(wrapped(f"quire: note: {note}", WIDTH), file=sys.stderr)
    refused = [Meeting(one.split()[0].rstrip(":"), one, "", REFUSED) for one in settings.refusals]
    for one in refused:
        print(wrapped(f"quire: refused by quire serve: {one.reason}.", WIDTH), file=sys.stderr)
    config = flags.server_config(settings).engine
    report = plan_engine(config, described)
    if args.rank is not None:
        plan = describe_one(report, args.rank)
    else:
        plan = one_layer(report.describe(), args.layer) if args.layer is not None else report.describe()
    plan["missing"] += [one._asdict() for one in refused]
    if args.json:
        print(msgspec.json.format(json.dumps(plan), indent=1))  # `json` itself is slow where it indents
        return 0
    from rich.console import Console

    from quire.explain.render import render
    from quire.explain.render_ranks import render_rank

    shown = render(plan, args.layer is not None) if args.rank is None else render_rank(plan)
    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(shown)
    return 0
