"""The attacks reach a server, and what a server without limits would do is seen in their figures."""

import json
import sys

import pytest

import measure_attacks

from ...support.full import only_full


@only_full
def test_no_path_is_served_and_many_headers_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "path tricks", "100,000 headers", "compression", "--seconds", "1", "--json"])
    measure_attacks.main()
    headers, bombs, paths = json.loads(capsys.readouterr().out)
    assert set(headers["answers"].split(":")[0].split()) == {"431"}
    assert set(bombs["answers"].split(":")[0].split()) == {"415"}
    assert {one.split(":")[0] for one in paths["answers"].split(", ")} <= {"400", "401", "404"}
    assert all(row["requests"] and row["sent"] for row in (headers, bombs, paths))


def test_every_attack_can_be_made() -> None:
    """But for the largest bodies, which take a second each."""
    for name, (made, factor) in measure_attacks.ATTACKS.items():
        if "JSON" not in name and "bombs" not in name:
            assert callable(made()) and factor >= 1
    assert measure_attacks.request("/x", b"ab", "k").endswith(b"Content-Length: 2\r\n\r\nab")
