"""Every class of error has its answer, and an answer is what OpenAI's clients read."""

import json

import pytest

from quire.contracts import errors
from quire.entry.http.errors import HttpError, http_error, not_implemented, too_long

ANSWERS = [
    (errors.InvalidParameter("m", param="n"), 400, "invalid_request_error", "invalid_value"),
    (errors.PromptTooLong("m"), 400, "invalid_request_error", "context_length_exceeded"),
    (errors.QueueFull("m"), 429, "rate_limit_error", "engine_overloaded"),
    (errors.QueueTimeout("m"), 408, "server_error", "queue_timeout"),
    (errors.RequestFailed("m", code="deadline"), 504, "server_error", "deadline"),
    (errors.RequestFailed("m", code="first_token_timeout"), 504, "server_error", "first_token_timeout"),
    (errors.RequestFailed("m", code="nan_logits"), 500, "server_error", "nan_logits"),
    (errors.EngineStarting("m"), 503, "server_error", "engine_starting"),
    (errors.EngineClosed("m"), 503, "server_error", "engine_closed"),
    (errors.EngineDead("m"), 503, "server_error", "engine_dead"),
    (errors.EngineError("m"), 503, "server_error", "engine_unavailable"),
    (errors.UserError("m"), 400, "invalid_request_error", None),
    (KeyError("secret"), 500, "server_error", "internal_error"),
    (errors.QuireError("secret"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), ANSWERS, ids=lambda value: type(value).__name__)
def test_answers(error: Exception, status: int, kind: str, code: str | None) -> None:
    answer = http_error(error)
    body = json.loads(answer.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (answer.status, body["type"], body["code"]) == (status, kind, code)
    assert body["param"] == ("n" if isinstance(error, errors.InvalidParameter) else None)
    assert "secret" not in body["message"]
    headers = dict(answer.headers)
    assert ("retry-after" in headers) == (status in (408, 429, 503))
    assert (headers.get("x-should-retry") == "false") == (status == 500)


def test_every_class_of_the_tree_has_an_answer_on_purpose() -> None:
    """A class that is added must be thought of: nothing that a caller can meet is an internal error."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.QuireError) and kind is not errors.QuireError:
            error = kind.__new__(kind)
            error.code = error.param = None
            assert http_error(error).code != "internal_error", kind


def test_an_http_error_is_its_own_answer() -> None:
    error = HttpError(404, "no", code="model_not_found")
    assert http_error(error) is error


def test_words() -> None:
    assert "not implemented yet" in not_implemented("tools", "why.").message
    assert all(str(n) in too_long(7, 5, 3, "prompt", "max_tokens").message for n in (7, 5, 3))
    assert "None" not in too_long(7, 5, None, "prompt", "max_tokens").message


@pytest.mark.parametrize(
    ("num_prompt", "asked", "param"),
    [(4, 2, "limit"), (4, 9, "limit"), (5, 1, "prompt"), (7, 3, "prompt"), (7, None, "prompt")],
)
def test_who_is_to_blame_for_what_exceeds_the_context(num_prompt: int, asked: int | None, param: str) -> None:
    error = too_long(num_prompt, 5, asked, "prompt", "limit")
    assert error.param == param and ("or lower limit to 1." in error.message) == (param == "limit")
