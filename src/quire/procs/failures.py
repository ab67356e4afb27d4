"""Errors across the process boundary: by the name of their class, so that the other side raises the same one.

Only classes of `contracts/errors.py` travel under their own name; anything else is a fault of the engine.
"""

import traceback

from quire.contracts.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    EngineStarting,
    InvalidParameter,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    QuireError,
    RequestError,
    RequestFailed,
    UnsupportedModel,
    UserError,
    WeightsError,
)
from quire.procs.messages import Failed, Rejected

INTERNAL = "internal"  # code of a request that met a fault of ours
PLAIN: dict[str, type[QuireError]] = {
    kind.__name__: kind
    for kind in (ConfigError, EngineClosed, EngineDead, EngineStarting, ModelError, ModelNotFound, PromptTooLong,
                 QueueFull, QueueTimeout, RequestError, UnsupportedModel, UserError, WeightsError)
}


def failed(error: BaseException) -> Failed:
    """The message that says why the core cannot start or go on, with the traceback for logs."""
    details = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    if isinstance(error, QuireError):
        return Failed(type(error).__name__, str(error), details)
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failed(EngineDead.__name__, f"the engine stopped: {words}", details)


def rejected(handles: tuple[int, ...], error: Exception) -> Rejected:
    """The message that refuses the requests of one prompt."""
    if isinstance(error, QuireError):
        param = error.param if isinstance(error, InvalidParameter) else None
        return Rejected(handles, type(error).__name__, str(error), param)
    return Rejected(handles, RequestFailed.__name__, f"the engine could not take the request: {type(error).__name__}.")


def rebuilt(kind: str, message: str, param: str | None = None) -> QuireError:
    """The error that a `Failed` or a `Rejected` describes."""
    if kind == InvalidParameter.__name__:
        return InvalidParameter(message, param=param)
    if kind == RequestFailed.__name__:
        return RequestFailed(message, code=INTERNAL)
    return PLAIN.get(kind, EngineDead)(message)
