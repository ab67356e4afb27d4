"""schemathesis reads /openapi.json and sends requests that fit it, and requests that do not, to the server.

All of its checks are on. It reads a copy of the document in which no list has to be tried at a length of more than 100:
a request of 262,145 token ids, which the real bound asks for, has it hold gigabytes, and other tests send such bodies.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from scenario import Facts, main

MOST = 100
SETTINGS = """\
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "409", "429", "529"]
"""


def bounded(node: Any) -> Any:
    """The same without large bounds on lengths."""
    if isinstance(node, dict):
        large = {name for name in ("maxItems", "maxLength", "maxProperties") if node.get(name, 0) > MOST}
        return {name: bounded(value) for name, value in node.items() if name not in large}
    return [bounded(value) for value in node] if isinstance(node, list) else node


def tested(facts: Facts, url: str, *options: str) -> None:
    """A run that must find nothing, on every path."""
    with urllib.request.urlopen(urllib.request.Request(url + "/openapi.json", headers=key(facts))) as answer:
        document = bounded(json.load(answer))
    (facts.folder / "openapi.json").write_text(json.dumps(document))
    (facts.folder / "schemathesis.toml").write_text(SETTINGS)
    header = [part for name, value in key(facts).items() for part in ("--header", f"{name}: {value}")]
    program = Path(sys.executable).with_name("st")
    run = subprocess.run(
        [
            str(program),
            "--config-file",
            "schemathesis.toml",
            "run",
            "openapi.json",
            "--url",
            url,
            "--checks",
            "all",
            "--seed",
            "1",
            "--no-shrink",
            "--continue-on-failure",
            *header,
            *options,
        ],
        cwd=facts.folder,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
    count = sum(len(operations) for operations in document["paths"].values())
    assert f"Tested: {count}\n" in run.stdout, run.stdout


def key(facts: Facts) -> dict[str, str]:
    return {"Authorization": f"Bearer {facts.key}"}


def every_way(facts: Facts) -> None:
    """Of a server with a key and without a model: it answers at once, also where thousands of tokens are asked for."""
    tested(facts, facts.keyed_url, "--phases", "coverage,fuzzing,stateful", "--max-examples", "20")


def with_a_model(facts: Facts) -> None:
    tested(facts, facts.url, "--phases", "fuzzing,stateful", "--max-examples", "3")


main("schemathesis", every_way, with_a_model)
