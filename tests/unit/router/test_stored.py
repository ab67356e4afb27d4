"""Stored responses behind a router: read, continued, cancelled and deleted at the backend that has made them."""

import asyncio
import json
from typing import Any

import aiohttp

from ...support.mock_backends import MockBackend, mock_backends, operate, routed

KEY = {"authorization": "Bearer k"}


class Keeper:
    """A server that stores responses of the key `k`. `asked`: methods and paths, without those of checks."""

    def __init__(self, backend: MockBackend) -> None:
        self.name, self.kept, self.asked = backend.name, set[str](), list[str]()
        backend.replaced_by = self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], json.loads((await receive())["body"] or b"{}")
        status, name = 200, path.split("/")[3] if path.count("/") > 2 else body.get("previous_response_id")
        if path.startswith("/v1/responses"):
            self.asked.append(f"{scope['method']} {path} {scope['query_string'].decode()}".strip())
            if name and (name not in self.kept or (b"authorization", b"Bearer k") not in scope["headers"]):
                status = 404
            elif scope["method"] == "DELETE":
                self.kept.remove(name)
            elif path == "/v1/responses":
                name = f"resp_{self.name}{len(self.kept)}"
                self.kept.add(name)
        streams = status == 200 and body.get("stream")
        text = f'data: {{"response": {{"id": "{name}"}}}}\n\n' if streams else json.dumps({"id": name, "by": self.name})
        kind = b"text/event-stream" if streams else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": text.encode()})


def test_requests_go_where_the_response_is() -> None:
    async def work() -> None:
        async with mock_backends(3) as backends, aiohttp.ClientSession(headers=KEY) as session:
            keepers = [Keeper(backend) for backend in backends]
            async with routed(backends) as (router, url), routed(backends) as (_, other):

                async def ask(method: str, path: str = "", where: str = url, **body: Any) -> tuple[int, Any]:
                    async with session.request(method, f"{where}/v1/responses{path}", json=body) as answer:
                        text = (await answer.text()).removeprefix("data: ")
                        return answer.status, json.loads(text)

                def count() -> int:
                    return sum(len(keeper.asked) for keeper in keepers)

                names = [(await ask("POST", background=True, stream=streams))[1] for streams in (False, True, False)]
                names = [name.get("response", name)["id"] for name in names]
                assert names == ["resp_b00", "resp_b10", "resp_b20"], "in turn"
                for number, name in enumerate(names):
                    before = count()
                    assert await ask("GET", f"/{name}") == (200, {"id": name, "by": f"b{number}"})
                    assert (await ask("POST", f"/{name}/cancel"))[1]["by"] == f"b{number}"
                    assert (await ask("POST", previous_response_id=name))[1]["by"] == f"b{number}"
                    assert count() == before + 3, "the router remembers"
                before = count()
                for _ in range(2):
                    assert (await ask("GET", f"/{names[2]}?stream=true&starting_after=3", other))[1]["by"] == "b2"
                assert count() == before + 5, "another router asks each backend once"
                assert keepers[2].asked[-1] == f"GET /v1/responses/{names[2]} stream=true&starting_after=3"
                assert (await ask("GET", "/resp_unknown"))[0] == 404
                assert (await ask("POST", previous_response_id="resp_unknown"))[0] == 404

                await operate(router, "/backends/drain", {"backend": backends[0].url})
                assert (await ask("GET", f"/{names[0]}"))[0] == 200
                status, refused = await ask("POST", previous_response_id=names[0])
                assert status == 503 and "that has stored the response takes no" in refused["error"]["message"]
                assert (await ask("DELETE", f"/{names[0]}"))[0] == 200 and names[0] not in keepers[0].kept
                assert (await ask("GET", f"/{names[0]}"))[0] == 404

    asyncio.run(asyncio.wait_for(work(), 60))


def test_another_key_finds_nothing() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends) as (_, url):
            keeper = [Keeper(backend) for backend in backends][1]
            keeper.kept.add("resp_1")
            for key, status in (("other", 404), ("k", 200), ("other", 404)):
                headers = {"authorization": f"Bearer {key}"}
                async with aiohttp.ClientSession(headers=headers) as session:
                    async with session.get(f"{url}/v1/responses/resp_1") as answer:
                        assert answer.status == status, key

    asyncio.run(asyncio.wait_for(work(), 60))
