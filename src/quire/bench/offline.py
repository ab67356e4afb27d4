"""Offline benchmarks with `LLM`: time of batches (throughput) and of single requests (latency)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quire import __version__
from quire.bench.workload import Workload, fastest_run, printable, resolve_target
from quire.contracts.errors import ConfigError
from quire.contracts.output import StepOutputs
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.contracts.step import I32
from quire.engine.replicas import Core

LATENCY_WORKLOAD = "latency_b1"


class OfflineBench:
    """Runs workloads with an `LLM` and collects their rows in `result`, the content of a result file.

    The results of other engines, which are compared, have the same format.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        name, given = resolve_target(options)
        self.advance: Callable[[int], None] = lambda count: None  # called with numbers of new tokens
        start = time.perf_counter()
        from quire.entry.llm import LLM

        self._without_tokenizer = given.get("skip_tokenizer_init", False)
        imported = time.perf_counter()
        self.llm = LLM(**({"use_tqdm_on_load": False} | given))
        self.result: dict[str, Any] = {
            "engine": f"quire {__version__}",
            "model": name,
            "engine_args": printable(options),
            "device": self.llm.engine.device.device,
            "import_s": round(imported - start, 2),
            "construct_s": round(time.perf_counter() - imported, 2),
            "runs": [],
        }

    def throughput(self, works: Sequence[Workload], repeat: int) -> Iterator[dict[str, Any]]:
        """Run each workload `repeat` times as a batch, with an empty prefix cache. Yield the row of its fastest run.

        The row also has percentiles of the inter-token times of all runs, in milliseconds; with speculative decoding
        tokens of a request per step, the share of right drafts, and tokens per second without drafts.
        """
        works = self._fitting(works)
        for work in works:
            core, before = self.llm.engine.core, self._drafts()
            with watching(core, self.advance) as steps:
                row = fastest_run(self.llm, SamplingParams, work, repeat)
            row |= _inter_token(steps)
            if core.facts.num_drafts:
                _, made, *right = self._drafts() - before
                plain = fastest_run(self.llm, partial(SamplingParams, speculative_tokens=0), work, repeat)
                row |= {
                    "plain_output_tokens_per_s": plain["output_tokens_per_s"],
                    "tokens_per_step": round(_tokens_per_step(steps), 2),
                    "drafts_accepted": round(sum(right) / max(1, made), 3),
                }
            self.result["runs"].append(row)
            yield row

    def latency(self, works: Sequence[Workload], repeat: int) -> Iterator[dict[str, Any]]:
        """Stream the first request of each workload alone, `repeat` times. Yield the row of the fastest run.

        The row also has the first-token time and percentiles of the inter-token times, in milliseconds.
        """
        for work in self._fitting(works):
            one = Workload(name=work.name, prompts=work.prompts[:1], outputs=work.outputs[:1])
            row = min((self._stream(one) for _ in range(repeat)), key=lambda row: float(row["seconds"]))
            self.result["runs"].append(row)
            yield row

    def _drafts(self) -> np.ndarray:
        """Return `StepStats.drafts` of now, the sum over all replicas."""
        core = self.llm.engine.core
        return np.sum([one.state().stats.drafts for one in getattr(core, "cores", (core,))], 0)

    def _stream(self, work: Workload) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0.0, max_tokens=work.outputs[0], ignore_eos=True, detokenize=False, output_kind=OutputKind.DELTA
        )
        self.llm.reset_prefix_cache()
        start = time.perf_counter()
        times, produced = [], 0
        for piece in self.llm.stream({"prompt_token_ids": work.prompts[0]}, params):
            produced += len(piece.outputs[0].token_ids)
            self.advance(len(piece.outputs[0].token_ids))
            times.append(time.perf_counter() - start)
        return (
            work.summary(times[-1], produced)
            | {"first_token_ms": round(1000 * times[0], 2)}
            | _percentiles(np.diff(times))
        )

    def _fitting(self, works: Sequence[Workload]) -> list[Workload]:
        """Return the workloads with token ids of the model. Raises `ConfigError` for a workload beyond the context."""
        facts = self.llm.engine.core.facts
        for work in works:
            longest = max(len(p) + n for p, n in zip(work.prompts, work.outputs, strict=True))
            if longest > facts.max_model_len:
                raise ConfigError(
                    f"{work.name} needs a context of {longest} tokens, this engine has "
                    f"{facts.max_model_len}: choose others with --only, shorten them with --max-len, or "
                    "raise --max-model-len."
                )

        def ids(work: Workload) -> list[list[int]]:
            if not work.texts or self._without_tokenizer:
                return [[i % facts.vocab_size for i in prompt] for prompt in work.prompts]
            encode = self.llm.get_tokenizer().encode
            return [encode(text)[-len(prompt) :] for text, prompt in zip(work.texts, work.prompts, strict=True)]

        return [replace(work, prompts=ids(work)) for work in works]


def _tokens_per_step(steps: list[tuple[float, I32]]) -> float:
    """Return the mean number of tokens that a request gets in a step."""
    return sum(len(handles) for _, handles in steps) / max(1, sum(len(np.unique(handles)) for _, handles in steps))


@contextmanager
def watching(
    core: Core,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[list[tuple[float, I32]]]:
    """Watch the steps of `core` inside the `with` block. Yield a list, which gets (time, handles) after each step.

    time      seconds, of `time.perf_counter`
    handles   for each new token of the step, the number (handle) of its request in the engine
    advance   called after each step with the number of its new tokens
    """
    steps: list[tuple[float, I32]] = []
    step = core.step

    def watched() -> StepOutputs:
        outputs = step()
        steps.append((time.perf_counter(), outputs.handles))
        advance(len(outputs.handles))
        return outputs

    core.step = watched  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del core.step  # restores the method


def _inter_token(steps: list[tuple[float, I32]]) -> dict[str, float]:
    """Return percentiles of the times between successive tokens of a request, over all requests."""
    last = np.full(1 + max((int(handles.max()) for _, handles in steps if len(handles)), default=0), np.nan)
    gaps = [np.empty(0)]
    for now, handles in steps:
        handles = np.unique(handles)
        gaps.append(now - last[handles])
        last[handles] = now
    every = np.concatenate(gaps)
    return _percentiles(every[~np.isnan(every)])


def _percentiles(gaps: np.ndarray) -> dict[str, float]:
    """Return p50 and p99 in milliseconds of times in seconds; 0 without times."""
    values = np.percentile(gaps, (50, 99)) if len(gaps) else (0.0, 0.0)
    return {
        f"inter_token_{name}_ms": round(1000 * float(value), 2)
        for name, value in zip(("p50", "p99"), values, strict=True)
    }
