"""docs/flags.md: every flag of ours, and what each flag of vLLM means here; never imports torch.

PYTHONPATH=src python tools/flags_page.py > docs/flags.md
"""

import json
from collections import Counter
from pathlib import Path

import quire.router
from quire.config.flags import flag_names, server_options
from quire.config.option_parsers import FORMATS_LACK, REFUSED_FORMATS
from quire.config.peer_flags import MEANINGS, PEER_FLAGS, PeerFlag
from quire.contracts.text_table import read_rows

ROUTER_FLAGS = Path(quire.router.__file__).with_name("flags.txt")


def flags_page() -> str:
    """The whole page, as Markdown."""
    page = Path(__file__).with_suffix(".md").read_text()
    parts = {"@OPTIONS@": _options(), "@ROUTER@": _router(), "@COUNTS@": _counts(), "@PEERS@": _peers() + _formats()}
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def _options() -> str:
    lines, last = [], ""
    for title, option in server_options():
        if title != last:
            lines.append(f"| **{title}** | | |")
            last = title
        default = "" if option.default in (None, "", ()) else str(option.default)
        if option.type is bool:
            default = "on" if option.default else "off"
        names = ", ".join(f"`{name}`" for name in flag_names(option))
        lines.append(f"| {names} | {default} | {_cell(option.metadata['help'])} |")
    return "\n".join(lines) + "\n"


def _router() -> str:
    """Rows of the flags of `quire route`, from the table that the command reads."""
    lines = []
    for flag, *cells in read_rows(ROUTER_FLAGS):
        if not cells:
            lines.append(f"| **{flag.capitalize()}** | | |")
            continue
        default = "" if cells[1] in ("-", "[]") else str(json.loads(cells[1]))
        lines.append(f"| `{flag}` | {default} | {_cell(cells[2].replace(' (default: %(default)s)', ''))} |")
    return "\n".join(lines) + "\n"


def _counts() -> str:
    counts = Counter(flag.meaning for flag in PEER_FLAGS)
    return f"{len(PEER_FLAGS)} flags: {', '.join(f'{counts[meaning]} {meaning}' for meaning in MEANINGS)}.\n"


def _peers() -> str:
    return "".join(
        f"| {', '.join(f'`{name}`' for name in flag.names)} | {flag.meaning} | {_cell(_why(flag))} |\n"
        for flag in PEER_FLAGS
    )


def _formats() -> str:
    """Rows of the values of two flags that work otherwise."""
    return "".join(
        f"| `--load-format {name}`, `--quantization {name}` | refused | {why}: {FORMATS_LACK} |\n"
        for name, why in REFUSED_FORMATS.items()
    )


def _why(flag: PeerFlag) -> str:
    if flag.meaning == "refused" and flag.takes != "switch" and flag.neutral:
        noted = f"; with a note: {', '.join(flag.idle)}" if flag.idle else ""
        return f"{flag.why} (accepted: {', '.join(flag.neutral)}{noted})"
    if flag.meaning == "refused" and flag.takes == "switch":
        return f"{flag.why} (accepted: {flag.name if 'on' in flag.neutral else f'--no-{flag.name[2:]}'})"
    return flag.why


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(flags_page(), end="")
