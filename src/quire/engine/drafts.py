"""Drafts per request in the next step (k), chosen by load or by measured gain, and the count of accepted ones."""

from bisect import bisect_right
from collections.abc import Callable
from time import perf_counter

import numpy as np

from quire.contracts.step import I32

NEWEST = 0.2  # weight of a step in the averages: of a full average 3% are left after 16 steps
DRY = 12  # steps in a row without a right draft, after which none is expected
GAIN = 1.02  # tokens per second that drafts must gain over none
PROBE = 32  # steps without drafts, after which a step tries the shortest number
RENEW = 128  # steps with drafts, after which a step without any renews their measure
STRANGE = 4.0  # times a known step, above which a step was interrupted: its time counts only if the next is as long


class DraftLength:
    """Chooses how many drafts each decode of a step verifies at most.

    most       maximum number of drafts (k); 0: no speculation
    by_batch   (decoding requests, k), ascending: from so many requests on, at most k drafts; () : always `most`
    auto       numbers of drafts to choose from by the measured gain, ascending; (): not measured
    cached     True: the drafter has KV in the blocks, of the tokens before a step's first new token
    totals     as `StepStats.drafts`
    """

    def __init__(
        self,
        most: int = 0,
        by_batch: tuple[tuple[int, int], ...] = (),
        auto: tuple[int, ...] = (),
        *,
        cached: bool = False,
    ) -> None:
        self.most, self.cached = most, cached
        self._sizes, self._lengths = [size for size, _ in by_batch], [k for _, k in by_batch]
        self._auto = auto
        self.forget()

    def forget(self) -> None:
        """Forget all that was counted and learned."""
        self._gain = MeasuredGain(self._auto) if self._auto else None
        self.totals: tuple[int, ...] = (0,) * (2 + self.most) if self.most else ()

    def count(self, drafted: I32, accepted: I32) -> I32:
        """Count the drafts of a step. Return them [N, 1 + most]: made, accepted as first of a run, as second, ...

        drafted, accepted   [N] drafts that were made for each decode, and valid tokens of its run
        """
        found = np.empty((len(drafted), 1 + self.most), np.int32)
        found[:, 0] = drafted
        found[:, 1:] = np.arange(1, 1 + self.most) < accepted[:, None]
        new = (int(np.count_nonzero(drafted)), *found.sum(0).tolist())
        self.totals = tuple(a + b for a, b in zip(self.totals, new, strict=True))
        return found

    def observe(self, planned: I32, accepted: I32, *, alone: bool) -> None:
        """Learn from a step that is confirmed: its gain and its time.

        planned, accepted   [N] rows of each decode, and valid tokens of its run
        alone               True: the step had no prompts
        """
        if self._gain is not None:
            self._gain.observe(planned, accepted, alone=alone)

    def limit(self, num_decodes: int) -> int:
        """Return the maximum number of drafts that `choose` may return for so many decodes."""
        place = bisect_right(self._sizes, num_decodes) - 1
        return self._lengths[place] if place >= 0 else self.most

    def choose(self, num_decodes: int) -> int:
        """Return the maximum number of drafts of each decode, in a step with `num_decodes` decodes."""
        most = self.limit(num_decodes)
        return most if self._gain is None else self._gain.choose(num_decodes, most)


class MeasuredGain:
    """Chooses the number of drafts with the most tokens per second, by measured acceptance and step times.

    A run has 1 + p (1 + a + a^2 + ...) tokens: p is the share of runs whose first draft is right, a the share of right
    drafts among those behind a right one. Both are averages of the last steps, and so is the time of a step by its
    number of drafts and (to a power of two) of decodes. Drafts that do not gain `GAIN` stop; each `PROBE` steps one
    step tries the shortest number again. The time of a step is that since the step before was confirmed. It counts if
    neither had prompts: after a pause, the first step has one.

    lengths   numbers of drafts to choose from, ascending
    clock     seconds
    """

    def __init__(self, lengths: tuple[int, ...], clock: Callable[[], float] = perf_counter) -> None:
        self._lengths, self._clock = lengths, clock
        self._first, self._further = 0.5, 0.7  # before anything is known
        self._seconds: dict[tuple[int, int], float] = {}
        self._strange: set[tuple[int, int]] = set()  # kinds of steps whose last time was far above the known one
        self._last: float | None = None  # when the last step was confirmed, if it had no prompts
        self._idle = self._busy = 0  # steps without and with drafts, since there were others
        self._dry = 0  # steps with drafts since one was right

    def observe(self, planned: I32, accepted: I32, *, alone: bool) -> None:
        """Learn from a confirmed step; see `DraftLength.observe`."""
        now, before = self._clock(), self._last
        self._last = now if alone else None
        if before is not None and alone and len(planned):
            self._time((int(planned.max()) - 1, len(planned).bit_length()), now - before)
        runs = accepted[planned > 1] - 1  # right drafts
        if not len(runs):
            return
        share = float((runs > 0).mean())
        self._dry = 0 if share else self._dry + 1
        self._first = 0.0 if self._dry >= DRY else self._first + NEWEST * (share - self._first)
        tried = int(np.minimum(runs, planned[planned > 1] - 2).sum())  # right drafts with another draft behind them
        if tried:
            right = int(np.maximum(runs - 1, 0).sum())
            self._further += NEWEST * (right / tried - self._further)

    def choose(self, num_decodes: int, most: int) -> int:
        """Return the number of drafts of each decode in the next step, at most `most`."""
        size = num_decodes.bit_length()
        lengths = [k for k in self._lengths if 0 < k <= most]
        plain = self._seconds.get((0, size))
        if not lengths or not num_decodes or plain is None:  # a step without drafts tells what to compare with
            return 0
        best = max(lengths, key=lambda k: self._rate(k, size, plain))
        if self._rate(best, size, plain) > GAIN / plain:
            self._idle, self._busy = 0, self._busy + 1
            return 0 if self._busy % RENEW == 0 else best
        self._idle += 1
        return lengths[0] if self._idle % PROBE == 0 else 0

    def _rate(self, k: int, size: int, plain: float) -> float:
        """Return the tokens per second of a decode with k drafts; a time that is not known is that of a plain step."""
        tokens = 1 + self._first * sum(self._further**i for i in range(k))
        return tokens / self._seconds.get((k, size), plain)

    def _time(self, kind: tuple[int, int], seconds: float) -> None:
        known = self._seconds.get(kind)
        if known is not None and seconds < STRANGE * known:
            self._seconds[kind] = known + NEWEST * (seconds - known)
            self._strange.discard(kind)
        elif known is None or kind in self._strange:  # the second long time in a row: the known one was too short
            self._seconds[kind] = seconds
            self._strange.discard(kind)
        else:
            self._strange.add(kind)
