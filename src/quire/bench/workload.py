"""Workloads of token ids, and the JSON rows of their results, the same for all compared engines.

Imports only the standard library and our errors, because vLLM's environment imports this file, too. Prompts are random
ids from a fixed seed; outputs have fixed lengths (greedy, end of sequence ignored). So all engines do the same work.
"""

import importlib
import inspect
import json
import random
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError

HERE = Path(__file__).parent
DEFAULT_MODEL = "qwen3-0.6b"
DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True}
SECRET = ("hf_token",)
EDITED = ("textwrap", "heapq", "calendar", "shlex", "csv", "fractions", "queue", "statistics")  # modules
CHARACTERS = 4  # of a token of code, about
LOW_ID, HIGH_ID = 1000, 30_000  # ids in the vocabularies of all compared models, above their special tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one kind. An engine continues `prompts[i]` (token ids) by exactly `outputs[i]` tokens.

    texts   the prompts as texts, for an engine with a tokenizer; (): there are only ids
    """

    name: str
    prompts: list[list[int]]
    outputs: list[int]
    texts: Sequence[str] = ()

    @property
    def num_input_tokens(self) -> int:
        """Number of prompt tokens of all requests."""
        return sum(map(len, self.prompts))

    def summary(self, seconds: float, produced: int) -> dict[str, Any]:
        """Return the row of a run for a result file: counts, seconds and tokens per second.

        seconds    time of the run
        produced   output tokens of the run

        Raises ValueError when `produced` differs from the tokens asked for: such a run cannot be compared.
        """
        asked = sum(self.outputs)
        if produced != asked:
            raise ValueError(f"{self.name}: {produced} tokens came out, {asked} were asked for.")
        return {
            "workload": self.name,
            "requests": len(self.prompts),
            "seconds": round(seconds, 4),
            "input_tokens": self.num_input_tokens,
            "output_tokens": produced,
            "output_tokens_per_s": round(produced / seconds, 1),
            "total_tokens_per_s": round((produced + self.num_input_tokens) / seconds, 1),
        }


def load_workloads(
    names: Sequence[str] | None = None, scale: float = 1.0, max_len: int | None = None
) -> Iterator[Workload]:
    """Yield the workloads of `workloads.json`, `names` or all but edits, in the file's order.

    scale     factor on the number of requests, for a small machine; at least one request stays
    max_len   maximum of every prompt, prefix and output length, in tokens

    Raises `ConfigError` for a name that is not in the file.
    """
    table = json.loads((HERE / "workloads.json").read_text())
    if unknown := set(names or ()) - set(table):
        raise ConfigError(f"unknown workload {sorted(unknown)[0]!r}: the workloads are {', '.join(table)}.")
    for name, spec in table.items():
        if name in names if names else not spec.get("edits"):
            yield _draw(name, spec, scale, max_len)


def _draw(name: str, spec: dict[str, Any], scale: float, max_len: int | None) -> Workload:
    # Keep the order of draws: recorded results depend on it.
    rng = random.Random(0)
    count = max(1, round(spec["requests"] * scale)) if spec["requests"] > 1 else 1

    def fit(length: int) -> int:
        return max(1, min(length, max_len)) if max_len else length

    def ids(length: int) -> list[int]:
        return [rng.randrange(LOW_ID, HIGH_ID) for _ in range(length)]

    prefix = ids(fit(spec["prefix"])) if spec.get("prefix") else []
    prompts, outputs, texts = list[list[int]](), list[int](), list[str]()
    for _ in range(count):
        num_in, num_out = fit(rng.randint(*spec["input"])), fit(rng.randint(*spec["output"]))
        texts += [_edit(len(texts), num_in)] if spec.get("edits") else []
        prompts.append(_word_ids(texts[-1])[-num_in:] if texts else prefix + ids(num_in))
        outputs.append(num_out)
    return Workload(name=name, prompts=prompts, outputs=outputs, texts=texts)


def _edit(number: int, length: int) -> str:
    """Return a prompt of about `length` tokens that asks for a part of Python's library with a name changed."""
    module = importlib.import_module(EDITED[number % len(EDITED)])
    source, size = inspect.getsource(module), CHARACTERS * max(1, length - 32)
    first = number // len(EDITED) * size % max(1, len(source) - size)
    code = source[source.rfind("\n", 0, first) + 1 :][:size].rpartition("\n")[0]
    old = max(names := re.findall(r"\b(?!self\b)[a-z_]{4,}\b", code), key=names.count, default="self")
    return f"{code}\n\nThe same code, with {old} renamed to {old}_new:\n\n"


def _word_ids(text: str) -> list[int]:
    """Return an id for each word, sign and white space, equal for equal ones: a stand-in for a tokenizer."""
    return [LOW_ID + zlib.crc32(word.encode()) % (HIGH_ID - LOW_ID) for word in re.findall(r"\w+|\s+|\W", text)]


def fastest_run(llm: Any, make_params: Any, work: Workload, repeat: int) -> dict[str, Any]:
    """Run a workload `repeat` times, each with an empty prefix cache. Return the row of the fastest run.

    The row also has `first_seconds`, the time of the first run.

    llm           an offline engine, Quire's or vLLM's: it has `generate` and `reset_prefix_cache`
    make_params   the engine's class of sampling parameters
    """
    params = [
        make_params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in work.outputs
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    rows = []
    for _ in range(repeat):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        done = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        rows.append(work.summary(seconds, sum(len(output.outputs[0].token_ids) for output in done)))
    return min(rows, key=lambda row: row["seconds"]) | {"first_seconds": rows[0]["seconds"]}


def model_names() -> list[str]:
    """Return the names of the bundled model configurations for benchmarks, which run with random weights."""
    return sorted(path.parent.name for path in (HERE / "models").glob("*/config.json"))


def model_folder(name: str) -> Path:
    """Return the folder of a model configuration of `model_names`. Raises `ConfigError` for any other name."""
    if name not in model_names():
        raise ConfigError(f"unknown benchmark model {name!r}: the models are {', '.join(model_names())}.")
    return HERE / "models" / name


def resolve_target(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name, engine options) of the model to measure, from the options of the command line.

    A name of `bench/models` means that configuration with random weights and without a tokenizer, unless `options` says
    otherwise. A folder or hub id is loaded as it is.
    """
    model = options.get("model") or DEFAULT_MODEL
    if model in model_names() and not Path(model).is_dir():
        return model, DUMMY | options | {"model": str(model_folder(model))}
    return Path(model).name, options | {"model": model}


def printable(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` without secrets and without the path of the model, for a result file."""
    return {name: value for name, value in options.items() if name not in (*SECRET, "model")}
