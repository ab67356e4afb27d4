"""A small writer of SVG: boxes with words, arrows, bars. Colours follow the reader's light or dark scheme."""

from html import escape

CHARACTER, LINE = 6.6, 16  # width and height of a character of 12 pixels, generously
MARGIN = 16
STYLE = """
svg { background: #fff; color: #1c2128; font: 12px ui-monospace, monospace; }
text { fill: currentColor; } .title { font-weight: 600; font-size: 14px; } .small { font-size: 10px; opacity: .75; }
rect { stroke: #57606a; stroke-width: 1; } path { stroke: #57606a; fill: none; } .head { fill: #57606a; stroke: none; }
.plain { fill: #f6f8fa; } .mixer { fill: #ddf4ff; } .experts { fill: #fff1e5; } .dense { fill: #dafbe1; }
.cache { fill: #fbefff; } .send { fill: #ffebe9; } .frame { fill: none; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; color: #e6edf3; } .plain { fill: #161b22; } .mixer { fill: #0c2d6b; }
.experts { fill: #5a1e02; } .dense { fill: #033a16; } .cache { fill: #3c1e70; } .send { fill: #67060c; } }
"""
ARROW = """<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>"""


class Svg:
    """A drawing that grows with what is put on it. Positions and sizes are in pixels."""

    def __init__(self, title: str) -> None:
        self._parts, self.width, self.height = list[str](), 0.0, 0.0
        self._title = title
        self.text(MARGIN, MARGIN + LINE, title, "title")

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain", hint: str = "") -> None:
        """Draw a rectangle. kind: a class of STYLE; hint: shown while the pointer is on it"""
        inside = f"<title>{escape(hint)}</title>" if hint else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect class="{kind}" {place} rx="3">{inside}</rect>')
        self._grow(x + width, y + height)

    def words(self, x: float, y: float, lines: list[str], kind: str = "plain", width: float = 0) -> tuple[float, float]:
        """Draw a box with lines of words, the others smaller than the first. Return its width and height."""
        width = max(width, 16 + CHARACTER * max(map(len, lines)))
        height = 10 + LINE * len(lines)
        self.box(x, y, width, height, kind)
        for number, line in enumerate(lines):
            self.text(x + 8, y + LINE * (number + 1) + 1, line, "small" if number else "")
        return width, height

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write words with their base line at y."""
        shown = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{shown}>{escape(words)}</text>')
        self._grow(x + CHARACTER * len(words) * (1.2 if kind == "title" else 1), y)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow, straight or with one bend."""
        bend = "" if to_x == x or to_y == y else f" L {x:.1f} {to_y:.1f}"
        self._parts.append(f'<path d="M {x:.1f} {y:.1f}{bend} L {to_x:.1f} {to_y:.1f}" marker-end="url(#head)"/>')
        self._grow(max(x, to_x), max(y, to_y))

    def _grow(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x + MARGIN), max(self.height, y + MARGIN)

    def __str__(self) -> str:
        sizes = f'width="{self.width:.0f}" height="{self.height:.0f}"'
        begin = f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} role="img" aria-label="{escape(self._title)}">'
        return "\n".join((begin, f"<style>{STYLE}</style>", ARROW, *self._parts, "</svg>\n"))
