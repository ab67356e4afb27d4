"""Decodes under a load of long prompts: two engines that do both, beside a prefill node and a decode node.

    python tools/measure_apart.py [MODEL] [--devices 0,1] [--rates 1,2,4] [--seconds 60] [--talks 8] [--prompt 8000]
                                  [--long 1024] [--output 256] [--goodput ttft:2000 --goodput tpot:30]
                                  [--device cuda] [--serve "FLAGS"]

MODEL is a name of `quire bench` (dummy weights, no tokenizer), or a folder. Each way has two servers, one per entry of
--devices (CUDA_VISIBLE_DEVICES; the same entry twice: both on one GPU), behind `quire route`: "both" by the requests in
flight; "apart" with prompts of --long tokens or more computed by the first server, and all decodes in the second. On
one machine blocks then go from GPU to GPU. --talks short requests (128 tokens in, --output out) arrive each second, and
--rates long ones (--prompt tokens in, 32 out), as two Poisson processes. Printed by way and rate: time between tokens
of the short requests, times to first tokens, tokens per second, and the requests that kept all bounds of --goodput.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from typing import Any

from measure_router import free_port, started
from quire.bench.serve import LoadRun, Pace, drive, parse_goodput, summarize
from quire.bench.serve_client import Client, Target
from quire.bench.serve_load import RandomLoad
from quire.bench.workload import model_folder, model_names

READY_SECONDS = 600


def main() -> None:
    """Print a line for each way and rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--rates", default="1,2,4")
    parser.add_argument("--ways", default="both,apart")
    parser.add_argument("--goodput", action="append", default=[])
    parser.add_argument("--serve", default="", help="more flags of `quire serve`")
    for name, number in (
        ("--seconds", 60),
        ("--talks", 8),
        ("--prompt", 8_000),
        ("--long", 1_024),
        ("--output", 256),
        ("--host", 30),
    ):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    os.environ.setdefault("QUIRE_CLUSTER_KEY", "of this measurement")
    for way in asked.ways.split(","):
        asyncio.run(measure(way, asked))


async def measure(way: str, asked: argparse.Namespace) -> None:
    """Start the servers of a way, and print its lines."""
    bounds = parse_goodput(asked.goodput or ["ttft:2000", "tpot:30"])
    with contextlib.ExitStack() as stack:
        url = serve(way, asked, stack)
        target = Target(
            base_url=url,
            endpoint="/v1/completions",
            model="measured",
            chat=False,
            headers={},
            extra={"ignore_eos": True, "temperature": 0.0},
        )
        async with Client(target) as client:
            await load(client, 1.0, 3.0, 99, asked)  # connections, and what a server does first
            for seed, rate in enumerate(map(float, asked.rates.split(","))):
                short, long = await load(client, rate, asked.seconds, seed, asked)
                print(line(way, rate, short, long, bounds), flush=True)


def serve(way: str, asked: argparse.Namespace, stack: contextlib.ExitStack) -> str:
    """Start two servers and a router; return the router's address."""
    ports, share, front = [free_port(), free_port()], f"127.0.0.1:{free_port()}", free_port()
    model = [asked.model]
    if asked.model in model_names():
        model = [str(model_folder(asked.model)), "--load-format", "dummy", "--skip-tokenizer-init"]
    flags = ["--device", asked.device, "--served-model-name", "measured", "--kv-offload-gb", str(asked.host)]
    own: list[list[str]] = [[], []]
    if way == "apart":
        kept = ["--kv-offload-policy", "write_through", "--kv-transfer-config"]
        own = [
            [*kept, '{"kv_connector": "QuireConnector", "kv_role": "kv_producer"}', "--kv-share", share],
            [*kept, '{"kv_connector": "QuireConnector", "kv_role": "kv_consumer"}', "--kv-peers", share],
        ]
    for port, device, more in zip(ports, asked.devices.split(","), own, strict=True):
        stack.enter_context(
            started(
                "-m",
                "quire",
                "serve",
                *model,
                *flags,
                "--port",
                str(port),
                *more,
                *asked.serve.split(),
                url=f"http://127.0.0.1:{port}/ready",
                seconds=READY_SECONDS,
                environment={"CUDA_VISIBLE_DEVICES": device},
            )
        )
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    backends = ["--policy", "least-load", "--backend", first, "--backend", second]
    if way == "apart":
        backends = ["--prefill-backend", first, "--prefill-threshold", str(asked.long), "--backend", second]
    url = f"http://127.0.0.1:{front}"
    stack.enter_context(started("-m", "quire", "route", "--port", str(front), *backends, url=f"{url}/ready"))
    return url


async def load(
    client: Client, rate: float, seconds: float, seed: int, asked: argparse.Namespace
) -> tuple[LoadRun, LoadRun]:
    """Send the short and the long requests; return their records."""
    short = RandomLoad(input_len=128, output_len=asked.output).draw(max(1, int(asked.talks * seconds)), seed)
    long = RandomLoad(input_len=asked.prompt, output_len=32).draw(max(1, int(rate * seconds)), seed + 1000)
    runs = await asyncio.gather(
        drive(client, short, Pace(rate=asked.talks, seed=seed)), drive(client, long, Pace(rate=rate, seed=seed + 1))
    )
    return runs[0], runs[1]


def line(way: str, rate: float, short: LoadRun, long: LoadRun, bounds: dict[str, float]) -> str:
    """Return the line of a way at a rate of long requests."""
    found: list[dict[str, Any]] = [summarize(run, [50, 99], bounds) for run in (short, long)]
    counts = [one["completed"] for one in found]
    if failed := sum(one["failed"] for one in found):
        print(f"{failed} requests failed: {[one['said'] or one['errors'] for one in found]}", file=sys.stderr)
    times = max(short.seconds, long.seconds)
    good = sum(one["request_goodput"] * one["duration"] for one in found)
    tokens = sum(one["total_output_tokens"] for one in found) / times
    return (
        f"{way:5} {rate:g} long/s: between tokens median {found[0]['p50_itl_ms']:.1f} ms, p99 "
        f"{found[0]['p99_itl_ms']:.1f}; first tokens p50, p99: short {found[0]['p50_ttft_ms']:.0f}, "
        f"{found[0]['p99_ttft_ms']:.0f}, long {found[1]['p50_ttft_ms']:.0f}, {found[1]['p99_ttft_ms']:.0f}; "
        f"{tokens:.0f} output tokens/s; {good:.0f} of {sum(counts) + failed} kept {bounds}"
    )


if __name__ == "__main__":
    main()
