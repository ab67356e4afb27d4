"""Grammars that would end this process or stop it for minutes: a child meets them first, and they are refused."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire.answers.grammar import GrammarCompiler
from quire.answers.grammar_trial import GrammarTrial
from quire.config.bundled import bundled_model
from quire.contracts.errors import InvalidParameter, RequestFailed
from quire.contracts.structured import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(bundled_model())


def chain(rule: str, last: str, count: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: {rule} r{i + 1}" for i in range(count)), f"r{count}: {last}"])


def refs(count: int) -> dict[str, Any]:
    return {
        "$ref": "#/$defs/0",
        "$defs": {
            str(count): {"type": "null"},
            **{str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"const": i}]} for i in range(count)},
        },
    }


CRASHES: dict[str, dict[str, Any]] = {  # without a trial: the end of the process, for want of stack
    "rules": {"grammar": chain('"a"', '"b"', 20_000)},
    "rules with a special token": {"grammar": chain('"a"', "<|im_end|>", 20_000)},
    "terminals": {"grammar": chain('"a"', '"b"', 5_000).upper().replace("START", "start")},
    "references": {"json": refs(3_000)},
    "the least integer": {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "const": -9223372036854775808}'},
}
SLOW: dict[str, dict[str, Any]] = {  # minutes, or gigabytes
    "intersections": {"grammar": "start: A\nA: " + " & ".join(f"/[^a]*[a-z]{{{i}}}/" for i in range(300))},
    "many choices": {"regex": "(a|b)*c?" * 20_000},
    "one token": {"regex": "a?" * 20_000},
    "a divisor": {"json": {"type": "integer", "multipleOf": 123_456_789}},
    "patterns": {"json": {"type": "object", "patternProperties": {f"^p{i}x": {"type": "null"} for i in range(500)}}},
}


def make(seconds: float) -> GrammarCompiler:
    return GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size, GrammarTrial(seconds))


def refusal(compiler: GrammarCompiler, structured: dict[str, Any]) -> str:
    with pytest.raises((InvalidParameter, RequestFailed)) as error:
        compiler.compile(StructuredOutputsParams(**structured).spec())
    assert getattr(error.value, "param", "") == "structured_outputs" or error.value.code == "invalid_grammar"
    return str(error.value)


def test_what_would_end_this_process_is_refused() -> None:
    """And the next grammar has a child again."""
    compiler = make(20.0)
    for name, structured in CRASHES.items():
        assert "it takes too much memory" in refusal(compiler, structured), name
    spec = StructuredOutputsParams(regex="a{3}").spec()
    assert compiler.compile(spec).fork().consume_token(TOKENIZER.encode("a")[0])
    assert "unclosed group" in refusal(compiler, {"regex": "(a"})
    assert "Invalid type: strin" in refusal(compiler, {"json": {"type": "strin"}})


def test_what_would_take_minutes_is_refused_while_this_process_goes_on() -> None:
    """In a thread, beside one that goes on; a good grammar of another caller does not wait for it. And of the gigabytes
    that some would take, nothing is left here."""
    compiler, other, found = make(0.5), make(20.0), {}
    other.compile(StructuredOutputsParams(choice=["a", "b"]).spec())
    before = resident()
    for name, structured in SLOW.items():
        worker = threading.Thread(target=lambda: found.update({name: refusal(compiler, structured)}))  # noqa: B023
        worker.start()
        while worker.is_alive():
            assert other.compile(StructuredOutputsParams(choice=["a", "b"]).spec())
            time.sleep(0.2)
    assert found.keys() == SLOW.keys()
    assert all("takes more than" in text or "too much memory" in text for text in found.values()), found
    assert resident() - before < 64 * 2**20


def resident() -> int:
    lines = Path("/proc/self/status")
    if not lines.exists():
        return 0
    return next(int(line.split()[1]) for line in lines.read_text().splitlines() if line.startswith("VmRSS")) * 1024


def test_children_end_with_who_asked() -> None:
    trial = GrammarTrial()
    compiler = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size, trial)
    compiler.compile(StructuredOutputsParams(regex="a").spec())
    (child,) = trial._children.idle
    assert child.poll() is None
    del trial, compiler
    assert child.poll() is not None
