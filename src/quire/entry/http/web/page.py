"""The page of the live view: its files, their headers, and the answers to requests for them.

    GET /                     index.html, for clients that accept HTML
    GET /web/{version}/{name} a file; `version` is a digest of all files, so that a browser may keep the file for ever

The files hold no facts of the engine, so they need no API key; the routes that the page asks do. The router serves the
same page.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response
from starlette.types import Scope

from quire.contracts.errors import shown
from quire.entry.http.errors import error_answer

OFF = "this server was started with --no-web: start it without, or ask /metrics and /debug/requests."
STATIC = Path(__file__).with_name("static")
FOLDER = "/web/"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class _File:
    """A file of the page. body: as it is sent."""

    body: bytes
    kind: str
    lasting: bool

    @cached_property
    def packed(self) -> bytes:
        """The body, compressed with gzip. Equal files give equal bytes."""
        return gzip.compress(self.body, 9, mtime=0)

    @cached_property
    def tag(self) -> str:
        """The ETag of the body: a weak one, since it stands for the compressed body, too."""
        return f'W/"{sha256(self.body).hexdigest()[:20]}"'


class Page:
    """The files of the page, read once."""

    def __init__(self, folder: Path = STATIC) -> None:
        bodies = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in KINDS}
        digest = sha256(b"".join(name.encode() + b"\0" + body for name, body in bodies.items()))
        self.version = digest.hexdigest()[:16]
        assets = f"{FOLDER[1:]}{self.version}".encode()  # relative, since a proxy may serve the page below a path
        self._index = _File(bodies.pop("index.html").replace(b"{assets}", assets), KINDS[".html"], lasting=False)
        self._files = {
            f"{FOLDER}{self.version}/{name}": _File(body, KINDS[Path(name).suffix], lasting=True)
            for name, body in bodies.items()
        }

    @property
    def paths(self) -> list[str]:
        """The paths of all files but index.html."""
        return list(self._files)

    @property
    def packed_bytes(self) -> int:
        """Compressed size of all files in bytes."""
        return sum(len(file.packed) for file in (self._index, *self._files.values()))

    def answer(self, path: str, headers: Mapping[str, str]) -> Response | None:
        """Answer a request for `/` or for a file. None: there is no such file.

        headers: of the request, with names in lower case
        """
        file = self._index if path == "/" else self._files.get(path)
        if file is None:
            return None
        common: dict[str, str] = {"etag": file.tag, "cache-control": FOR_EVER if file.lasting else "no-cache", **SAFE}
        common["vary"] = "Accept-Encoding" if file.lasting else "Accept, Accept-Encoding"
        if file.tag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=common)
        common["content-type"] = file.kind
        if "gzip" in headers.get("accept-encoding", ""):
            return Response(file.packed, headers=common | {"content-encoding": "gzip"})
        return Response(file.body, headers=common)


@cache
def the_page() -> Page:
    """Return the page of this package, read when it is first asked for."""
    return Page()


class ServesPage:
    """Function for `auth.Guard`: answers requests for the page, with 404 if it is off; None for all other requests."""

    def __init__(self, *, on: bool = True) -> None:
        self._on = on

    def __call__(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = path.startswith(FOLDER) or (path == "/" and "text/html" in headers.get("accept", ""))
        if not asked or scope["method"] not in ("GET", "HEAD"):
            return None
        if not self._on:
            return error_answer(404, OFF, "web_off")
        found = the_page().answer(path, headers)
        return found or error_answer(404, f"the page has no file {shown(path)}: load / again.", "unknown_path")
