"""The public names of Quire. They load on first use, so `import quire` never imports torch."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.contracts import errors
    from quire.contracts.adapters import LoRARequest
    from quire.contracts.errors import QuireError
    from quire.contracts.output import CompletionOutput, RequestOutput
    from quire.contracts.sampling import BeamSearchParams, OutputKind, SamplingParams
    from quire.contracts.structured import StructuredOutputsParams
    from quire.entry.async_llm import AsyncLLM
    from quire.entry.llm import LLM

__version__ = "0.1.0"

__all__ = [
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

_HOMES = {
    "LLM": "quire.entry.llm",
    "AsyncLLM": "quire.entry.async_llm",
    "BeamSearchParams": "quire.contracts.sampling",
    "CompletionOutput": "quire.contracts.output",
    "EngineConfig": "quire.config.engine",
    "LoRARequest": "quire.contracts.adapters",
    "OutputKind": "quire.contracts.sampling",
    "QuireError": "quire.contracts.errors",
    "RequestOutput": "quire.contracts.output",
    "SamplingParams": "quire.contracts.sampling",
    "StructuredOutputsParams": "quire.contracts.structured",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("quire.contracts.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
