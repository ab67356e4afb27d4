"""Measures an engine of several ranks, beside vLLM: exchanges by size, launch lines, balancing. Results are appended.

    python tools/measure_ranks.py --list
    python tools/measure_ranks.py --ranks 8 sums rows v3-tp [--engines quire,vllm] [--limit 540] [--out FOLDER]
    python tools/measure_ranks.py --ranks 2 --dry         every part on CPUs with tiny models, to see that it runs

Parts: `sums` and `rows` (see `measure_exchange.py`), launch lines by name, and `eplb`: tokens per second under
Zipf's law without balancing, then in rounds with --enable-eplb and 32 redundant experts, with the balancedness after
each. A part runs in processes of its own for at most --limit seconds; what has been measured until then stays. Each
number is a JSON line in FOLDER/ranks.jsonl and a row in FOLDER/ranks.md. vLLM has to lie in the folder --vllm.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.workload import Workload, fastest_run, load_workloads, model_folder

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A launch line; {n} stands for the number of ranks."""

    model: str
    flags: str
    experts: bool = False


FEW = "--max-num-batched-tokens 2048 --max-num-seqs 256"  # leaves room for the KV cache beside DeepSeek's weights
LINES = {
    "8b-tp": Line("qwen3-8b", "-tp {n}"),
    "30b-tp": Line("qwen3-30b-a3b", "-tp {n}", True),
    "30b-dp": Line("qwen3-30b-a3b", "-dp {n} -ep", True),
    "lite-dp": Line("deepseek-v2-lite", "-dp {n} -ep", True),
    "70b-tp": Line("llama-3.3-70b", "-tp {n}"),
    "lite-tp": Line("deepseek-v2-lite", "-tp {n}", True),
    "lite-dcp": Line("deepseek-v2-lite", "-tp {n} -dcp {n}", True),
    "v3-tp": Line("deepseek-v3", "-tp {n}", True),
    "v3-dcp": Line("deepseek-v3", "-tp {n} -dcp {n}", True),
    "v3-dp": Line("deepseek-v3", f"-dp {{n}} -ep {FEW}", True),
}
EPLB = Line("deepseek-v3", f"-dp {{n}} -ep {FEW}", True)
REDUNDANT, ROUNDS = 32, 6
PEER_NAMES = {
    "-tp": "tensor_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-num-seqs": "max_num_seqs",
}
# No NVLink multicast: neither engine needs it, and on shared hosts it can put GPUs out of service.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
UNIFORM = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
TINY = {  # of a dry run: sizes that 8 ranks divide, also in blocks of 128
    "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "num_experts": 16, "n_routed_experts": 16,
    "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128,
}  # fmt: skip


class Results:
    """The two files of results."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.table, self._asked = folder / "ranks.jsonl", folder / "ranks.md", asked

    def add(self, part: str, row: Row) -> None:
        """Append a row to both files, and print it."""
        row = {
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "part": part,
            "ranks": self._asked.ranks,
            "dry": self._asked.dry,
        } | row
        cells = [f"{name} {value}" for name, value in row.items() if name not in ("when", "part", "ranks", "dry")]
        line = f"| {row['when']}{' dry' * row['dry']} | {part} x {row['ranks']} | {' | '.join(cells)} |"
        for path, text in ((self.lines, json.dumps(row)), (self.table, line)):
            with path.open("a") as file:
                file.write(text + "\n")
        print(line, flush=True)


def run(command: list[str], asked: argparse.Namespace, **environment: str) -> str:
    """Run a command to its end, or for `limit` seconds. Return why it failed, or ""."""
    print("+", shlex.join(command), flush=True)
    paths = [str(HERE.parent / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | ENVIRONMENT | environment
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(asked.limit)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"stopped after {asked.limit} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        text = said.read()
    if why:
        print(text[-3000:], flush=True)
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        return f"{why}: {last.strip()[:300]}"
    return ""


def folder_of(model: str, dry: bool, folder: Path) -> Path:
    """Return the folder of a configuration; that of a tiny model with the same keys in a dry run."""
    if not dry:
        return model_folder(model)
    raw = json.loads((model_folder(model) / "config.json").read_text())
    made = folder / model
    made.mkdir(exist_ok=True)
    tiny = {name: size for name, size in TINY.items() if raw.get(name) is not None}
    (made / "config.json").write_text(json.dumps(raw | tiny))
    return made


def exchanges(what: str, asked: argparse.Namespace, results: Results) -> None:
    """Measure sums or the experts' exchange of rows by size."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        small = ["--device", "cpu", "--sizes", "4096,1048576", "--bounds", "1,64"] if asked.dry else []
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.ranks)]
        why = run(
            [
                sys.executable,
                *launch,
                str(HERE / "measure_exchange.py"),
                "--what",
                what,
                "--hidden",
                str(asked.hidden),
                "--out",
                str(out),
                *small,
            ],
            asked,
        )
        for line in out.read_text().splitlines() if out.exists() else ():
            row = json.loads(line)
            results.add(row.pop("part"), row)
    if why:
        results.add(what, {"failed": why})


def serve(name: str, engine: str, asked: argparse.Namespace, results: Results) -> None:
    """Measure the cells of a launch line with an engine: start-up, and tokens per second of each cell."""
    line = LINES[name]
    flags = line.flags.format(n=asked.ranks).split()
    with tempfile.TemporaryDirectory() as folder:
        out, model = Path(folder) / "result.json", folder_of(line.model, asked.dry, Path(folder))
        cells = ["--only", asked.cells, "--repeat", str(asked.repeat), "--out", str(out)]
        cells += ["--scale", "0.05", "--max-len", "8"] if asked.dry else []
        if engine == "quire":
            fixed = [
                "--load-format",
                "dummy",
                "--skip-tokenizer-init",
                "--dtype",
                "bfloat16",
                "--device",
                "cpu" if asked.dry else "cuda",
                "--max-model-len",
                "64" if asked.dry else "8192",
            ]
            fixed += ["--routing", "uniform"] if line.experts else []
            fixed += ["--num-threads", "1", "--kv-cache-memory-bytes", "8M"] if asked.dry else []
            why = run([sys.executable, "-m", "quire", "bench", "throughput", str(model), *fixed, *flags, *cells], asked)
        else:
            replicas, options = peer_options(flags)
            options |= {"dtype": "bfloat16", "max_model_len": 8192}
            command = [str(HERE / "peer" / "run_vllm.py"), str(model), *cells, "--replicas", str(replicas)]
            why = run(
                [sys.executable, *command, "--engine-args", json.dumps(options)],
                asked,
                **UNIFORM if line.experts else {},
                PYTHONPATH=f"{asked.vllm}{os.pathsep}{HERE.parent / 'src'}",
            )
        for row in read_cells(out):
            results.add(name, {"engine": engine} | row)
    if why:
        results.add(name, {"engine": engine, "failed": why})


def peer_options(flags: list[str]) -> tuple[int, Row]:
    """Return the number of replicas, and vLLM's options for Quire's flags."""
    pairs = list(zip(flags, [*flags[1:], ""], strict=True))
    options = {PEER_NAMES[flag]: int(value) if value.isdigit() else True for flag, value in pairs if flag in PEER_NAMES}
    return next((int(value) for flag, value in pairs if flag == "-dp"), 1), options


def read_cells(out: Path) -> Iterator[Row]:
    """Yield a row for each cell of a result file, if there is one."""
    if not out.exists():
        return
    result = json.loads(out.read_text())
    for number, one in enumerate(result["runs"]):
        total = "total_" * one["workload"].startswith("prefill")
        row = {"cell": one["workload"], "tok/s": one[f"{total or 'output_'}tokens_per_s"], "seconds": one["seconds"]}
        row |= {"p50 ms": one["inter_token_p50_ms"]} if "inter_token_p50_ms" in one else {}
        yield row | ({} if number else {"start-up s": round(result["import_s"] + result["construct_s"], 1)})


def eplb(asked: argparse.Namespace, results: Results) -> None:
    """Measure decoding under Zipf's law, without balancing and with it, each in a process of its own."""
    for balanced in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            out, model = Path(folder) / "rows", folder_of(EPLB.model, asked.dry, Path(folder))
            task = {"model": str(model), "balanced": balanced, "ranks": asked.ranks, "dry": asked.dry, "out": str(out)}
            why = run([sys.executable, str(HERE / "measure_ranks.py"), "--task", json.dumps(task)], asked)
            for line in out.read_text().splitlines() if out.exists() else ():
                results.add("eplb", json.loads(line))
        if why:
            results.add("eplb", {"balanced": balanced, "failed": why})


def rounds(task: Row) -> None:
    """Decode in rounds with one engine; append a row for each round."""
    from quire import LLM, SamplingParams

    dry, redundant = task["dry"], 8 if task["dry"] else REDUNDANT
    options: Row = {
        "load_format": "dummy",
        "routing": "zipf",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "data_parallel_size": task["ranks"],
        "enable_expert_parallel": True,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "device": "cuda",
    }
    if dry:
        options |= {"device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}
    if task["balanced"]:
        settings = {"num_redundant_experts": redundant, "step_interval": 32 if dry else 128, "window_size": 32}
        options |= {"enable_eplb": True, "eplb_config": settings}
    with LLM(task["model"], **options) as llm:
        core, seen, step = llm.engine.core, [0.0], llm.engine.core.step

        def watched() -> Any:
            outputs = step()
            seen.append(outputs.stats.balancedness)
            return outputs

        core.step = watched  # type: ignore[method-assign]
        work = eplb_work(task["ranks"], dry, core.facts.vocab_size)
        for number in range(ROUNDS if task["balanced"] else 2):
            row = fastest_run(llm, SamplingParams, work, 1)
            found = {"balanced": task["balanced"], "round": number, "tok/s": row["output_tokens_per_s"]}
            if task["balanced"]:  # the first look is at the experts as they were at the start
                looks = [one for one in seen if one]
                found |= {
                    "redundant": redundant,
                    "balancedness at first": round(looks[0], 3) if looks else "",
                    "balancedness": round(seen[-1], 3),
                }
            with open(task["out"], "a") as file:
                file.write(json.dumps(found) + "\n")


def eplb_work(ranks: int, dry: bool, vocabulary: int) -> Workload:
    """Return the requests of a round: 128 for each rank with 256 tokens out, few in a dry run."""
    (work,) = load_workloads(["decode_b64"], 0.1 if dry else 2 * ranks, 24 if dry else None)
    prompts = [[one % vocabulary for one in prompt] for prompt in work.prompts]
    return Workload(name="zipf", prompts=prompts, outputs=work.outputs)


def main() -> None:
    """Measure the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--engines", default="quire", help="quire, vllm or both")
    parser.add_argument("--cells", default="latency_b1,decode_b64,decode_b256,prefill_4k")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=7168, help="columns of the rows that are exchanged")
    parser.add_argument("--limit", type=float, default=540, help="seconds of a process")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--vllm", default="", help="folder with the unpacked vLLM")
    parser.add_argument("--dry", action="store_true", help="on CPUs, with tiny models")
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    parts = {
        "sums": "",
        "rows": "",
        **{name: f"{one.model} {one.flags}" for name, one in LINES.items()},
        "eplb": f"{EPLB.model} {EPLB.flags}",
    }
    if asked.list:
        print("\n".join(f"{name:8s} {words.format(n=asked.ranks)}" for name, words in parts.items()))
        return
    if asked.task:
        rounds(json.loads(asked.task))
        return
    if unknown := set(asked.parts) - set(parts):
        sys.exit(f"{sorted(unknown)[0]}: no such part; there are {', '.join(parts)}.")
    results = Results(asked.out, asked)
    for name in asked.parts or parts:
        if name in ("sums", "rows"):
            exchanges(name, asked, results)
        elif name == "eplb":
            eplb(asked, results)
        else:
            for engine in asked.engines.split(","):
                serve(name, engine, asked, results)


if __name__ == "__main__":
    main()
