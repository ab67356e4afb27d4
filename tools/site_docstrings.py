"""An extension of griffe, which reads docstrings for the site: the house's lists of names become lists of Markdown.

In the sources a parameter or field stands in a line of its own, with its meaning behind two spaces or more. A further
line of the meaning is indented.
"""

import re

import griffe

ENTRY = re.compile(r"([\w.*]+(?:, [\w.*]+)*) {2,}(\S.*)")


class HouseLists(griffe.Extension):
    """Rewrites the docstring of each object that griffe reads."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of an object; griffe calls this for each one."""
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(docstring: str) -> str:
    """Return a docstring with its lists of names as Markdown. Lines that are indented by four are code, and stay."""
    lines: list[str] = []
    inside = False  # a list
    for line in docstring.splitlines():
        if found := ENTRY.fullmatch(line):
            lines += [] if inside else [""]
            lines.append(f"- `{found.group(1)}`: {found.group(2)}")
            inside = True
        elif inside and line.startswith(" "):
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", line] if inside else [line]
            inside = False
    return "\n".join(lines)
