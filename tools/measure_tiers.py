"""Time to the first token of long prompts: computed, and from the tiers of the KV cache; decodes beside loads.

    python tools/measure_tiers.py [MODEL] [--device cuda] [--prompt 32000] [--blocks 640] [--gb 40] [--folder DIR]
                                  [--loads 6] [--decodes 64] [--peer]

MODEL is a name of `quire bench`, with dummy weights. The device holds --blocks blocks of 128 tokens, less than the four
prompts that come in turn, so each evicts the others. --folder: also new engines that find the blocks in files, in the
system's page cache and dropped from it. Before the latter the files are read twice, dropped each time, and once from
the page cache: a second read as fast as memory did not come from the disk.
--peer: instead, from another process on the same GPU, which has the prompts on the device: by each transport.
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.bench.workload import model_folder
from quire.contracts.step import Tier
from quire.engine.replicas import flush
from quire.kvnet import block_peers, block_share

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
DRAW = random.Random(1)


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    for name, number in (("--prompt", 32000), ("--blocks", 640), ("--gb", 40), ("--loads", 6), ("--decodes", 64)):
        parser.add_argument(name, type=int, default=number)
    asked = parser.parse_args()
    if asked.share:
        share(asked)
        return
    if asked.peer:
        from_peer(asked)
        return
    with engine(asked, kv_offload_policy="write_through") as llm:
        prompts = [random_prompt(llm, asked.prompt) for _ in range(4)]
        for say in ("computed", "again"):
            for prompt in prompts:
                first_token(llm, prompt, say, Tier.HOST)
        first_token(llm, prompts[-1], "on the device", Tier.HOST)
        decodes_beside_loads(llm, prompts, asked)
    if asked.folder:
        for say in ("computed", "from files, in a new engine", "from files, dropped from the page cache"):
            if "dropped" in say:
                files_read(asked.folder)
            with engine(asked, kv_offload_policy="write_through", kv_offload_dir=asked.folder) as llm:
                for prompt in prompts[:2]:
                    first_token(llm, prompt, say, Tier.DISK)
                flush(llm.engine.core)


def engine(asked: argparse.Namespace, **options: Any) -> LLM:
    """Return an engine with a small cache on the device and tiers below it."""
    return LLM(
        str(model_folder(asked.model)),
        load_format="dummy",
        dtype="bfloat16",
        device=asked.device,
        block_size=128,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=max(asked.prompt, 640) + 128,
        num_gpu_blocks_override=asked.blocks,
        max_num_seqs=128,
        kv_offload_gb=asked.gb,
        **options,
    )


def files_read(folder: str) -> None:
    """Print how fast eight threads read at most 4 GB of the files under `folder`, and drop all from the page cache."""
    for words in ("dropped from the page cache", "dropped again", "in the page cache"):
        if "dropped" in words:
            _drop(folder)
        paths, total = [], 0
        for path in _files(folder):
            if total < 4e9:
                paths.append(path)
                total += path.stat().st_size
        start = time.perf_counter()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(_read, paths))
        seconds = time.perf_counter() - start
        print(f"{total / 1e9:.2f} GB of files, {words}: {total / seconds / 1e9:.2f} GB/s", flush=True)
    _drop(folder)


def _drop(folder: str) -> None:
    os.sync()  # a page that waits to be written is not dropped
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def random_prompt(llm: LLM, length: int) -> list[int]:
    """Return random tokens."""
    return [DRAW.randrange(llm.engine.args.vocab_size) for _ in range(length)]


def first_token(llm: LLM, prompt: list[int], say: str, tier: Tier) -> None:
    """Print the time of a request of one token, and the rate of its loads from `tier`."""
    before, start = llm.engine.core.state().stats.tiers[tier], time.perf_counter()
    output = llm.generate(prompt, ONE, use_tqdm=False)[0]
    seconds, after = time.perf_counter() - start, llm.engine.core.state().stats.tiers[tier]
    loaded, took = after.loaded_bytes - before.loaded_bytes, after.loaded_seconds - before.loaded_seconds
    rate = f", {loaded / 1e9:.2f} GB from {tier} at {loaded / took / 1e9:.1f} GB/s" if took else ""
    print(f"{say}: {1000 * seconds:.1f} ms, {output.num_cached_tokens} tokens cached{rate}", flush=True)


def share(asked: argparse.Namespace) -> None:
    """Compute two prompts and share their blocks, until standard input ends."""
    with engine(asked, kv_offload_policy="write_through", kv_share=asked.share) as llm:
        llm.generate([random_prompt(llm, asked.prompt) for _ in range(2)], ONE, use_tqdm=False)
        flush(llm.engine.core)
        print("shared", file=sys.stderr, flush=True)
        sys.stdin.read()


def from_peer(asked: argparse.Namespace) -> None:
    """Print the times of two prompts whose blocks another process on this GPU has, by each transport.

    The first prompt of a transport also opens its connection, and maps memory.
    """
    os.environ.setdefault("QUIRE_CLUSTER_KEY", "of this measurement")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    mappable, near = block_peers.mappable, block_share.BlockLine.near
    with subprocess.Popen(
        [sys.executable, *sys.argv, "--share", place],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as sharer:
        assert sharer.stdin is not None and sharer.stderr is not None
        try:
            for line in sharer.stderr:
                sys.stderr.write(line)
                if line == "shared\n":
                    break
            else:
                raise SystemExit("the other process has ended")
            prompts: list[list[int]] = []
            ways = (("CUDA IPC", Tier.CUDA_IPC), ("shared memory", Tier.PEER), ("TCP", Tier.PEER))
            for say, tier in ways[asked.device != "cuda" :]:
                block_peers.mappable = mappable if say == "CUDA IPC" else lambda memories: False
                block_share.BlockLine.near = False if say == "TCP" else near
                with engine(asked, kv_peers=(place,)) as llm:
                    prompts = prompts or [random_prompt(llm, asked.prompt) for _ in range(4)]
                    for prompt in prompts[2:]:
                        first_token(llm, prompt, "computed", tier)
                    known = next(one for one in llm.engine.core.scheduler.roster.store._below if one.tier == tier)
                    until = time.monotonic() + 60
                    while len(known._peers[0].keys) < 2 * (asked.prompt // 128) and time.monotonic() < until:
                        time.sleep(0.01)
                    for prompt in prompts[:2]:
                        first_token(llm, prompt, f"by {say}", tier)
        finally:
            sharer.stdin.close()


def decodes_beside_loads(llm: LLM, prompts: list[list[int]], asked: argparse.Namespace) -> None:
    """Print the seconds of decoding, from the last first token to the last end: alone, and beside other requests.

    The others come from host memory; or, for comparison, are all one prompt whose blocks are on the device.
    """
    short = [random_prompt(llm, 256) for _ in range(asked.decodes)]
    params = [SamplingParams(max_tokens=384, temperature=0.0, ignore_eos=True)] * len(short)
    llm.generate(short, params, use_tqdm=False)
    alone = _seconds(llm.generate(short, params, use_tqdm=False))
    for say, count in (("on the device", 1), ("in host memory", 3)):
        llm.generate(prompts[0], ONE, use_tqdm=False)
        others = [prompts[i % count] for i in range(asked.loads)]
        outputs = llm.generate(short + others, params + [ONE] * len(others), use_tqdm=False)
        beside = _seconds(outputs[: len(short)])
        cached = {one.num_cached_tokens for one in outputs[len(short) :]}
        print(
            f"{len(short)} decodes: {alone:.3f} s, beside {len(others)} prompts {say} {beside:.3f} s "
            f"({alone / beside:.3f}); tokens cached {cached}",
            flush=True,
        )


def _seconds(outputs: list[RequestOutput]) -> float:
    times = [one.metrics for one in outputs if one.metrics is not None]
    return max(one.finished_time or 0.0 for one in times) - max(one.first_token_time or 0.0 for one in times)


if __name__ == "__main__":
    main()
