"""`quire bench serve`: a load on any OpenAI-compatible server. Its flags are in `bench_serve.txt`."""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.flags import FlagParser, add_flag_table
from quire.contracts.errors import ConfigError
from quire.entry.cli.table import format_table, write_json
from quire.entry.exit_codes import DONE, FAILED, INTERRUPTED
from quire.observe.progress import Progress

if TYPE_CHECKING:
    from quire.bench.serve import Run
    from quire.bench.serve_client import Client, Target
    from quire.bench.serve_load import Ask

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire bench serve`."""
    add_flag_table(parser, Path(__file__).with_suffix(".txt"))


def run(args: argparse.Namespace) -> int:
    """Send requests to a server and print its speed. Exit code 1 when every request failed, 130 after Ctrl-C."""
    import asyncio  # here, so that other commands do not pay for the import

    from quire.bench.serve import parse_goodput, remarks, summarize
    from quire.bench.serve_client import Client

    percentiles = _numbers(args.metric_percentiles)
    goodput = parse_goodput(args.goodput)
    names = _latency_names(args.percentile_metrics)
    asks, warmups = _load(args)
    client = Client(_target(args))
    done, model = asyncio.run(_drive(args, client, asks, warmups))
    result = _settings(args, model) | summarize(done, percentiles, goodput)
    if args.save_result or args.out is not None:
        print(f"quire: note: the result is in {_save(args, result)}", file=sys.stderr)
    if args.json:
        print(json.dumps(result, indent=1))
    if result["failed"] and not result["completed"]:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in result["errors"].items())
        said = f": {' '.join(result['said'])}" if result["said"] else "."
        print(f"quire: error: no request was answered, {kinds}{said}", file=sys.stderr)
        return INTERRUPTED if done.interrupted else FAILED
    if not args.json:
        print(_report(result, names, percentiles))
    for line in remarks(result, asks):
        print(f"quire: note: {line}", file=sys.stderr)
    if done.interrupted:
        return INTERRUPTED
    return DONE if result["completed"] else FAILED


async def _drive(
    args: argparse.Namespace, client: "Client", asks: "list[Ask]", warmups: "list[Ask]"
) -> "tuple[Run, str]":
    from dataclasses import replace

    from quire.bench.serve import Pace, drive

    async with client:
        if not args.model:
            client.target = replace(client.target, model=await client.first_model())
        await drive(client, warmups, Pace(max_concurrency=args.max_concurrency))
        pace = Pace(
            rate=args.request_rate, burstiness=args.burstiness, max_concurrency=args.max_concurrency, seed=args.seed
        )
        shown = not args.disable_tqdm
        with Progress("Requests", len(asks), enabled=shown, unit="requests") as progress:
            return await drive(client, asks, pace, lambda: progress.advance(1)), client.target.model


def _load(args: argparse.Namespace) -> "tuple[list[Ask], list[Ask]]":
    """Return the requests to measure, and others of the same kind for the warm-up."""
    from quire.bench.serve_load import RandomLoad, read_load

    for name in ("num_prompts", "random_input_len", "random_output_len", "request_rate", "burstiness", "timeout"):
        if not vars(args)[name] > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {vars(args)[name]}: must be above 0.")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {args.max_concurrency}: must be at least 1.")
    count, chat, name = args.num_prompts, _is_chat(args), args.dataset_name
    if name == "random":
        ratios = _ratios(args.random_range_ratio)
        load = RandomLoad(
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            as_text=chat,
            input_ratio=ratios[0],
            output_ratio=ratios[1],
            prefix_len=args.random_prefix_len,
        )
        drawn = load.draw(count + args.num_warmups, args.seed)
    else:
        path = args.dataset_path if name == "custom" else Path(name)
        if path is None or not path.is_file():
            raise ConfigError(f"--dataset-name {name}: must be random, custom with --dataset-path FILE, or a file.")
        drawn = read_load(path, args.random_output_len, count + args.num_warmups, chat=chat)
    return drawn[:count], drawn[count:]


def _is_chat(args: argparse.Namespace) -> bool:
    return "chat" in args.endpoint if args.endpoint else bool(args.backend == "openai-chat")


def _target(args: argparse.Namespace) -> "Target":
    from quire.bench.serve_client import Target

    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {base}: must begin with http:// or https://.")
    endpoint = args.endpoint or ("chat" if _is_chat(args) else "completions")
    headers = dict(pair.partition("=")[::2] for pair in args.header)
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    extra = dict(args.extra_body)
    if args.ignore_eos:
        extra["ignore_eos"] = True
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    return Target(
        base_url=base,
        endpoint=PATHS.get(endpoint, "/" + endpoint.lstrip("/")),
        model=args.model or "",
        chat=_is_chat(args),
        headers=headers,
        extra=extra,
        timeout=args.timeout,
        insecure=args.insecure,
    )


def _ratios(text: str) -> tuple[float, float]:
    try:
        value = json.loads(text)
        pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        ratios = (float(pair[0]), float(pair[1]))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'--random-range-ratio {text}: must be a number or {{"input": X, "output": Y}}.') from None
    if not all(0.0 <= ratio < 1.0 for ratio in ratios):
        raise ConfigError(f"--random-range-ratio {text}: must be in [0, 1).")
    return ratios


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--metric-percentiles {text}: must be numbers such as 90,99.") from None
    if not all(0.0 <= number <= 100.0 for number in numbers):
        raise ConfigError(f"--metric-percentiles {text}: must be between 0 and 100.")
    return numbers


def _latency_names(text: str) -> list[str]:
    from quire.bench.serve import LATENCIES

    names = [{"e2e": "e2el"}.get(name, name) for name in text.split(",")]
    if unknown := set(names) - set(LATENCIES):
        raise ConfigError(f"--percentile-metrics {sorted(unknown)[0]}: no such latency: use {', '.join(LATENCIES)}.")
    return names


def _settings(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the settings of the measurement for the result, without keys and headers."""
    rate = "inf" if math.isinf(args.request_rate) else args.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
    }


def _save(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Write the result to a file. Return its path."""
    name = args.result_filename or (
        f"{args.backend}-{result['request_rate']}qps-{Path(result['model_id']).name}-{result['date']}.json"
    )
    path: Path = args.out or args.result_dir / name
    write_json(path, result)
    return path


def _report(result: dict[str, Any], names: list[str], percentiles: list[float]) -> str:
    shown = {
        "requests completed": result["completed"],
        "requests failed": result["failed"],
        "duration, s": result["duration"],
        "input tokens": result["total_input_tokens"],
        "output tokens": result["total_output_tokens"],
        "requests/s": result["request_throughput"],
        "output tokens/s": result["output_throughput"],
        "total tokens/s": result["total_token_throughput"],
    }
    if "request_goodput" in result:
        bounds = " ".join(f"{name}:{bound:g}" for name, bound in result["goodput_bounds_ms"].items())
        shown[f"goodput, requests/s ({bounds} ms)"] = result["request_goodput"]
    shown["client CPU, us per event"] = result["client_cpu_us_per_event"]
    shown["client CPU, share of a core"] = result["client_cpu_share"]
    shown |= {f"error: {kind}": count for kind, count in result["errors"].items()}
    columns = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
    rows = [[f"{name.upper()}, ms", *(_cell(result[f"{column}_{name}_ms"]) for column in columns)] for name in names]
    head = f"{result['model_id']}{', interrupted' if result['interrupted'] else ''}"
    return "\n\n".join((head, format_table(("", "value"), list(shown.items())), format_table(("", *columns), rows)))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
