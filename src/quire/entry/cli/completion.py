"""`quire completion`: what a shell needs to complete `quire` command lines, made from the parser itself."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.config.flags import FlagParser

SUMMARY = "print a script that completes command lines in bash, zsh or fish"
DESCRIPTION = """\
Print a script that completes command lines.

    bash    eval "$(quire completion bash)" in ~/.bashrc
    zsh     eval "$(quire completion zsh)" in ~/.zshrc, after compinit
    fish    quire completion fish > ~/.config/fish/completions/quire.fish
"""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: its spellings, its help, whether a value follows and which values there are ((): any)."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: the words that lead to it, its summary, its flags and the words that may follow."""

    path: tuple[str, ...]
    summary: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def configure(parser: FlagParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help=", ".join(SCRIPTS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from quire.entry.cli.main import build_parser

    print(SCRIPTS[args.shell](list(commands_of(build_parser()))))
    return 0


def commands_of(parser: FlagParser, path: tuple[str, ...] = (), summary: str = "") -> Iterator[Command]:
    """The parser's command and, below it, every other, parents first."""
    flags, words, below = [], [], []
    for action in parser.actions():
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            words += list(action.choices)
            below += [(name, child, summaries.get(name, "")) for name, child in action.choices.items()]
        elif not action.option_strings:
            words += [str(choice) for choice in action.choices or ()]
        elif action.help is not argparse.SUPPRESS:
            flags.append(Flag(names=tuple(action.option_strings), help=(action.help or "").replace("%%", "%"),
                              takes_value=action.nargs != 0, choices=tuple(map(str, action.choices or ()))))
    yield Command(path=path, summary=summary, flags=tuple(flags), words=tuple(words))
    for name, child, text in below:
        yield from commands_of(child, (*path, name), text)


def bash_script(commands: list[Command]) -> str:
    """Flags, values and subcommands for bash."""
    steps, choices, words = [], [], []
    for command in commands:
        at = "".join(f" {word}" for word in command.path)
        if command.path:
            before = "".join(f" {word}" for word in command.path[:-1])
            steps.append(f'            "{before} {command.path[-1]}") path="{at}" ;;')
        for flag in command.flags:
            if flag.choices:
                spelt = "|".join(f'"{at} {name}"' for name in flag.names)
                choices.append(f'        {spelt}) words="{" ".join(flag.choices)}" ;;')
        names = [name for flag in command.flags for name in flag.names]
        words.append(f'            "{at}") words="{" ".join(command.words)}" flags="{" ".join(names)}" ;;')
    return _filled("bash", STEPS=steps, CHOICES=choices, WORDS=words)


def zsh_script(commands: list[Command]) -> str:
    """Flags and subcommands, with their help, for zsh."""
    cases = []
    for command in commands:
        if command.path:
            entries = [f"{_zsh(word)}" for word in command.words]
            entries += [_zsh(f"{_colons(name)}:{_colons(flag.help)}") for flag in command.flags for name in flag.names]
            cases.append(f"        ({' '.join(command.path)}) entries=({' '.join(entries)}) ;;")
    top = [_zsh(f"{c.path[0]}:{_colons(c.summary)}") for c in commands if len(c.path) == 1]
    cases = [case.replace("(bench) ", "(bench*) ") for case in reversed(cases)]
    return _filled("zsh", TOP=[" ".join(top)], CASES=cases)


def _filled(shell: str, **parts: list[str]) -> str:
    """The script of a shell, beside this file, with lines for its @MARKS@."""
    script = Path(__file__).with_suffix(f".{shell}").read_text().rstrip()
    for name, lines in parts.items():
        script = script.replace(f"@{name}@" if lines else f"@{name}@\n", "\n".join(lines))
    return script


def fish_script(commands: list[Command]) -> str:
    """Flags, values and subcommands, with their help, for fish."""
    lines = []
    for command in commands:
        if not command.path:
            continue
        parent = command.path[:-1]
        below = " ".join(c.path[-1] for c in commands if c.path[:-1] == parent and c.path)
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.path)
        first = f"__fish_seen_subcommand_from {parent[0]}; and not __fish_seen_subcommand_from {below}" if parent else \
            "__fish_use_subcommand"
        lines.append(f"complete -c quire -n {_fish(first)} -f -a {command.path[-1]} -d {_fish(command.summary)}")
        for flag in command.flags:
            spelt = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-{'s' if len(name) == 2 else 'o'} "
                             f"{name[1:]}" for name in flag.names)
            value = f" -r -f -a {_fish(' '.join(flag.choices))}" if flag.choices else " -r" * flag.takes_value
            lines.append(f"complete -c quire -n {_fish(seen)} {spelt}{value} -d {_fish(flag.help)}")
    return "\n".join(lines)


def _colons(text: str) -> str:
    return text.replace(":", "\\:")


def _zsh(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
