"""docs/flags.md: every flag of ours, and what each flag of vLLM means here. Printed by `quire serve --print-flags`."""

from collections import Counter

from quire.config.flags import flag_names, server_options
from quire.config.peer_flags import PEER_FLAGS, Meaning, PeerFlag, Takes

INTRO = """\
# Flags

Printed by `quire serve --print-flags`; a test compares. Every option is a flag, an environment variable and a key of
the file that `--config` names. The command line wins over the environment, the environment over the file, the file over
the default:

    quire serve MODEL --max-model-len 32k      QUIRE_MAX_MODEL_LEN=32k      max-model-len: 32k

Underscores and dashes are the same. Sizes take k, M, G (1000s in small letters, 1024s in capitals). Switches have a
`--no-` form. Lists take several values after one flag, the flag several times, or in the environment commas.
`quire serve --print-config` shows every value and where it came from.

## Options of Quire

| flag | default | what it does |
|---|---|---|
"""
PEER_INTRO = """
## Flags of vLLM

A launch line of vLLM starts Quire, too: `vllm serve` becomes `quire serve`, and
`python -m vllm.entrypoints.openai.api_server --model MODEL` becomes `python -m quire serve --model MODEL`. What a flag
of vLLM does here:

- **works**: the same flag, with the same meaning
- **alias**: sets the option of Quire that is named
- **no-op**: accepted with a note, because it changes nothing here
- **refused**: an error before anything is loaded, unless its value asks for nothing

"""


def flags_page() -> str:
    """The whole page, as Markdown."""
    return INTRO + _options() + PEER_INTRO + _counts() + "\n| flag | here | why |\n|---|---|---|\n" + _peers()


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
    return f"{len(PEER_FLAGS)} flags: {', '.join(f'{counts[meaning]} {meaning.value}' for meaning in Meaning)}.\n"


def _peers() -> str:
    return "".join(f"| {', '.join(f'`{name}`' for name in flag.names)} | {flag.meaning.value} | {_cell(_why(flag))} |\n"
                   for flag in PEER_FLAGS)


def _why(flag: PeerFlag) -> str:
    if flag.meaning is Meaning.REFUSED and flag.takes is not Takes.SWITCH and flag.neutral:
        return f"{flag.why} (accepted: {', '.join(flag.neutral)})"
    if flag.meaning is Meaning.REFUSED and flag.takes is Takes.SWITCH:
        return f"{flag.why} (accepted: {flag.name if 'on' in flag.neutral else f'--no-{flag.name[2:]}'})"
    return flag.why


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
