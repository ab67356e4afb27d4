"""The site of docs/: every page is in its navigation, links of files become links of the site, and it can be built."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

import quire
from site_pages import FILES, OUTSIDE, ROOT, deployed, listing, rewritten

from ...support.full import only_full


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose functions of Python are no matter here."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for one in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(one)]


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | {*OUTSIDE.values(), FILES}
    assert sorted(leaves(SITE["nav"])) == sorted(pages)


def test_links_become_those_of_the_site() -> None:
    page = (
        "[a](../README.md#x) [b](server.md) [c](../examples/ask.py) [`ask.py`](../examples/ask.py) [d](https://x.y/z)"
    )
    assert rewritten(page, "docs/a.md") == (
        "[a](project.md#x) [b](server.md) c (`examples/ask.py`) `ask.py` [d](https://x.y/z)"
    )
    page = "[![i](docs/images/i.png)](docs/live.md) [b](CONTRIBUTING.md) [c](#here)"
    assert rewritten(page, "README.md") == "[![i](images/i.png)](live.md) [b](contributing.md) [c](#here)"
    assert rewritten("[a](../../README.md) [b](../trace.md) [c](tour.md)", "docs/zh/a.md") == (
        "[a](../project.md) [b](../trace.md) [c](tour.md)"
    )
    assert rewritten("[a](docs/zh/tour.md) [b](docs/live.md)", "README.zh-CN.md") == "[a](tour.md) [b](../live.md)"


def test_files_of_deploy_are_on_the_site() -> None:
    page = "[a](../deploy/proxies/nginx.conf) [b](../deploy/kubernetes/engine)"
    assert rewritten(page, "docs/a.md") == "[a](deploy/proxies/nginx.conf) [b](files.md#deploykubernetesengine)"
    shown = set(re.findall(r"^- \[.+\]\((.+)\)$", listing(), re.M))
    assert shown == {path.relative_to(ROOT).as_posix() for path in deployed()} > {"deploy/proxies/nginx.conf"}
    assert "\n## deploy/kubernetes/engine\n" in listing()


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    found = []
    for name in named:
        module, _, attribute = name.rpartition(".")
        found.append(getattr(importlib.import_module(module), attribute))
    public = [getattr(quire, name) for name in quire.__all__ if name not in ("__version__", "QuireError")]
    assert {*map(id, found)} == {*map(id, public)}
    assert quire.errors.QuireError is quire.QuireError  # its page is that of the module


@only_full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """pip installs what the extra `docs` names; takes the network."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", tmp_path / "site"]
    subprocess.run([*pip, *wanted], check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "built"]
    path = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "built" / "api.html").read_text()
    assert (tmp_path / "built" / "deploy" / "proxies" / "nginx.conf").is_file()
    assert "StructuredOutputsParams" in reference and "<li><code>prompts</code>: a string" in reference
