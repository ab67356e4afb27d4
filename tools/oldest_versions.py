"""The oldest versions that pyproject.toml allows, as constraints of pip's: for `scripts/test --oldest`."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)")


def constraints(project: dict[str, Any]) -> Iterator[str]:
    """A line for each dependency of the package and of `quire verify`. Raises ValueError for one without a bound."""
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["verify"]):
        if not (found := REQUIREMENT.match(requirement)):
            raise ValueError(f"{requirement} names no oldest version")
        yield "{}=={}".format(*found.groups())


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(PROJECT.read_text())["project"])))
