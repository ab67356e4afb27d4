"""Counts of the files that a server reads again."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

from quire.observe.series import Tally

DONE, REFUSED = "done", "refused"


def counted(reload: Mapping[str, Callable[[], str]], reloads: Tally) -> Iterator[Callable[[], str]]:
    """Yield functions that call those of `reload`, in any thread, and count each by its name and result."""
    loop = asyncio.get_running_loop()
    for what, read in reload.items():

        def run(what: str = what, read: Callable[[], str] = read) -> str:
            result = REFUSED
            try:
                words, result = read(), DONE
                return words
            finally:
                loop.call_soon_threadsafe(reloads.add, what, result)

        yield run
