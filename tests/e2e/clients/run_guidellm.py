"""A short benchmark with guidellm: every request of it succeeds, and is counted as the server counts it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scenario import MODEL, Facts, main


def run(facts: Facts, texts: dict[str, str], route: str, **fields: Any) -> None:
    """Benchmark one route with two streams: every request must succeed, with these answers to these prompts."""
    rows = [{"prompt": prompt} for prompt in texts for _ in range(3)]
    (facts.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = {
        "kind": "openai_http",
        "target": facts.url,
        "model": MODEL,
        "request_format": route,
        "extras": {"body": {"temperature": 0} | fields},
    }
    options = {
        "backend": json.dumps(backend),
        "profile": "kind=concurrent,streams=2",
        "data": "kind=json_file,path=prompts.jsonl",
        "constraint": f"kind=max_requests,count={len(rows)}",
        "output": "kind=json,path=guidellm.json",
    }
    program = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    ended = subprocess.run(
        [*program, *(part for name, value in options.items() for part in (f"--{name}", value))],
        cwd=facts.folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (benchmark,) = json.loads((facts.folder / "guidellm.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": len(rows), "errored": 0, "incomplete": 0, "total": len(rows)}, totals
    requests = benchmark["requests"]["successful"]
    assert sorted(one["output"] for one in requests) == sorted(texts[row["prompt"]] for row in rows)
    assert all(one["prompt_tokens"] > 0 and one["output_tokens"] > 0 for one in requests)


def chats(facts: Facts) -> None:
    run(facts, facts.chats, "/v1/chat/completions", max_tokens=60)


def completions(facts: Facts) -> None:
    run(facts, facts.texts, "/v1/completions", max_tokens=24)


def responses(facts: Facts) -> None:
    run(facts, facts.chats, "/v1/responses", max_output_tokens=60)


main("guidellm", chats, completions, responses)
