"""The names of `import quire` are pinned; adding a name is a decision."""

import importlib

import pytest

import quire
import rules
from quire.contracts import errors

NAMES = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "OutputKind",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "errors",
]


def test_the_public_names_are_these() -> None:
    assert quire.__all__ == NAMES
    assert dir(quire) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(quire._HOMES))
def test_each_name_is_its_rooms_own(name: str) -> None:
    home = quire._HOMES[name]
    if not (rules.ROOT / "src" / f"{home.replace('.', '/')}.py").is_file():
        pytest.skip(f"{home} does not exist yet")
    assert getattr(quire, name) is getattr(importlib.import_module(home), name)


def test_errors_is_the_module() -> None:
    assert quire.errors is errors


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = quire.Engine
