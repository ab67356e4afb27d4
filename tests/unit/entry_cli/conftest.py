"""A model of two lines in place of the real one: the commands are tested without torch."""

import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.contracts.errors import PromptTooLong
from quire.contracts.output import CompletionOutput, RequestOutput
from quire.contracts.sampling import SamplingParams


@dataclass
class FakeLLM:
    """Answers "one two three" word by word, and remembers what it was asked."""

    options: dict[str, Any]
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    words: tuple[str, ...] = ("one", " two", " three")
    before_word: Callable[[int], None] = lambda number: None
    failure: str | None = None
    closed: bool = False
    num_ended_streams: int = 0

    def __post_init__(self) -> None:
        logging.getLogger("quire").warning("%s", "a note")

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25, top_k=7)

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        if "too long" in str(prompt):
            raise PromptTooLong("the prompt has 9 tokens and the context 8.")
        try:
            for i, word in enumerate(self.words):
                self.before_word(i)
                last = i == len(self.words) - 1
                reason = ("error" if self.failure else "length") if last else None
                piece = CompletionOutput(
                    index=0, text=word, token_ids=[i], finish_reason=reason, stop_reason=self.failure
                )
                yield RequestOutput(
                    request_id="0",
                    prompt=None,
                    prompt_token_ids=[1, 2],
                    outputs=[piece],
                    finished=last,
                    num_cached_tokens=1,
                )
        finally:
            self.num_ended_streams += 1

    def stream_chat(self, messages: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        return self.stream([dict(m) for m in messages], params)

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@dataclass
class Fakes:
    """The models that were made, and how the next ones behave."""

    made: list[FakeLLM] = field(default_factory=list)
    behaviour: dict[str, Any] = field(default_factory=dict)

    def make(self, model: str = "", **options: Any) -> FakeLLM:
        EngineConfig.from_flat(model=model, **options)
        self.made.append(FakeLLM({"model": model, **options}, **self.behaviour))
        return self.made[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """`quire.entry.llm` with the fake in it, for this test."""
    module, fakes = types.ModuleType("quire.entry.llm"), Fakes()
    module.LLM = fakes.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.entry.llm", module)
    return fakes
