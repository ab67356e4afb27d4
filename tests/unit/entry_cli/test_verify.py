"""`quire verify` hands over model, configuration and prompt, and answers with the report."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from quire.entry.cli.main import main


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_report_decides(
    ok: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Report:
        def __init__(self) -> None:
            self.ok = ok

        def render(self) -> str:
            return "layer 0: equal"

    def verify(model: str, config: Any, prompt: str | None, *, reference: Path | None, dump: Path | None) -> Report:
        calls.append((model, config.model.dtype, prompt, reference, dump))
        return Report()

    def against(model: str, config: Any, prompt: str | None, where: Path) -> Report:
        calls.append((model, prompt, where))
        return Report()

    for name, function in {"parity": verify, "against": against}.items():
        module = types.ModuleType(f"quire.explain.verify.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if "quire.explain" not in sys.modules:
        monkeypatch.setitem(sys.modules, "quire.explain", types.ModuleType("quire.explain"))
    given = ["verify", "some/model", "-p", "text", "--dtype", "float32"]
    assert main([*given, "--reference", "other", "--dump", "file"]) == code
    assert main([*given, "--against", "file"]) == code
    assert calls == [
        ("some/model", "float32", "text", Path("other"), Path("file")),
        ("some/model", "text", Path("file")),
    ]
    assert capsys.readouterr().out == "layer 0: equal\n" * 2
    assert main([*given, "--against", "file", "--reference", "other"]) == 3


def test_random_weights_have_nothing_to_be_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "some/model", "--load-format", "dummy"]) == 3
    assert "--load-format=dummy" in capsys.readouterr().err
