"""Counts of the parts of a server that died and were started again."""

import time

from quire.observe.series import Tally

# Words in a sentence about an end -> the label of its reason; without one of them "failed".
END_MARKS = (("killed by", "killed"), ("exited with", "exited"), ("was stopped", "stopped"), ("is stopped", "stopped"))


class RestartTally(Tally):
    """Counts by part ("core", "rank", "http") and reason."""

    _lost: float | None = None  # monotonic time of the death of an engine

    def lost(self, reason: str) -> None:
        """Count an engine that died. reason: sentence of the error, which begins with a rank if one was the cause"""
        self._lost = time.monotonic()
        self.ended("rank" if reason.startswith("rank ") else "core", reason)

    def ended(self, part: str, reason: str) -> None:
        """Count a part that ended. reason: sentence"""
        self.add(part, next((label for mark, label in END_MARKS if mark in reason), "failed"))

    def served(self) -> float | None:
        """Note that the engine serves. Return the seconds since its death; None: it has not died."""
        lost, self._lost = self._lost, None
        return None if lost is None else time.monotonic() - lost
