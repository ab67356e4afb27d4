"""Hooks of mkdocs (see mkdocs.yml): pages of the project's folder become pages of the site, and links follow them.

`docs/` is read on its own, too, so its links are those of files: `../CONTRIBUTING.md`. On the site these pages lie
beside the others, the files of deploy/ are copied, and a link to another file of the project becomes its name.
"""

import io
import posixpath
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "project.md",
    "README.zh-CN.md": "zh/project.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
FILES, ARCHIVE = "files.md", "deploy.tar.gz"  # the page that lists the files of deploy/; all of them
HEAD = f"""# Files of deploy/

What they are, and which of them were run, is in [deploying.md](deploying.md). All of them: [{ARCHIVE}]({ARCHIVE}).
"""
IMAGE = re.compile(r"(?<=!)\[([^][]*)\]\((?!\w+:)([^)#\s]+)()\)")
LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")  # an image may be its words


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the project's folder to the files of the site."""
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for path in deployed():
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_bytes()))
    files.append(File.generated(config, ARCHIVE, content=archive()))
    files.append(File.generated(config, FILES, content=listing()))
    return files


def deployed() -> list[Path]:
    """Return the files of deploy/, folder by folder."""
    found = [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(found, key=lambda path: (path.parent, path.name))


def listing() -> str:
    """Return the page that links the files of deploy/, with a heading for each folder."""

    def lines() -> Iterator[str]:
        folder = ""
        for path in deployed():
            name = path.relative_to(ROOT).as_posix()
            if folder != (folder := posixpath.dirname(name)):
                yield f"\n## {folder}\n"
            yield f"- [{path.name}]({name})"

    return HEAD + "\n".join(lines()) + "\n"


def archive() -> bytes:
    """Return the files of deploy/ in one archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as file:
        for path in deployed():
            file.add(path, path.relative_to(ROOT).as_posix())
    return made.getvalue()


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
        if target.startswith("deploy/"):
            folder = (ROOT / target).is_dir()
            site = f"{FILES}#{target.replace('/', '')}" if folder else target
            return f"[{words}]({posixpath.relpath(site, here or '.')})"
        return words if target.rpartition("/")[2] in words else f"{words} (`{target}`)"

    return LINK.sub(link, IMAGE.sub(link, markdown))
