"""The page of the live view: headers, caching, size, access, and files that fit a strict content security policy."""

import gzip
import re
import tomllib
from pathlib import Path

import pytest

import rules
from quire.config.serve import AccessConfig, HttpConfig, ServerConfig
from quire.entry.http.app import build_app
from quire.entry.http.life.state import EngineState
from quire.entry.http.web.page import KINDS, POLICY, STATIC, the_page
from quire.observe.metrics import Metrics

from .conftest import Answer, FakeEngine, call

HTML = "text/html,application/xhtml+xml,*/*;q=0.8"
OPEN = ServerConfig()
FILES = sorted(STATIC.iterdir())
MOST_PACKED = 300 * 1024  # bytes


def ask(engine: FakeEngine, path: str, method: str = "GET", config: ServerConfig = OPEN, **headers: str) -> Answer:
    return call(build_app(engine, config, Metrics()), path, method, **headers)


def test_every_file_is_answered_under_a_strict_policy(engine: FakeEngine) -> None:
    paths = ["/", *the_page().paths]
    assert len(paths) == len(FILES) > 10
    for path in paths:
        answer = ask(engine, path, accept=HTML)
        assert answer.status == 200, path
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    rules_of = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert "unsafe" not in POLICY and rules_of["default-src"] == rules_of["frame-ancestors"] == "'none'"
    assert rules_of["script-src"] == rules_of["style-src"] == rules_of["connect-src"] == "'self'"


def test_files_are_kept_and_the_page_is_asked_for_again(engine: FakeEngine) -> None:
    page = ask(engine, "/", accept=HTML)
    assert page.headers["cache-control"] == "no-cache" and "Accept" in page.headers["vary"]
    assert b"{assets}" not in page.body
    for path in re.findall(r'(?:src|href)="(web/[^"]+)"', page.body.decode()):
        assert "immutable" in ask(engine, f"/{path}").headers["cache-control"], path
    again = ask(engine, "/", accept=HTML, if_none_match=page.headers["etag"])
    assert (again.status, again.body) == (304, b"") and "content-security-policy" in again.headers
    assert ask(engine, "/", accept=HTML, if_none_match='"other"').status == 200


def test_files_are_compressed_for_clients_that_take_it(engine: FakeEngine) -> None:
    path = next(path for path in the_page().paths if path.endswith("main.js"))
    plain, packed = ask(engine, path), ask(engine, path, accept_encoding="br, gzip")
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body == (STATIC / "main.js").read_bytes()
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"


def test_the_page_is_small() -> None:
    assert the_page().packed_bytes <= MOST_PACKED


def test_clients_that_accept_no_html_get_json(engine: FakeEngine) -> None:
    assert ask(engine, "/", accept="*/*").json()["name"] == "Quire"
    assert ask(engine, "/").headers["content-type"] == "application/json"
    assert ask(engine, "/", "POST", accept=HTML).status == 405


def test_the_page_needs_no_key_and_tells_nothing(engine: FakeEngine) -> None:
    locked = ServerConfig(access=AccessConfig(api_key=("sk-secret",)))
    page = ask(engine, "/", config=locked, accept=HTML)
    assert page.status == 200 and page.body == ask(engine, "/", accept=HTML).body
    assert all(ask(engine, path, config=locked).status == 200 for path in the_page().paths)
    for path in ("/v1/models", "/debug/plan", "/debug/live", "/debug/requests", "/webx", "/"):
        assert ask(engine, path, config=locked).status == 401, path


def test_the_page_comes_while_the_engine_starts(engine: FakeEngine) -> None:
    engine.state = EngineState.STARTING
    assert ask(engine, "/", accept=HTML).status == 200
    assert ask(engine, the_page().paths[0]).status == 200


def test_no_web_takes_the_page_away(engine: FakeEngine) -> None:
    off = ServerConfig(http=HttpConfig(web=False))
    for path in ("/", *the_page().paths):
        answer = ask(engine, path, config=off, accept=HTML)
        assert answer.status == 404 and answer.json()["error"]["code"] == "web_off", path
    assert ask(engine, "/", config=off).json()["name"] == "Quire"


@pytest.mark.parametrize("path", ["/web/", "/web/0/main.js", "/web/../server.py", "/web/%2e%2e/page.py"])
def test_other_names_are_no_files(engine: FakeEngine, path: str) -> None:
    assert ask(engine, path).json()["error"]["code"] == "unknown_path"


def test_foreign_hosts_get_no_page(engine: FakeEngine) -> None:
    assert ask(engine, "/", accept=HTML, host="attacker.example").status == 403


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_ask_no_other_origin_and_hold_no_inline_code(path: Path) -> None:
    text = path.read_text()
    addresses = set(re.findall(r"""(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]+[^\s"'`)]*""", text, re.IGNORECASE))
    assert addresses <= {"http://www.w3.org/2000/svg"}, addresses  # a name of XML, which nobody loads
    assert path.suffix in KINDS
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", text, re.IGNORECASE)
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"""setAttribute\(\s*["']style|\bstyle:\s*["'`]""", text)
        for name in re.findall(r"""from ["']\./([^"']+)["']""", text):
            assert (STATIC / name).is_file(), name


def test_the_package_carries_the_files() -> None:
    data = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["quire"]
    package = rules.PACKAGE
    carried = {found for pattern in data for found in package.glob(pattern)}
    assert set(FILES) <= carried
