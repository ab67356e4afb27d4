"""The commands with the bundled model: what the fakes of the other tests stand for."""

import io

import pytest

from quire.entry.cli.main import main

FLAGS = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos", "--max-model-len", "128", "--num-threads", "1"]


def test_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-p", "import json\n", *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "answer 4 tokens" in err


def test_chat_keeps_its_history_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the json module for?\nAnd the os module?\n"))
    assert main(["chat", "--block-size", "8", *FLAGS]) == 0
    out, err = capsys.readouterr()
    stats = [line for line in err.splitlines() if "answer 4 tokens" in line]
    assert len(stats) == 2 and "cached" not in stats[0] and "cached" in stats[1]
    assert out.count("\n") >= 2
