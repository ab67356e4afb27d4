"""All errors that Quire raises on purpose.

QuireError
├── UserError (ValueError)           the caller can fix it; the message says how
│   ├── ConfigError                  a flag, an environment variable or an engine argument
│   │   └── AddressTaken             another process has the server's port
│   ├── ModelError                   a model that is not found, not supported or damaged
│   │   ├── ModelNotFound
│   │   ├── UnsupportedModel
│   │   ├── WeightsError
│   │   └── AdapterError             an adapter (LoRA) that is damaged, or does not fit the model or the engine
│   └── RequestError                 one request; only that request fails
│       ├── InvalidParameter
│       ├── PromptTooLong
│       ├── QueueFull
│       ├── QueueTimeout             the request waited for a slot longer than the server allows
│       └── RequestFailed            the request was accepted and then failed alone (NaN logits, deadline)
└── EngineError (RuntimeError)       a fault of the device or of a process
    ├── EngineStarting               the engine is still loading
    ├── EngineAsleep                 the engine sleeps, or its weights are not whole
    ├── EngineClosed                 the engine was closed, or finishes its last requests and takes no more
    └── EngineDead                   the engine stopped; every waiting request gets this
"""

import itertools
from collections import abc

MAX_SHOWN = 100  # characters of a value in a message
MAX_LISTED = 5  # values in a message


def shown(value: object) -> str:
    """Return a value of a request as error messages show it.

    A long value is cut after MAX_SHOWN characters, because messages go into logs and on screens.
    """
    text = repr(value[:MAX_SHOWN]) if isinstance(value, str) else repr(value)[:MAX_SHOWN]
    return text + "..." * (len(value if isinstance(value, str) else repr(value)) > MAX_SHOWN)


def listed(values: abc.Collection[object]) -> str:
    """Return values of a request as error messages list them: the first MAX_LISTED, then the number of the others."""
    more = len(values) - MAX_LISTED
    return ", ".join(map(shown, itertools.islice(values, MAX_LISTED))) + (f" and {more} more" if more > 0 else "")


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class UserError(QuireError, ValueError):
    """An error that the caller can fix; the message names the fix."""


class ConfigError(UserError):
    """A flag, environment variable or engine argument is invalid or not supported."""


class AddressTaken(ConfigError):
    """Another process has the server's port."""


class ModelError(UserError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """The path or hub id does not lead to a model."""


class UnsupportedModel(ModelError):
    """The architecture, or a setting of the model's configuration, is not implemented."""


class WeightsError(ModelError):
    """A weight file or tensor is missing, damaged or has the wrong shape."""


class AdapterError(ModelError):
    """An adapter (LoRA) is damaged, or does not fit the model or the engine."""


class RequestError(UserError):
    """A request cannot be served; other requests go on."""


class InvalidParameter(RequestError):
    """A request parameter is out of its range or unknown; `param` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt, or prompt and max_tokens together, exceed the context length."""


class QueueFull(RequestError):
    """The waiting queue is full; try again later."""


class QueueTimeout(RequestError):
    """The request waited for a slot longer than the server allows."""


class RequestFailed(RequestError):
    """An accepted request failed, and other requests go on; `code` is a short reason such as "nan_logits"."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineError(QuireError, RuntimeError):
    """A fault of the device or of a process."""


class EngineStarting(EngineError):
    """The engine is still loading; try again later."""


class EngineAsleep(EngineError):
    """The engine sleeps, or an update of its weights has failed in the middle; the message says what helps."""


class EngineClosed(EngineError):
    """The engine was closed, or it is closing and takes no more requests."""


class EngineDead(EngineError):
    """The engine stopped because of a fault; the message holds the cause."""
