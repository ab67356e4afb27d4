"""`quire complete`: what is asked, what is printed where, and what happens at Ctrl-C."""

import io
import signal
from typing import Any

import pytest

from quire.contracts.sampling import OutputKind, SamplingParams
from quire.entry.cli.main import main


def interrupt_at(number: int) -> dict[str, Any]:
    return {"before_word": lambda i: signal.raise_signal(signal.SIGINT) if i == number else None}


def test_text_goes_to_stdout_and_the_rest_to_stderr(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "some/model", "-p", "hello", "--max-model-len", "64"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n"
    note, stats = err.splitlines()
    assert note == "quire: note: a note"
    assert stats.startswith("quire: prompt 2 tokens (1 cached), answer 3 tokens in ") and "first after" in stats
    (llm,) = fakes.made
    assert llm.options == {"model": "some/model", "max_model_len": 64} and llm.closed
    assert llm.asked == [("hello", SamplingParams(temperature=0.25, top_k=7, output_kind=OutputKind.DELTA))]


def test_flags_of_sampling_replace_the_models_defaults(fakes: Any) -> None:
    args = (
        "--temperature 0.5 --top-p 0.9 --top_k -1 --min-p 0.1 --max-tokens 9 --min-tokens 2 --seed 5 --ignore-eos "
        "--stop a --stop b --presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.1 --no-stats"
    ).split()
    assert main(["complete", "-q", "x", *args]) == 0
    (llm,) = fakes.made
    assert llm.asked[0][1] == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        max_tokens=9,
        min_tokens=2,
        seed=5,
        ignore_eos=True,
        stop=["a", "b"],
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        output_kind=OutputKind.DELTA,
    )
    assert "seed" not in llm.options  # the request's, not the engine's


def test_the_prompt_comes_from_stdin(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["complete"]) == 0
    assert fakes.made[0].asked[0][0] == "two\nlines"


def test_an_empty_stdin_is_refused_before_loading(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["complete"]) == 2
    assert "give -p TEXT" in capsys.readouterr().err and not fakes.made


def test_no_stats(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-p", "x", "--no-stats"]) == 0
    assert capsys.readouterr().err == "quire: note: a note\n"


def test_ctrl_c_ends_the_answer_and_the_request(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.behaviour = interrupt_at(1)
    before = signal.getsignal(signal.SIGINT)
    assert main(["complete", "-p", "x"]) == 130
    out, err = capsys.readouterr()
    assert out == "one two\n"
    assert "answer 2 tokens" in err and "Traceback" not in err
    assert fakes.made[0].num_ended_streams == 1 and fakes.made[0].closed
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_step(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def twice(number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    fakes.behaviour = {"before_word": twice}
    assert main(["complete", "-p", "x"]) == 130
    assert capsys.readouterr().out == "" and fakes.made[0].closed


def test_a_request_that_cannot_be_served_is_exit_code_1(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-p", "too long"]) == 1
    assert "quire: error: the prompt has 9 tokens" in capsys.readouterr().err


def test_a_request_that_failed_is_exit_code_1(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.behaviour = {"failure": "nan_logits"}
    assert main(["complete", "-p", "x"]) == 1
    assert "quire: error: the request failed: nan_logits." in capsys.readouterr().err
