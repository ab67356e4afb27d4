"""`quire completion`: scripts with which a shell completes `quire` command lines, made from the parser itself.

Every script holds the same table of possible words and the same awk program that looks them up. Only the code that a
shell calls for candidates differs.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from quire.config.flags import FlagParser

SUMMARY = "print a script that completes command lines in bash, zsh or fish"
DESCRIPTION = """\
Print a script that completes command lines.

    bash    eval "$(quire completion bash)" in ~/.bashrc
    zsh     eval "$(quire completion zsh)" in ~/.zshrc, after compinit
    fish    quire completion fish > ~/.config/fish/completions/quire.fish
"""
SHELLS = ("bash", "zsh", "fish")
Row = tuple[str, str, str, str]  # command, flag before ("" for none), word that may come, its help


def configure(parser: FlagParser) -> None:
    """Add the arguments of `quire completion`."""
    parser.description = DESCRIPTION
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the tab-completion script of the given shell. `args.build_parser` makes the parser of the command line."""
    print(script(args.shell, args.build_parser()))
    return 0


def rows(parser: FlagParser, command: str = "") -> Iterator[Row]:
    """Yield (command, flag, word, help) for each word that the shell may offer after the words of `command`.
    `flag`: the word is a value of this flag; "" = the word is a subcommand, a flag or an argument."""
    for action in parser.actions():
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield command, "", choice.dest, choice.help or ""
            for name, below in action.choices.items():
                yield from rows(below, f"{command} {name}".lstrip())
        elif action.help is not argparse.SUPPRESS:
            values = [str(value) for value in action.choices or ()]
            for flag in action.option_strings:
                yield command, "", flag, (action.help or "").replace("%%", "%")
            for flag in action.option_strings or ("",):
                yield from ((command, flag, value, "") for value in values)


def script(shell: str, parser: FlagParser) -> str:
    """Return the tab-completion script of a shell: its template, filled with the `rows` of the parser and with the awk
    program that searches them. The script holds the rows in single quotes, so each ' in the rows becomes ’."""
    lines = ["\t".join(row).replace("'", "’") for row in rows(parser)]
    here = Path(__file__)
    text, program = here.with_suffix(f".{shell}").read_text(), here.with_suffix(".awk").read_text()
    return text.rstrip().replace("@AWK@", program.rstrip()).replace("@ROWS@", "\n".join(lines))
