"""Errors across the process boundary. They carry the name of their class, so the other side raises the same class.

Only classes of `contracts/errors.py` keep their name; any other error is a fault of the engine.
"""

import traceback

from quire.contracts import errors
from quire.procs.messages import Failed, Rejected

INTERNAL = "internal"  # code of a request that failed because of a fault in the engine
KINDS: dict[str, type[errors.QuireError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.QuireError)
}


def failed(error: BaseException, begin: str = "the engine stopped: ") -> Failed:
    """Return the `Failed` message for an error that keeps a process from starting or going on.

    It has the traceback for logs, unless the user can fix the error.
    begin   first words of its text for an error that is no `QuireError`
    """
    details = "" if isinstance(error, errors.UserError) else "".join(traceback.format_exception(error))
    if isinstance(error, errors.QuireError):
        return Failed(type(error).__name__, str(error), details)
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failed(errors.EngineDead.__name__, f"{begin}{words}", details)


def rejected(handles: tuple[int, ...], error: Exception) -> Rejected:
    """Return the `Rejected` message that refuses the requests `handles` of one prompt because of `error`."""
    if isinstance(error, errors.QuireError):
        param = error.param if isinstance(error, errors.InvalidParameter) else None
        return Rejected(handles, type(error).__name__, str(error), param)
    words = f"the engine could not take the request: {type(error).__name__}."
    return Rejected(handles, errors.RequestFailed.__name__, words)


def rebuilt(kind: str, message: str, param: str | None = None) -> errors.QuireError:
    """Return the exception that a `Failed` or `Rejected` message describes. `kind` is the name of its class."""
    if kind == errors.InvalidParameter.__name__:
        return errors.InvalidParameter(message, param=param)
    if kind == errors.RequestFailed.__name__:
        return errors.RequestFailed(message, code=INTERNAL)
    return KINDS.get(kind, errors.EngineDead)(message)
