"""Requests of a server benchmark and their arrival times: random prompts or a file of prompts, at a rate.

Knows nothing of HTTP. Prompts for completions are token ids, so that their length is exact with any tokenizer. Prompts
for chat are words; the result reports the server's count of their tokens.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError

LOW_ID, HIGH_ID = 1000, 8000  # ids in nearly every vocabulary, above its special tokens
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back face level office door "
    "health art war history party result change morning reason research girl moment air force"
).split()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request: a text, token ids or chat messages, and the maximum number of output tokens."""

    prompt: str | list[int] | list[dict[str, Any]]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class RandomLoad:
    """Random prompts behind a common prefix.

    input_len, output_len       mean lengths, in tokens; the prefix is not counted
    input_ratio, output_ratio   each length is drawn from [len * (1 - ratio), len * (1 + ratio)]
    prefix_len                  tokens of the common prefix
    as_text                     True: prompts are common English words, about a token each; False: token ids
    """

    input_len: int = 1024
    output_len: int = 128
    input_ratio: float = 0.0
    output_ratio: float = 0.0
    prefix_len: int = 0
    as_text: bool = False

    def draw(self, count: int, seed: int) -> list[Ask]:
        """Draw `count` requests; the same seed gives the same requests."""
        rng = random.Random(seed)
        prefix = self._piece(rng, self.prefix_len)
        asks = []
        for _ in range(count):
            num_in = _spread(rng, self.input_len, self.input_ratio)
            num_out = _spread(rng, self.output_len, self.output_ratio)
            piece = prefix + self._piece(rng, num_in)
            asks.append(Ask(prompt=" ".join(map(str, piece)) if self.as_text else piece, max_tokens=num_out))
        return asks

    def _piece(self, rng: random.Random, length: int) -> list[Any]:
        return rng.choices(WORDS, k=length) if self.as_text else [rng.randrange(LOW_ID, HIGH_ID) for _ in range(length)]


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


def read_load(path: Path, output_len: int, count: int, *, chat: bool) -> list[Ask]:
    """Read `count` requests from a JSON-lines file. A shorter file is repeated.
    A line is {"prompt": text or ids} or, for chat, {"messages": [...]}. Its "max_tokens" or "output_tokens" replaces
    `output_len`. Raises `ConfigError` with the number of the wrong line."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}: choose another file.") from None
    asks = [_parse(line, f"{path}:{number}", output_len, chat) for number, line in enumerate(lines, 1)]
    if not asks:
        raise ConfigError(f"--dataset-path {path}: the file has no requests: choose another file.")
    return [asks[i % len(asks)] for i in range(count)]


def _parse(line: str, where: str, output_len: int, chat: bool) -> Ask:
    try:
        row = json.loads(line)
        prompt = row.get("messages") if chat and "messages" in row else row["prompt"]
        bound = int(row.get("max_tokens") or row.get("output_tokens") or output_len)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError(
            f'{where}: not a JSON object with "prompt"{" or messages" if chat else ""}: correct the line.'
        ) from None
    if chat and isinstance(prompt, list) and not all(isinstance(message, dict) for message in prompt):
        raise ConfigError(f"{where}: token ids cannot be chat messages; use --backend openai.")
    return Ask(prompt=prompt, max_tokens=bound)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Sequence[float]:
    """Return the time of each request, in seconds after the start. An infinite rate sends all at once.
    `burstiness`: 1: a Poisson process; otherwise gamma-distributed gaps, below 1 in bursts, above 1 more even."""
    if math.isinf(rate):
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
