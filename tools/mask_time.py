"""Milliseconds that the masks of one step take on this CPU: no model, no torch.

    python tools/mask_time.py [--tokenizer FOLDER] [--batch N] [--steps N]
    python tools/mask_time.py --make FOLDER [--size N]

Each row of the batch is a request somewhere in the middle of its output; its tokens are those of a made-up value that
fits the schema, and when it is written the next request takes the row. A step is what the engine does for it: all masks
in parallel, then each request's token. Without a tokenizer it is the bundled one; `--make` trains a byte-level one of
any size (151,936 by default) on the text files of this Python installation, which takes minutes.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from quire.answers.grammar import GrammarCompiler
from quire.config.bundled import bundled_model
from quire.contracts.structured import StructuredOutputsParams
from quire.entry.cli.table import format_table
from quire.text.tokenizer import Tokenizer

WORDS = "the model writes a short report about water prices in three cities and what they all paid last year".split()
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
Case = tuple[dict[str, Any], Callable[[random.Random], Any]]


def words(rng: random.Random, count: int) -> str:
    """A text of so many words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def thing(**properties: Any) -> dict[str, Any]:
    """A closed object, all of it required."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def several(item: Any) -> dict[str, Any]:
    """An array of `item`."""
    return {"type": "array", "items": item}


PERSON, LINE = thing(name=TEXT, age=NUMBER, email={"type": "string", "format": "email"}), thing(sku=TEXT, count=NUMBER)
KINDS = [thing(kind={"const": f"kind{i}"}, **{f"field{j}": TEXT for j in range(i % 4 + 1)}) for i in range(20)]
TREE = {"$ref": "#/$defs/n", "$defs": {"n": thing(value=NUMBER, children=several({"$ref": "#/$defs/n"}))}}
CASES: dict[str, Case] = {
    "any JSON object": (
        {"type": "object"},
        lambda r: {words(r, 1): words(r, 5), "n": [1, 2.5, None], "o": {"a": True}},
    ),
    "person": (PERSON, lambda r: {"name": words(r, 2), "age": r.randrange(99), "email": f"{words(r, 1)}@mail.com"}),
    "free text": (thing(text=TEXT), lambda r: {"text": words(r, 60)}),
    "short text": (thing(text={"type": "string", "maxLength": 200}), lambda r: {"text": words(r, 20)}),
    "array of persons": (
        several(PERSON),
        lambda r: [{"name": words(r, 2), "age": r.randrange(99), "email": f"{words(r, 1)}@mail.com"} for _ in range(4)],
    ),
    "order": (
        thing(id=NUMBER, lines=several(LINE), paid=FLAG),
        lambda r: {
            "id": r.randrange(10**6),
            "lines": [{"sku": words(r, 1), "count": r.randrange(9)} for _ in range(4)],
            "paid": True,
        },
    ),
    "nested 8": (
        thing(a=thing(b=thing(c=thing(d=thing(e=thing(f=thing(g=thing(h=TEXT)))))))),
        lambda r: {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": words(r, 3)}}}}}}}},
    ),
    "tree": (TREE, lambda r: {"value": 1, "children": [{"value": r.randrange(99), "children": []} for _ in range(5)]}),
    "20 variants": ({"anyOf": KINDS}, lambda r: {"kind": "kind7", **{f"field{j}": words(r, 4) for j in range(4)}}),
    "enum of 100": (
        thing(color={"enum": [f"color {i}" for i in range(100)]}),
        lambda r: {"color": f"color {r.randrange(100)}"},
    ),
    "enum of 10,000": (
        thing(city={"enum": [f"city number {i}" for i in range(10_000)]}),
        lambda r: {"city": f"city number {r.randrange(10_000)}"},
    ),
    "40 properties": (
        thing(**{f"column_{i}": NUMBER for i in range(40)}),
        lambda r: {f"column_{i}": r.randrange(99) for i in range(40)},
    ),
    "40 optional": (
        {"type": "object", "properties": {f"p{i}": TEXT for i in range(40)}},
        lambda r: {f"p{i}": words(r, 2) for i in range(0, 40, 4)},
    ),
    "patterns": (
        several({"type": "string", "pattern": "^[a-z]{2,9}-[0-9]{3}$"}),
        lambda r: [f"{words(r, 1)[:9]}x-{r.randrange(100, 999)}" for _ in range(6)],
    ),
    "date and uuid": (
        thing(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
        lambda r: {"day": "2024-05-17", "id": "123e4567-e89b-42d3-a456-426614174000"},
    ),
    "bounded numbers": (
        several({"type": "number", "minimum": -10.5, "maximum": 99.75}),
        lambda r: [round(r.uniform(-10, 99), 3) for _ in range(12)],
    ),
    "multiples": (several({"type": "integer", "multipleOf": 5}), lambda r: [5 * r.randrange(99) for _ in range(12)]),
    "matrix": (
        several({"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 3}),
        lambda r: [[r.randrange(99) for _ in range(3)] for _ in range(6)],
    ),
    "map": ({"type": "object", "additionalProperties": NUMBER}, lambda r: {w: r.randrange(99) for w in WORDS[:12]}),
    "unicode": (
        thing(**{"имя": TEXT, "名前": TEXT}),
        lambda r: {"имя": "вода и цены в городах", "名前": "水の値段について"},
    ),
}


class Row:
    """A place in the batch: one request after the other, of one case after the other."""

    def __init__(self, names: list[str], grammars: dict[str, Any], tokenizer: Tokenizer, seed: int) -> None:
        self._names, self._grammars, self._tokenizer, self._random = names, grammars, tokenizer, random.Random(seed)
        self.next_request()
        for token in self.tokens[: seed * 7 % (len(self.tokens) - 1)]:
            self.take(token)

    def next_request(self) -> None:
        name = self._random.choice(self._names)
        value = json.dumps(CASES[name][1](self._random), ensure_ascii=False)
        self.matcher, self.tokens, self.at = self._grammars[name].fork(), self._tokenizer.encode(value, False), 0

    def take(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            raise SystemExit(f"{self._tokenizer.decode(self.tokens)!r} does not fit: {self.matcher.get_error()}")
        self.at += 1


def measure(names: list[str], compiler: GrammarCompiler, tokenizer: Tokenizer, args: argparse.Namespace) -> list[str]:
    """Return a line of the table without the name."""
    began = perf_counter()
    grammars = {name: compiler.compile(StructuredOutputsParams(json=CASES[name][0]).spec()) for name in names}
    compiled = (perf_counter() - began) / len(names)
    rows = [Row(names, grammars, tokenizer, seed) for seed in range(args.batch)]
    masks, steps = [], []
    for _ in range(args.steps):
        began = perf_counter()
        _, over = compiler.masks([row.matcher for row in rows], [(0,)] * len(rows))
        masks.append(perf_counter() - began)
        for row in rows:
            row.take(row.tokens[row.at])
        steps.append(perf_counter() - began)
        for row in rows:
            if row.at == len(row.tokens):
                row.next_request()
        assert not over
    return [
        f"{1000 * number:.2f}"
        for number in (compiled, *(np.percentile(times, q) for times in (masks, steps) for q in (50, 99)), max(steps))
    ]


def train(folder: Path, size: int) -> None:
    """A tokenizer of `size` tokens from the text files of this installation, at most 120 MB of them."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    def texts() -> Iterator[str]:
        files = [
            p
            for root in sys.path
            if os.path.isdir(root)
            for p in Path(root).rglob("*")
            if p.suffix in (".py", ".md", ".txt", ".json", ".h", ".pyi", ".rst")
        ]
        random.Random(0).shuffle(files)
        room = 120 << 20
        for path in dict.fromkeys(files):
            if path.is_file() and path.stat().st_size < min(room, 2 << 20):
                room -= path.stat().st_size
                yield path.read_text(errors="replace")

    backend = Backend(models.BPE())
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts(),
        trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"]
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))


def main() -> None:
    """Measure every case and all of them mixed, or make a tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=bundled_model())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--size", type=int, default=151_936)
    args = parser.parse_args()
    if args.make:
        return train(args.make, args.size)
    tokenizer = Tokenizer.load(args.tokenizer)
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, threads=os.cpu_count() or 1)
    began = perf_counter()
    compiler.token_bytes(0)
    print(
        f"{tokenizer.vocab_size:,} tokens, ready for grammars in {perf_counter() - began:.2f} s; batch {args.batch}, "
        f"{args.steps} steps; {os.cpu_count()} cores; milliseconds\n"
    )
    lines = [[name, *measure([name], compiler, tokenizer, args)] for name in CASES]
    lines.append(["all mixed", *measure([*CASES], compiler, tokenizer, args)])
    header = ["grammar", "compile", "masks p50", "p99", "with tokens p50", "p99", "max"]
    print(format_table(header, lines))


if __name__ == "__main__":
    main()
