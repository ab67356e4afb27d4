"""The Responses API of `quire serve`, as the `openai` package sees it, in both major versions."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .scenarios import OPENAI, run_scenarios
from .serving import running_server

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "2048", "--kv-cache-memory-bytes", "48M")
KEYS = ("sk-one", "sk-two")


@pytest.fixture(scope="module")
def facts_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running server, and a file that says where it is."""
    with running_server(*FLAGS, "--api-key", *KEYS) as server:
        path = tmp_path_factory.mktemp("responses") / "facts.json"
        path.write_text(json.dumps({"url": server.url, "keys": KEYS}))
        yield path
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize("version", OPENAI)
def test_every_scenario_with_a_major_version_of_the_client(facts_file: Path, version: str) -> None:
    run_scenarios("openai_responses.py", facts_file, version, OPENAI[version])
