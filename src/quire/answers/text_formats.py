"""Formats and patterns of JSON schema as regular expressions (Rust's syntax) that match a whole text.

llguidance knows the same formats in JSON. The expressions here are for strings without quotes. Those of ipv6, email
and uri match only a part of the valid texts. Dates are those that exist, from year 0001 on, and seconds end at 59, as
in most programming languages. llguidance's dates and times go beyond.
"""

import re

_DAY = "(0[1-9]|[12][0-9]"
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # two digits, not 00, divisible by 4
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-{_DAY}|3[01])|(0[469]|11)-{_DAY}|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_WORD = "[a-zA-Z0-9_+-]+"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_REST = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})*"
FORMATS = {
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_WORD}(\.{_WORD})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|({_HEX}{{1,4}}:){{1,6}}:{_HEX}{{1,4}}|::({_HEX}{{1,4}})?",
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    **{
        f"uuid{version}": f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
        for version in range(1, 9)
    },
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*:(//{_HOST}(:[0-9]{{1,5}})?(/{_REST})?|[a-zA-Z0-9._~-]{_REST})"
    rf"(\?{_REST})?(\#{_REST})?",
}
ANY = "(?s:.*)"
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
FLAGS = re.compile(r"(?:\(\?[a-z]+\))?")
BEGINS, ENDS = ("^", r"\A"), ("$", r"\z")


def whole(pattern: str) -> str | None:
    """Return a regex that matches any whole text in which `pattern` is found; None if ^, $ or \\b is in its middle."""
    flags = FLAGS.match(pattern)
    begun = flags.end() if flags else 0
    ways: list[list[str]] = [[]]
    depth = 0
    for token in TOKEN.findall(pattern[begun:]):
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            ways.append([])
        else:
            ways[-1].append(token)
    found = []
    for tokens in ways:
        begins, ends = tokens[:1] and tokens[0] in BEGINS, tokens[-1:] and tokens[-1] in ENDS
        inner = tokens[bool(begins) : len(tokens) - bool(ends)]
        if any(token in (*BEGINS, *ENDS, r"\b", r"\B") for token in inner):
            return None
        found.append(f"{'' if begins else ANY}{''.join(inner)}{'' if ends else ANY}")
    return f"{pattern[:begun]}(?:{'|'.join(found)})"
