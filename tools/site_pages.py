"""Hooks of mkdocs (see mkdocs.yml): pages of the project's folder become pages of the site, and links follow them.

`docs/` is read on its own, too, so its links are those of files: `../CONTRIBUTING.md`. On the site these pages lie
beside the others, and a link to another file of the project becomes its name.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "project.md",
    "README.zh-CN.md": "zh/project.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
IMAGE = re.compile(r"(?<=!)\[([^][]*)\]\((?!\w+:)([^)#\s]+)()\)")
LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")  # an image may be its words


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the project's folder to the files of the site."""
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the links of a page those of the site."""
    uri = page.file.src_uri
    return rewritten(markdown, next((name for name, site in OUTSIDE.items() if site == uri), f"docs/{uri}"))


def rewritten(markdown: str, name: str) -> str:
    """Return a page with links of the site. name: its path in the project."""
    here = posixpath.dirname(OUTSIDE.get(name, name.removeprefix("docs/")))

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found.group(1), found.group(2), found.group(3) or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if target in OUTSIDE or target.startswith("docs/"):
            site = OUTSIDE.get(target, target.removeprefix("docs/"))
            return f"[{words}]({posixpath.relpath(site, here or '.')}{anchor})"
        return words if target.rpartition("/")[2] in words else f"{words} (`{target}`)"

    return LINK.sub(link, IMAGE.sub(link, markdown))
