"""Stop strings in a text that arrives in pieces.

Knows strings only. The stop that is complete first in the text counts; of several that end at the same character, the
longest. So the result does not depend on how the text is cut. The end of the text is held back only as far as it may
still become a stop.
"""

from collections.abc import Sequence


class StopMatcher:
    """Search for stop strings in streamed text. The search ends at the first stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Prepare the search for `stops`, non-empty strings. `include_stop` keeps the found one in the text."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0]) if self._stops else 0
        self._include = include_stop
        self._held = ""

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Add text. Return (text that is safe to show, the found stop or None). Do not push after a stop.
        With `active=False` (fewer than min_tokens) no stop may end in this text, but one may begin in it."""
        if not self._stops:
            return text, None
        whole = self._held + text
        if active and text and (found := self._first(whole)) is not None:
            end, stop = found
            self._held = ""
            return whole[: end if self._include else end - len(stop)], stop
        safe = self._safe_length(whole)
        self._held = whole[safe:]
        return whole[:safe], None

    def flush(self) -> str:
        """Return the text that is held back, when the sequence ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _first(self, whole: str) -> tuple[int, str] | None:
        """Return (end, stop) of the match that ends first. Only matches that end in the new text count."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            limit = len(whole) if best is None else best[0] - 1
            at = whole.find(stop, max(0, len(self._held) - len(stop) + 1), limit)
            if at >= 0:
                best = (at + len(stop), stop)
        return best

    def _safe_length(self, whole: str) -> int:
        """Return the length of `whole` without its longest end that may begin a stop."""
        safe = len(whole)
        for stop in self._stops:
            at = whole.find(stop[0], max(0, len(whole) - len(stop) + 1))
            while 0 <= at < safe:
                if stop.startswith(whole[at:]):
                    safe = at
                    break
                at = whole.find(stop[0], at + 1)
        return safe
