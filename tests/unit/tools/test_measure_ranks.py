"""The measurement of several ranks: launch lines that Quire takes, the peer's options, and processes that are ended."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from measure_ranks import EPLB, LINES, Results, folder_of, peer_options, read_cells, run
from quire.args.checkpoint import parse_checkpoint_config, read_raw_config
from quire.contracts.parallel import Parallel
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, met

from ...support.many_ranks import is_stopped, until


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_line_divides_its_model(ranks: int, tmp_path: Path) -> None:
    for line in (*LINES.values(), EPLB):
        words = line.flags.format(n=ranks).split()
        size = {"tp": ranks} if words[0] == "-tp" else {"dp": ranks}
        for dry in (False, True):
            args = parse_checkpoint_config(read_raw_config(folder_of(line.model, dry, tmp_path)))
            check(met(Inputs(args=args, parallel=Parallel(**size, experts="-ep" in words))))
            assert (args.moe is not None) == line.experts


def test_the_peers_options() -> None:
    assert peer_options("-tp 8".split()) == (1, {"tensor_parallel_size": 8})
    assert peer_options("-dp 8 -ep --max-num-seqs 256".split()) == (
        8,
        {"enable_expert_parallel": True, "max_num_seqs": 256},
    )


def test_results_are_appended(tmp_path: Path) -> None:
    runs = [
        {"workload": name, "seconds": 2.0, "output_tokens_per_s": 3.0, "total_tokens_per_s": 5.0}
        for name in ("decode_b64", "prefill_4k")
    ]
    (tmp_path / "result").write_text(json.dumps({"import_s": 1.0, "construct_s": 6.5, "runs": runs}))
    asked = argparse.Namespace(ranks=4, dry=False)
    for _ in range(2):
        for row in read_cells(tmp_path / "result"):
            Results(tmp_path, asked).add("8b-tp", row)
    rows = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert [(row["cell"], row["tok/s"], row.get("start-up s")) for row in rows] == [
        ("decode_b64", 3.0, 7.5),
        ("prefill_4k", 5.0, None),
    ] * 2
    assert len((tmp_path / "ranks.md").read_text().splitlines()) == 4


def test_a_process_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    forks = f"import os, time; os.fork(); open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    assert run([sys.executable, "-c", forks], argparse.Namespace(limit=1.0)) == "stopped after 1.0 s: no output"
    both = [int(pid) for pid in pids.read_text().split()]
    assert len(both) == 2
    until(lambda: all(map(is_stopped, both)), lambda: f"of {both} one is left", 10)
    assert run([sys.executable, "-c", "raise SystemExit('no room')"], argparse.Namespace(limit=20)) == (
        "exit code 1: no room"
    )
