"""CUDA streams that only write down what is asked of them, for tests of what waits for what."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class FakeStream:
    """`log` is what all of them were asked."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        """Later launches on this stream wait for the launches on `other`."""
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        """The host waits for the launches on this stream."""
        self.log.append(f"the host waits for {self.name}")


def fake_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStream, list[str]]:
    """A stream "side" beside the current one, "main", and what will be asked of both; who enters another is in it."""
    log: list[str] = []

    @contextmanager
    def stream(given: FakeStream) -> Iterator[None]:
        log.append(f"in {given.name}")
        try:
            yield
        finally:
            log.append(f"out of {given.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("main", log))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return FakeStream("side", log), log
