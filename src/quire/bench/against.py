"""Comparison of a measurement with a stored one, for `quire bench --against FILE`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from quire.contracts.errors import ConfigError

LEAST = 0.95  # of the stored speed: a slower run fails the comparison
SAME = ("requests", "input_tokens", "output_tokens")  # of two runs that can be compared


class Comparison(NamedTuple):
    """Seconds of a workload, or of a start-up: `stored` in the --against file, and measured in this run (`now`)."""

    name: str
    stored: float
    now: float

    @property
    def ratio(self) -> float:
        """Speed now divided by the stored speed; above 1: faster now."""
        return self.stored / self.now

    @property
    def slower(self) -> bool:
        """True if the speed now is less than `LEAST` (0.95) times the stored speed."""
        return self.ratio < LEAST


def read_stored(path: Path) -> dict[str, Any]:
    """Read a result file that `--out` wrote. Raises `ConfigError` for any other file."""
    try:
        stored = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--against {path}: {error.strerror}: give a file that --out wrote.") from None
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or "model" not in stored or not stored.keys() & {"runs", "totals"}:
        raise ConfigError(
            f"--against {path} is not a result of `quire bench latency|throughput|startup`: give a file "
            "that --out wrote."
        )
    return stored


def compare_results(result: dict[str, Any], stored: dict[str, Any]) -> list[Comparison]:
    """Return a `Comparison` of the fastest runs, for each workload that both results have.

    Raises `ConfigError` for results of different models or devices, and if no workload of equal size is in both.
    """
    for key in ("model", "device"):
        if result.get(key) != stored.get(key):
            raise ConfigError(
                f"--against: the stored result is of {key} {stored.get(key)!r}, and this one of "
                f"{result.get(key)!r}: compare results of the same {key}."
            )
    before, now = _seconds(stored), _seconds(result)
    found = [Comparison(str(key[0]), before[key], seconds) for key, seconds in now.items() if key in before]
    if not found:
        raise ConfigError(
            "--against: no workload of the stored result was measured with the same number of requests "
            "and tokens: give the flags of the stored run (--only, --scale, --max-len)."
        )
    return found


def _seconds(result: dict[str, Any]) -> dict[tuple[Any, ...], float]:
    """Seconds by workload and its size; a start has one entry."""
    if "totals" in result:
        return {("start",): min(result["totals"])}
    return {(row["workload"], *(row[key] for key in SAME)): row["seconds"] for row in result["runs"]}
