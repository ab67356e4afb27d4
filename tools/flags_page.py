"""docs/flags.md: every flag of ours, and what each flag of vLLM means here; never imports torch.

PYTHONPATH=src python tools/flags_page.py > docs/flags.md
"""

from collections import Counter
from pathlib import Path

from quire.config.flags import flag_names, server_options
from quire.config.option_parsers import FORMATS_LACK, REFUSED_FORMATS
from quire.config.peer_flags import MEANINGS, PEER_FLAGS, PeerFlag


def flags_page() -> str:
    """The whole page, as Markdown."""
    page = Path(__file__).with_suffix(".md").read_text()
    return (
        page.replace("@OPTIONS@", _options()).replace("@COUNTS@", _counts()).replace("@PEERS@", _peers() + _formats())
    )


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
