"""No variable of the machine that runs the tests is an option of theirs."""

import pytest

from quire.config import env


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what Quire would read."""
    for name in list(env.os.environ):
        if name.startswith(("QUIRE_", "VLLM_")) or name in ("HF_TOKEN", "OPENAI_API_KEY"):
            monkeypatch.delenv(name)
