"""Every error a user can meet.

QuireError
├── UserError (ValueError)           the caller can fix it; the message says how
│   ├── ConfigError                  a flag, an environment variable or an engine argument
│   ├── ModelError                   a model that is not found, not supported or damaged
│   │   ├── ModelNotFound
│   │   ├── UnsupportedModel
│   │   └── WeightsError
│   └── RequestError                 one request; only that request fails
│       ├── InvalidParameter
│       ├── PromptTooLong
│       ├── QueueFull
│       ├── QueueTimeout             it waited longer for a place in the batch than the server lets it
│       └── RequestFailed            it was accepted and went wrong alone (NaN logits, deadline)
└── EngineError (RuntimeError)       a fault of the device or of a process
    ├── EngineStarting               it is still being loaded
    ├── EngineClosed                 used after close(), or while the last requests run out
    └── EngineDead                   the engine stopped; every waiting request gets this
"""

import itertools
from collections import abc

MAX_SHOWN = 100  # characters of a value in a message
MAX_LISTED = 5  # values in a message


def shown(value: object) -> str:
    """A value of a request as an error message shows it. Only the beginning of a long one is shown: a message goes into
    logs and on screens."""
    text = repr(value[:MAX_SHOWN]) if isinstance(value, str) else repr(value)[:MAX_SHOWN]
    return text + "..." * (len(value if isinstance(value, str) else repr(value)) > MAX_SHOWN)


def listed(values: abc.Collection[object]) -> str:
    """Values of a request as an error message lists them: the first ones, and how many more there are."""
    more = len(values) - MAX_LISTED
    return ", ".join(map(shown, itertools.islice(values, MAX_LISTED))) + (f" and {more} more" if more > 0 else "")


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class UserError(QuireError, ValueError):
    """Something the caller can fix; the message names the fix."""


class ConfigError(UserError):
    """A flag, environment variable or engine argument that cannot be met."""


class ModelError(UserError):
    """A model that cannot be served."""


class ModelNotFound(ModelError):
    """The path or hub id does not lead to a model."""


class UnsupportedModel(ModelError):
    """The architecture, or something its config asks for, is not implemented."""


class WeightsError(ModelError):
    """A weight file or tensor is missing, damaged or has the wrong shape."""


class RequestError(UserError):
    """One request cannot be served; no other is touched."""


class InvalidParameter(RequestError):
    """A request parameter is out of its range or unknown; `param` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt, or prompt and max_tokens together, exceed the context length."""


class QueueFull(RequestError):
    """The waiting queue is at its bound; try again later."""


class QueueTimeout(RequestError):
    """The request did not begin to run within the time that a request may wait."""


class RequestFailed(RequestError):
    """An accepted request failed by itself; `code` is a short reason such as "nan_logits"."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineError(QuireError, RuntimeError):
    """A fault of the device or of a process."""


class EngineStarting(EngineError):
    """The engine is still being loaded; try again later."""


class EngineClosed(EngineError):
    """The engine was used after it was closed, or takes no more requests because it is about to be."""


class EngineDead(EngineError):
    """The engine stopped because of a fault; the message holds the cause."""
