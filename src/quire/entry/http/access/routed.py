"""Limits of named API keys in front of a router: the key file of a server, read by `quire route`.

A router reads no tokenizer. It takes the counts of tokens that an answer tells (`usage`), and until then counts events
of a stream as tokens. Of a key's rules it keeps the requests and tokens per minute, the requests at once and the
models; the others are the engines' (`LEFT`).
"""

import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import msgspec

from quire.contracts.caller import CallerRefused
from quire.contracts.errors import shown
from quire.entry.http.access.key_file import FREE, TIMEOUTS
from quire.entry.http.access.keyring import Caller, Keyring, caller_of
from quire.entry.http.access.limits import KeyLimits, Ticket
from quire.entry.http.errors import HttpError

LEFT = ("weight", "priority", *TIMEOUTS)  # rules of a key that only an engine can keep
TOLD = re.compile(rb'"(prompt|input|completion|output)_tokens":\s*(\d+)')  # in a text the quotes are escaped
KEPT = 64  # bytes of a piece that are looked at again with the next one: a number may be cut
EVENT = b"data: {"
Sending = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Spent:
    """The tokens of a request: `prompt`, `output`. An answer passes through `sending`, or `direct`."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.output = prompt, 0
        self._rest = b""

    def take(self, piece: bytes) -> None:
        """Count a piece of the answer."""
        self.output += piece.count(EVENT)
        if b"_tokens" in (text := self._rest + piece):
            for name, number in TOLD.findall(text):
                if name in (b"prompt", b"input"):
                    self.prompt = max(self.prompt, int(number))
                else:
                    self.output = max(self.output, int(number))
        self._rest = piece[-KEPT:]

    def sending(self, send: Sending) -> Sending:
        """Return `send` with a count of what passes."""

        async def counting(message: MutableMapping[str, Any]) -> None:
            self.take(message.get("body", b""))
            await send(message)

        return counting

    def direct(self, direct: Any) -> Any:
        """Return a direct body with a count of what passes; None stays None."""
        return None if direct is None else _Direct(direct, self)


class _Direct:
    def __init__(self, direct: Any, spent: Spent) -> None:
        self._direct, self._spent = direct, spent

    @property
    def ready(self) -> bool:
        """True when a piece may be written."""
        return bool(self._direct.ready)

    def write(self, piece: bytes) -> None:
        """Write a piece."""
        self._spent.take(piece)
        self._direct.write(piece)


class RoutedTicket(Ticket):
    """A request that a router passes on. `spent`: the tokens of it that are known."""

    def __init__(self, caller: Caller, tokens: int) -> None:
        super().__init__(caller)
        self.spent = Spent(tokens)

    def new_tokens(self) -> tuple[int, int]:
        """Return the prompt and output tokens since the last call."""
        new = self.spent.prompt - self._prompt, self.spent.output - self._output
        self._prompt, self._output = self.spent.prompt, self.spent.output
        return new


class RouterGate:
    """The limits of keys, for a `RouterApp`."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits

    @contextmanager
    def hold(self, scope: MutableMapping[str, Any], model: str, tokens: int) -> Iterator[Spent | None]:
        """Context manager: a request that runs. Raises `CallerRefused` at a limit of its key."""
        caller = caller_of(scope)
        if not caller.name or scope["method"] != "POST":
            yield None
            return
        if not caller.rules.may_use(model):
            words = f"the key {caller.name!r} may not use the model {shown(model)}: name one that it may."
            self._limits.refuse(caller, "model")
            raise CallerRefused(403, words, "model_not_allowed")
        try:
            with self._limits.hold(RoutedTicket(caller, tokens)) as ticket:
                yield ticket.spent
        except HttpError as error:
            wait = float(dict(error.headers).get("retry-after", 1))
            raise CallerRefused(error.status, error.message, str(error.code), wait) from None


def left_to_engines(keyring: Keyring) -> str:
    """Return a sentence that names the rules in the file that a router does not keep; "" if there are none."""
    free = msgspec.structs.asdict(FREE)
    names = [name for name in LEFT if any(getattr(rules, name) != free[name] for rules in keyring.rules())]
    if not names:
        return ""
    return f"the file of keys has {', '.join(names)}: the servers keep these, if they have the same file."
