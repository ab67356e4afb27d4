"""Workloads through `LLM`: how long batches take (throughput), and how long one answer takes (latency)."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from quire import __version__
from quire.bench.target import printable, resolve_target
from quire.bench.workload import Workload, fastest_run, load_workloads
from quire.contracts.errors import ConfigError
from quire.contracts.sampling import OutputKind, SamplingParams

LATENCY_WORKLOAD = "latency_b1"


def choose_workloads(names: Sequence[str], scale: float, max_len: int | None) -> list[Workload]:
    """The workloads of that name (all without names); raises `ConfigError` for an unknown one."""
    try:
        return list(load_workloads(names, scale, max_len))
    except ValueError as error:
        raise ConfigError(str(error)) from None


class OfflineBench:
    """One `LLM` and the result record that its runs fill; the format is the same for every engine compared."""

    def __init__(self, options: dict[str, Any]) -> None:
        name, given = resolve_target(options)
        start = time.perf_counter()
        from quire.entry.llm import LLM

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
        """Run each workload `repeat` times; yields the row of the fastest run. The prefix cache is emptied between."""
        works = self._fitting(works)
        for work in works:
            row = fastest_run(self.llm, SamplingParams, work, repeat)
            self.result["runs"].append(row)
            yield row

    def latency(self, works: Sequence[Workload], repeat: int) -> Iterator[dict[str, Any]]:
        """The first request of each workload alone, as a stream: the row of the fastest run, with first-token and
        inter-token times in milliseconds."""
        for work in self._fitting(works):
            one = Workload(name=work.name, prompts=work.prompts[:1], outputs=work.outputs[:1])
            row = min((self._stream(one) for _ in range(repeat)), key=lambda row: float(row["seconds"]))
            self.result["runs"].append(row)
            yield row

    def _stream(self, work: Workload) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=work.outputs[0], ignore_eos=True, detokenize=False,
                                output_kind=OutputKind.DELTA)
        self.llm.reset_prefix_cache()
        start = time.perf_counter()
        times, produced = [], 0
        for piece in self.llm.stream({"prompt_token_ids": work.prompts[0]}, params):
            produced += len(piece.outputs[0].token_ids)
            times.append(time.perf_counter() - start)
        gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False)) or [0.0]
        return work.summary(times[-1], produced) | {
            "first_token_ms": round(1000 * times[0], 2),
            "inter_token_p50_ms": round(1000 * gaps[len(gaps) // 2], 2),
            "inter_token_p99_ms": round(1000 * gaps[len(gaps) * 99 // 100], 2),
        }

    def _fitting(self, works: Sequence[Workload]) -> list[Workload]:
        """Workloads with ids that the model has; raises `ConfigError` before anything runs when one is too long."""
        facts = self.llm.engine.core.facts
        for work in works:
            longest = max(len(p) + n for p, n in zip(work.prompts, work.outputs, strict=True))
            if longest > facts.max_model_len:
                raise ConfigError(f"{work.name} needs a context of {longest} tokens, this engine has "
                                  f"{facts.max_model_len}: choose others with --only, shorten them with --max-len, or "
                                  "raise --max-model-len.")
        size = facts.vocab_size
        return [Workload(name=w.name, prompts=[[i % size for i in prompt] for prompt in w.prompts], outputs=w.outputs)
                for w in works]
