"""`quire chat`: the history, the commands, and Ctrl-C, which stops the answer and not the program."""

import builtins
import io
import signal
from collections.abc import Callable
from typing import Any

import pytest

from quire.entry.cli.main import main

ANSWER = {"role": "assistant", "content": "one two three"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Type these lines; an exception among them happens at the prompt."""

    def set_lines(*lines: str | BaseException) -> None:
        left = list(lines)

        def read(prompt: str = "") -> str:
            if not left:
                raise EOFError
            line = left.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)

    monkeypatch.setattr("sys.stdin", io.StringIO())
    return set_lines


def asked(fakes: Any) -> list[Any]:
    return [messages for messages, _ in fakes.made[0].asked]


def test_a_quick_question(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-q", "hi", "--system-prompt", "Be brief.", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n" and "answer 3 tokens" in err
    assert asked(fakes) == [[{"role": "system", "content": "Be brief."}, user("hi")]]
    assert fakes.made[0].asked[0][1].temperature == 0 and fakes.made[0].closed


def test_every_turn_sees_the_ones_before(fakes: Any, type_lines: Callable[..., None]) -> None:
    type_lines("a", "", "b")
    assert main(["chat"]) == 0
    assert asked(fakes) == [[user("a")], [user("a"), ANSWER, user("b")]]


def test_reset_keeps_the_system_prompt_only(fakes: Any, type_lines: Callable[..., None]) -> None:
    type_lines("a", "/reset", "b")
    assert main(["chat", "--system-prompt", "s"]) == 0
    system = {"role": "system", "content": "s"}
    assert asked(fakes) == [[system, user("a")], [system, user("b")]]


@pytest.mark.parametrize("word", ["/exit", "/quit", "exit", "quit"])
def test_exit_and_unknown_commands(
    word: str, fakes: Any, type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines("/nothing", "/help", "/etc is a folder", word, "never")
    assert main(["chat"]) == 0
    assert asked(fakes) == [[user("/etc is a folder")]]
    assert "unknown command /nothing" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(
    fakes: Any, type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.behaviour = {"before_word": _once_at(1)}
    type_lines("a", "b")
    assert main(["chat"]) == 0
    assert asked(fakes) == [[user("a")], [user("a"), {"role": "assistant", "content": "one two"}, user("b")]]
    assert capsys.readouterr().out == "one two\none two three\n"


def _once_at(number: int) -> Callable[[int], None]:
    left = [number]

    def before_word(i: int) -> None:
        if left and left[0] == i:
            left.pop()
            signal.raise_signal(signal.SIGINT)

    return before_word


def test_ctrl_c_at_the_prompt_goes_on(
    fakes: Any, type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(KeyboardInterrupt(), "a")
    assert main(["chat"]) == 0
    assert asked(fakes) == [[user("a")]]
    assert "exit or Ctrl-D leaves" in capsys.readouterr().err


def test_ctrl_c_during_a_quick_question_is_130(fakes: Any) -> None:
    fakes.behaviour = {"before_word": _once_at(0)}
    assert main(["chat", "-q", "hi"]) == 130


def test_a_question_that_is_refused_leaves_no_trace(
    fakes: Any, type_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines("too long", "b")
    main(["chat"])
    assert asked(fakes) == [[user("too long")], [user("b")]]
    assert "quire: error: the prompt has 9 tokens" in capsys.readouterr().err


def test_a_quick_question_that_is_refused_is_exit_code_1(fakes: Any) -> None:
    assert main(["chat", "-q", "too long"]) == 1


@pytest.mark.parametrize(("lines", "code"), [(["too long"], 1), (["too long", "b"], 1), (["b"], 0)], ids=str)
def test_questions_from_a_file_that_fail_are_exit_code_1(
    fakes: Any, type_lines: Callable[..., None], lines: list[str], code: int
) -> None:
    type_lines(*lines)
    assert main(["chat"]) == code
