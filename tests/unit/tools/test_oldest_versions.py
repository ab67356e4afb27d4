"""The oldest versions: one for each dependency, and a requirement without one is an error."""

import tomllib

import pytest

import oldest_versions


def test_every_dependency_has_an_oldest_version() -> None:
    project = tomllib.loads(oldest_versions.PROJECT.read_text())["project"]
    lines = list(oldest_versions.constraints(project))
    wanted = (*project["dependencies"], *project["optional-dependencies"]["verify"])
    assert len(lines) == len(wanted) and any(line.startswith("torch==2.") for line in lines)
    assert not [line for line in lines if "<" in line or "," in line or ";" in line]


def test_a_requirement_without_one() -> None:
    project = {"dependencies": ["numpy>=1.26,<3", "rich"], "optional-dependencies": {"verify": []}}
    with pytest.raises(ValueError, match="rich names no oldest version"):
        list(oldest_versions.constraints(project))
