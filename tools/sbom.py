"""Prints a software bill of materials: Quire and all that it needs here, as CycloneDX 1.6 in JSON.

    python tools/sbom.py [EXTRA ...] > sbom.json     in the environment in which Quire is installed; an EXTRA is a name
                                                     of pyproject.toml's, such as bench

Names, versions, licences and dependencies are those of the installed distributions. A hash is that of the file that was
installed, where it is known: pip noted it, or requirements.lock has it and the version is one wheel for all platforms.
Nothing is guessed, and the same environment gives the same text: there is neither a time nor a serial number in it.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = (ROOT / "requirements.lock", ROOT / "requirements-torch.lock")
ENTRY = re.compile(r"^([\w.-]+)==([\w.!]+)((?: *\\\n +--hash=sha256:\w+)+)", re.MULTILINE)
EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def normal(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(dist: Distribution, extras: Iterable[str] = ()) -> list[str]:
    """Names of what a distribution requires, with the given extras. Markers of platforms are not judged."""
    found = set()
    for line in dist.requires or ():
        wanted, name = EXTRA.search(line), re.match(r"[\w.-]+", line)
        if name and (wanted is None or wanted[1] in extras):
            found.add(normal(name[0]))
    return sorted(found)


def closure(installed: Mapping[str, Distribution], root: str, extras: Iterable[str]) -> dict[str, list[str]]:
    """Name -> what it requires and is installed, for the root and all that it needs."""
    graph: dict[str, list[str]] = {}
    waiting = [(root, tuple(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if name not in graph:
            graph[name] = [one for one in requirements(installed[name], wanted) if one in installed]
            waiting += [(one, ()) for one in graph[name]]
    return dict(sorted(graph.items()))


def locked_hashes(text: str) -> dict[tuple[str, str], str]:
    """(name, version) -> the hash, of entries of lock files that have one only."""
    found = {(name, version): re.findall(r"sha256:(\w+)", hashes) for name, version, hashes in ENTRY.findall(text)}
    return {key: hashes[0] for key, hashes in found.items() if len(hashes) == 1}


def component(dist: Distribution, locked: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """A distribution as a component of CycloneDX."""
    name, version = normal(dist.name), dist.version
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    direct = json.loads(dist.read_text("direct_url.json") or "{}").get("archive_info", {})
    everywhere = re.search(r"^Tag: \S+-none-any$", dist.read_text("WHEEL") or "", re.MULTILINE)
    digest = direct.get("hashes", {}).get("sha256") or (locked.get((name, version)) if everywhere else None)
    if digest:
        found["hashes"] = [{"alg": "SHA-256", "content": digest}]
    if licences := licence(dist):
        found["licenses"] = licences
    return found


def licence(dist: Distribution) -> list[dict[str, Any]]:
    """The licence as an SPDX expression where the distribution names one, else by the name that it gives; or none."""
    meta = dist.metadata
    if expression := meta.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in meta.get_all("Classifier") or ()
        if line.startswith("License :: ") and line.count(" :: ") > 1
    ]
    text = (meta.get("License") or "").strip().splitlines()
    named = classifiers or [line for line in text[:1] if line != "UNKNOWN"]
    return [{"license": {"name": name}} for name in named]


def bill(installed: Mapping[str, Distribution], extras: Iterable[str], locked: Mapping[tuple[str, str], str]) -> Any:
    """The document, as JSON's values."""
    graph = closure(installed, "quire", extras)
    parts = {name: component(installed[name], locked) for name in graph}
    refs = {name: part["bom-ref"] for name, part in parts.items()}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": parts.pop("quire") | {"type": "application"}},
        "components": list(parts.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": [refs[one] for one in needs]} for name, needs in graph.items()
        ],
    }


if __name__ == "__main__":
    here = {normal(dist.name): dist for dist in distributions()}
    if "quire" not in here:
        sys.exit("Quire is not installed here: run this with the python of the environment that has it.")
    known = locked_hashes("".join(path.read_text() for path in LOCKS if path.is_file()))
    print(json.dumps(bill(here, sys.argv[1:], known), indent=2))
