"""An error that crosses the process boundary is raised as what it was; what is no error of ours is the engine's end."""

import inspect

import pytest

from quire.contracts import errors
from quire.procs.failures import failed, rebuilt, rejected

SPECIAL = {"QuireError", "EngineError", "RequestFailed", "InvalidParameter"}  # the first two are never raised
PLAIN = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__name__ not in SPECIAL]


@pytest.mark.parametrize("kind", PLAIN)
def test_every_class_of_ours_arrives_as_itself(kind: type[errors.QuireError]) -> None:
    message = failed(kind("what happened"))
    back = rebuilt(message.kind, message.message)
    assert type(back) is kind and str(back) == "what happened"


def test_a_refused_parameter_keeps_its_name() -> None:
    message = rejected((4,), errors.InvalidParameter("no", param="top_p"))
    back = rebuilt(message.kind, message.message, message.param)
    assert isinstance(back, errors.InvalidParameter) and back.param == "top_p"


def test_a_fault_of_ours_in_one_prompt_fails_that_prompt() -> None:
    message = rejected((4, 5), ZeroDivisionError("secret"))
    back = rebuilt(message.kind, message.message, message.param)
    assert isinstance(back, errors.RequestFailed) and back.code == "internal" and "secret" not in str(back)


def test_anything_else_is_the_end_of_the_engine_with_its_cause() -> None:
    try:
        raise MemoryError("cannot allocate 3 GiB")
    except MemoryError as error:
        message = failed(error)
    back = rebuilt(message.kind, message.message)
    assert type(back) is errors.EngineDead and "MemoryError: cannot allocate 3 GiB" in str(back)
    assert "Traceback" in message.details
    assert type(rebuilt("NoSuchClass", "x")) is errors.EngineDead


def test_what_a_user_can_fix_carries_no_traceback() -> None:
    assert failed(errors.ModelNotFound("no model")).details == ""
