"""The Responses API of `quire serve`, as the `openai` package sees it, in both major versions."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .openai_responses import SCENARIOS
from .serving import PATIENCE, running_server
from .test_clients import FOLDERS

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "2048", "--kv-cache-memory-bytes", "48M")
KEYS = ("sk-one", "sk-two")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running server, and a file that says where it is."""
    with running_server(*FLAGS, "--api-key", *KEYS) as server:
        path = tmp_path_factory.mktemp("responses") / "facts.json"
        path.write_text(json.dumps({"url": server.url, "keys": KEYS}))
        yield path
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize("major", FOLDERS)
def test_every_scenario_with_a_major_version_of_the_client(facts: Path, major: int) -> None:
    folder = FOLDERS[major]
    if folder is not None and not folder.is_dir():
        pytest.skip(f"openai {major}.x is not in {folder}; scripts/test puts it there")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment["PYTHONPATH"] = str(folder or "")
    program = Path(__file__).with_name("openai_responses.py")
    run = subprocess.run([sys.executable, str(program), str(facts)], env=environment, capture_output=True, text=True,
                         timeout=PATIENCE)
    version, *done = run.stdout.splitlines() or ["nothing"]
    assert run.returncode == 0, f"{version}, after {done}:\n{run.stderr}"
    assert version.startswith(f"openai {major}.") and len(done) == len(SCENARIOS)
