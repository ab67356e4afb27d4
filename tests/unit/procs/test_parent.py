"""The parameters of a child process arrive whole."""

import math
import os

import msgspec
import pytest

from quire.config.serve import ServerConfig
from quire.procs.front_ends import FrontPlace, FrontStart
from quire.procs.parent import read_start, start_line


def test_a_front_end_receives_its_options_also_a_timeout_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig.from_flat(device="mock", model="m\n", queue_timeout=math.inf)
    start = FrontStart(config=config, place=FrontPlace(number=1, count=2, folder="/tmp/x"), listener=3)
    line = start_line(start)
    assert b"\n" not in line
    reader, writer = os.pipe()
    os.write(writer, line + b"\n")
    os.close(writer)
    with open(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_start(FrontStart, "nothing") == start
    with pytest.raises(msgspec.ValidationError):  # why the line is not JSON
        msgspec.json.decode(msgspec.json.encode(start), type=FrontStart)
