"""The bill of materials: CycloneDX's structure, all that Quire needs, and no hash that is a guess."""

from importlib.metadata import PathDistribution, distributions
from pathlib import Path

import jsonschema
import pytest

import sbom

# What CycloneDX 1.6 demands of the parts that are used here.
COMPONENT = {
    "type": "object", "required": ["type", "name"], "additionalProperties": False,
    "properties": {
        "type": {"enum": ["application", "library"]}, "name": {"type": "string"}, "version": {"type": "string"},
        "bom-ref": {"type": "string", "minLength": 1},
        "purl": {"type": "string", "pattern": r"^pkg:pypi/[^@+]+@[^@+]+$"},
        "hashes": {"type": "array", "items": {
            "type": "object", "required": ["alg", "content"], "additionalProperties": False,
            "properties": {"alg": {"const": "SHA-256"}, "content": {"pattern": "^[a-f0-9]{64}$"}}}},
        "licenses": {"oneOf": [
            {"type": "array", "minItems": 1, "maxItems": 1, "items": {
                "type": "object", "required": ["expression"], "additionalProperties": False,
                "properties": {"expression": {"type": "string"}}}},
            {"type": "array", "minItems": 1, "items": {
                "type": "object", "required": ["license"], "additionalProperties": False,
                "properties": {"license": {"type": "object", "required": ["name"]}}}}]},
    },
}  # fmt: skip
SCHEMA = {
    "type": "object", "required": ["bomFormat", "specVersion"], "additionalProperties": False,
    "properties": {
        "$schema": {"const": "http://cyclonedx.org/schema/bom-1.6.schema.json"}, "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"}, "version": {"type": "integer", "minimum": 1},
        "metadata": {"type": "object", "properties": {"component": COMPONENT}, "additionalProperties": False},
        "components": {"type": "array", "items": COMPONENT, "uniqueItems": True},
        "dependencies": {"type": "array", "uniqueItems": True, "items": {
            "type": "object", "required": ["ref"], "additionalProperties": False,
            "properties": {"ref": {"type": "string"}, "dependsOn": {"type": "array", "uniqueItems": True}}}},
    },
}  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, PathDistribution]:
    """A quire that needs three distributions, of which one is not installed and one only with an extra."""

    def add(name: str, *lines: str, version: str = "1.0", tag: str = "py3-none-any") -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("\n".join([f"Name: {name}", f"Version: {version}", *lines]) + "\n")
        (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")

    add(
        "quire",
        "License-Expression: Apache-2.0",
        "Requires-Dist: One_Part>=1",
        'Requires-Dist: torch; extra == "gpu"',
        "Requires-Dist: absent",
    )
    add("one.part", "Classifier: License :: OSI Approved :: MIT License", "Requires-Dist: compiled")
    add("compiled", "License: BSD\n        and many more lines", "Requires-Dist: quire", tag="cp311-cp311-linux_x86_64")
    add("torch", version="2.13.0+cpu")
    return {sbom.normal(dist.name): dist for dist in distributions(path=[str(tmp_path)])}  # type: ignore[misc]


def test_a_small_environment(installed: dict[str, PathDistribution]) -> None:
    digits = {"one-part": "a", "compiled": "b"}
    text = "".join(f"{name}==1.0 \\\n    --hash=sha256:{digit * 64}\n" for name, digit in digits.items())
    found = sbom.bill(installed, [], sbom.locked_hashes(text))
    jsonschema.validate(found, SCHEMA)
    compiled, part = found["components"]
    assert part["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}] and "hashes" not in compiled
    assert part["licenses"] == [{"license": {"name": "MIT License"}}]
    assert compiled["licenses"] == [{"license": {"name": "BSD"}}]
    assert found["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]
    assert {one["ref"]: one["dependsOn"] for one in found["dependencies"]} == {
        "pkg:pypi/quire@1.0": ["pkg:pypi/one-part@1.0"],
        "pkg:pypi/one-part@1.0": ["pkg:pypi/compiled@1.0"],
        "pkg:pypi/compiled@1.0": ["pkg:pypi/quire@1.0"],
    }


def test_an_extra_and_a_local_version(installed: dict[str, PathDistribution]) -> None:
    found = sbom.bill(installed, ["gpu"], {})
    jsonschema.validate(found, SCHEMA)
    (torch,) = [part for part in found["components"] if part["name"] == "torch"]
    assert torch["version"] == "2.13.0+cpu" and torch["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"


def test_two_hashes_of_a_version_are_none() -> None:
    one, other = "a" * 64, "b" * 64
    text = f"x==1 \\\n    --hash=sha256:{one} \\\n    --hash=sha256:{other}\ny==2 \\\n    --hash=sha256:{one}\n"
    assert sbom.locked_hashes(text) == {("y", "2"): one}


def test_this_environment() -> None:
    here = {sbom.normal(dist.name): dist for dist in distributions()}
    if "quire" not in here:
        pytest.skip("Quire is not installed here")
    found = sbom.bill(here, ["verify"], {})
    jsonschema.validate(found, SCHEMA)
    assert {"torch", "numpy", "transformers"} <= {part["name"] for part in found["components"]}
