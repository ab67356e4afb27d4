"""The watching of `quire top`: a stream of the live view, and pictures of it.

On a terminal the picture stays in place; elsewhere pictures are printed one after the other, as plain text.
"""

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from quire.contracts.errors import ConfigError, EngineDead, QuireError
from quire.entry.cli.remote import RemoteServer
from quire.entry.cli.top_view import TopView

PATH = "/debug/live"
REFRESH = 0.25  # seconds between two pictures on a terminal
PRINT = 1.0  # and elsewhere
RETRY = 2.0  # after a connection was lost
FRAMES = 3  # before the picture of --once: rates need some time
ONCE_SECONDS = 10.0  # for the picture of --once; then it shows what has come
WIDTH, LINES = 100, 1000  # of a picture where there is no terminal


def watch(server: RemoteServer, *, once: bool, color: bool) -> None:
    """Show what a server does until Ctrl-C. Raises `QuireError` when it cannot be watched.

    once   print one picture, and end
    """
    console = Console(no_color=None if color else True, highlight=False)
    view = TopView(server.where, ascii_only="utf" not in (console.encoding or "").lower())
    if once:
        return _once(server, view, console)
    events = _again(server, view, _begun(server, view))
    if not console.is_terminal:
        for _ in _paced(events, PRINT):
            _show(view, console)
        return None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for _ in _paced(events, REFRESH):
            live.update(view.render(console.width, console.height), refresh=True)
    return None


def _once(server: RemoteServer, view: TopView, console: Console) -> None:
    """Print one picture, when every source has sent some frames or a reason why it sends none.
    Raises `EngineDead` when no source has sent a frame."""
    deadline = time.monotonic() + ONCE_SECONDS
    try:
        for event, data in server.events(PATH, ONCE_SECONDS):
            view.take(event, data)
            if _complete(view) or time.monotonic() >= deadline:
                break
    except EngineDead as error:
        if not view.sources:
            raise
        view.notice = str(error)
    if any(source.engines for source in view.sources.values()):
        return _show(view, console)
    if any(view.sources):
        _show(view, console)
        raise EngineDead(f"no backend of {server.where} can be watched.")
    raise EngineDead(f"the live view of {server.where} ended: {_reason(view) or view.notice}")


def _complete(view: TopView) -> bool:
    """True if every source has sent some frames, or a reason why it sends none."""
    sources = view.sources.values()
    return bool(sources) and all(source.down or source.frame.get("frame", 0) >= FRAMES for source in sources)


def _show(view: TopView, console: Console) -> None:
    """Print a picture."""
    width = console.width if console.is_terminal else WIDTH
    console.print(view.render(width, LINES), crop=False, soft_wrap=True)


def _begun(server: RemoteServer, view: TopView) -> Iterator[None]:
    """Return the rest of a stream whose first event was taken."""
    stream = server.events(PATH)
    try:
        view.take(*next(stream))
    except StopIteration:
        raise EngineDead(f"{server.where} sent no event: is it a server or a router of Quire?") from None
    return _taken(stream, view)


def _taken(events: Iterator[tuple[str, dict[str, Any]]], view: TopView) -> Iterator[None]:
    """Give events to the view, and yield after each."""
    for event, data in events:
        view.take(event, data)
        yield None


def _again(server: RemoteServer, view: TopView, stream: Iterator[None]) -> Iterator[None]:
    """Yield after every event, and after every try to connect again."""
    while True:
        try:
            yield None
            for _ in stream:
                view.notice = ""
                yield None
            view.notice = f"the stream ended{f': {reason}' if (reason := _reason(view)) else '.'} Trying again."
        except ConfigError:
            raise  # such as a key that is not valid any more
        except QuireError as error:
            view.notice = f"{error} Trying again."
        yield None
        time.sleep(RETRY)
        stream = _taken(server.events(PATH), view)


def _paced(events: Iterator[None], interval: float) -> Iterator[None]:
    """Yield after events, at most once in `interval` seconds."""
    due = 0.0
    for _ in events:
        if (now := time.monotonic()) >= due:
            due = now + interval
            yield None


def _reason(view: TopView) -> str:
    return next((source.down for source in view.sources.values() if source.down), "")
