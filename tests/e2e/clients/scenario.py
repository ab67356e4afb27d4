"""Shared by the programs of this folder: the servers' addresses, the answers of `LLM`, and one line for every scenario.

Every program runs in the environment of its own client, where Quire is not installed:

    .venv/clients/NAME/bin/python run_NAME.py FACTS.json
"""

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

MODEL = "quire-tiny"


class Facts:
    """The servers (`url` with the model, `keyed_url` with `key`) and the right answers, all of them greedy.

    chats       the answer, by question: at most 60 tokens;  texts: 24 tokens, by prompt
    embeddings  by text
    call        `question`, `tools` (one), `name` and `arguments` of the call that the model makes by itself, a
                `result`, and the `answer` to it
    structured  `question`, `schema`, and the `value` that comes
    thought     `question`, `reasoning`, `answer`
    scores      [context, continuation, log-probability, whether it is the greedy one]
    """

    def __init__(self, path: str) -> None:
        facts = json.loads(Path(path).read_text())
        self.url, self.keyed_url, self.key = facts["url"], facts["keyed_url"], facts["key"]
        self.folder = Path(path).parent
        self.chats: dict[str, str] = facts["chats"]
        self.texts: dict[str, str] = facts["texts"]
        self.embeddings: dict[str, list[float]] = facts["embeddings"]
        self.call: dict[str, Any] = facts["call"]
        self.structured: dict[str, Any] = facts["structured"]
        self.thought: dict[str, str] = facts["thought"]
        self.scores: list[tuple[str, str, float, bool]] = facts["scores"]
        self.question, self.prompt = next(iter(self.chats)), next(iter(self.texts))
        self.base, self.keyed_base = self.url + "/v1", self.keyed_url + "/v1"


def refusal(kind: type[Exception], call: Callable[..., object], *arguments: Any, **options: Any) -> Any:
    """The error that a call must end with."""
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def close(found: Iterable[float], right: Iterable[float]) -> bool:
    """Return True for numbers that are the same up to rounding."""
    return all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(found, right, strict=True))


def main(package: str, *scenarios: Callable[[Facts], object]) -> None:
    """Everything, in order; the first wrong answer ends it with a traceback."""
    facts, code = Facts(sys.argv[1]), 0
    print(package, metadata.version(package))
    try:
        for scenario in scenarios:
            scenario(facts)
            print(scenario.__name__, flush=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a thread of litellm's was once seen to wait for ever
