"""`quire tour`: one token through the engine, stop by stop, with the values of a live trace."""

import argparse
import json
from pathlib import Path

from quire.config.flags import FlagParser
from quire.contracts.errors import ConfigError

SUMMARY = "follow one token through the engine: code, values of a live trace, the idea, and what to change"
NAMES = ("token", "moe", "ranks")


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire tour`."""
    parser.add_argument(
        "name",
        metavar="TOUR",
        nargs="?",
        choices=NAMES,
        default="token",
        help="token = the bundled model in twelve stops; moe = latent attention (MLA) and experts of a small DeepSeek; "
        "ranks = two ranks on CPUs (default: token)",
    )
    parser.add_argument("--lang", choices=("en", "zh"), help="language of the texts (default: the locale's, or en)")
    parser.add_argument("--stop", type=int, metavar="N", help="show this stop alone")
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="text to continue (default: that of the tour)")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="change the small model's config.json (moe)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the small model in a new folder (moe)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with drawings instead")


def run(args: argparse.Namespace) -> int:
    """Run a request, and show its stops."""
    from quire.tour.texts import read_tour

    changes = dict(_change(words) for words in args.set)
    count = len(read_tour(args.name).stops)
    if args.stop is not None and not 1 <= args.stop <= count:
        raise ConfigError(f"--stop {args.stop} does not exist: give 1 to {count}.")
    if args.prompt == "":
        raise ConfigError("--prompt is an empty text: give it one, or leave it out.")
    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise ConfigError(f"--html: the folder of {args.html} does not exist: make it first.")
    if (changes or args.keep) and args.name != "moe":
        raise ConfigError("--set and --keep are for the model that is made up for quire tour moe: leave them out.")
    from quire.tour.guide import guide, write_page
    from quire.tour.render import show

    with guide(args.name, args.lang, args.prompt, changes, args.keep) as visit:
        found = visit.pages(args.stop, {*args.set, args.prompt} - {None})
        if args.html is not None:
            write_page(args.html, visit, found)
            print(args.html)
        elif args.json:
            print(json.dumps([page.plain() for page in found], indent=1, ensure_ascii=False))
        else:
            show(visit.text, found, visit.language, alone=args.stop is not None)
    return 0


def _change(words: str) -> tuple[str, object]:
    name, equals, value = words.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        raise ConfigError(
            f"--set {words} is not NAME=VALUE with a value in JSON, such as num_experts_per_tok=4."
        ) from None
