"""The way into the code, README.md and CONTRIBUTING.md, names files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "docs/README.md", "docs/add-a-model.md"),
    *("docs/questions.md", "docs/coming-from-vllm.md", "docs/add-a-platform.md"),
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert links and [link for link in links if not (folder / link).exists()] == []


def test_the_files_of_the_way_exist() -> None:
    text, missing, folder = (ROOT / "CONTRIBUTING.md").read_text(), [], ""
    for name in re.findall(r"`([\w/<>]+\.py)`", text):
        folder = name.rpartition("/")[0] or folder
        file = name if "/" in name else f"{folder}/{name}"
        if "<" not in file and not any((ROOT / top / file).exists() for top in ("src/quire", "")):
            missing.append(name)
    missing = [name for name in missing if not name.startswith(("entrypoints/", "model_executor/"))]
    assert not missing, (
        f"CONTRIBUTING.md names files that do not exist: {missing}. A name without a folder is in the "
        "folder of the name before it; names are below src/quire, or below the project."
    )


def test_the_tree_has_every_room() -> None:
    rooms = {path.name for path in (ROOT / "src" / "quire").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert set(re.findall(r"`src/quire/(\w+)/`", (ROOT / "README.md").read_text())) == rooms


@pytest.mark.parametrize("page", ["docs/log.md", "docs/log_archive.md"])
def test_the_index_of_the_log_names_every_entry(page: str) -> None:
    """An anchor is its heading in lower case, with hyphens for spaces and nothing for other signs."""
    text = (ROOT / page).read_text()
    headings = re.findall(r"^## (\d.+)$", text, re.M)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    entries = zip(headings, anchors, strict=True)
    lines = [f"  - {heading[5:10]} [{heading[13:]}](#{anchor})" for heading, anchor in entries]
    index = text.split("\n## ")[1].splitlines()
    assert [line for line in lines if line not in index] == []
    assert [line for line in index if line.startswith("  - ") and line not in lines] == []
