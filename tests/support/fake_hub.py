"""A hub of models on 127.0.0.1 for tests: the routes that huggingface_hub asks, and a count of what was sent."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/]+)")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class FakeHub:
    """Repositories by id, each a folder.

    gated   ids that answer 403 for their files;  sent  (file, bytes) of every body of a file, in order
    closed  answer 401 to everything
    """

    repos: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    closed: bool = False
    sent: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    def weight_bytes(self) -> int:
        """Bytes that were sent of weights, headers included."""
        return sum(count for name, count in self.sent if name.endswith((".safetensors", ".bin")))


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers while the context is open."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        found = API.fullmatch(path) or FILE.fullmatch(path)
        if self.hub.closed:
            return self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        folder = self.hub.repos.get(found["repo"]) if found else None
        if found is None or folder is None:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        if found["revision"] not in ("main", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if "file" not in found.groupdict():
            return self._send(200, {}, self._about(found["repo"], found["what"], folder))
        if found["repo"] in self.hub.gated:
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        if not (file := folder / found["file"]).is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        self._send_file(file, body)

    def _about(self, repo: str, what: str, folder: Path) -> bytes:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if what == "revision":
            siblings = [{"rfilename": file.name} for file in files]
            return json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}).encode()
        return json.dumps(
            [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)} for file in files]
        ).encode()

    def _send_file(self, file: Path, body: bool) -> None:
        data, status = file.read_bytes(), 200
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            first, last, size = int(asked[1]), int(asked[2] or len(data) - 1), len(data)
            data, status = data[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{size}"
        if body:
            self.hub.sent.append((file.name, len(data)))
        self._send(status, headers, data, body=body)

    def _send(self, status: int, headers: dict[str, str], data: bytes = b"", *, body: bool = True) -> None:
        self.send_response(status)
        for name, text in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, text)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
