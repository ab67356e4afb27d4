"""`quire route` in front of two `quire serve`: a backend is killed, an operator drains the other, the router ends."""

import http.client
import json
import os
import signal
import threading

from .serving import MOCK, Answer, running_server, wait_until


def test_a_router_in_front_of_two_servers() -> None:
    with running_server(*MOCK, "--mock-step-ms", "10") as one, running_server(*MOCK) as two:
        flags = ("--backend", one.url, "--backend", two.url, "--policy", "round-robin", "--admin-port", "0")
        with running_server(*flags, command="route") as router:
            assert [router.complete().status for _ in range(4)] == [200] * 4
            broken: list[Answer] = []
            asking = threading.Thread(target=lambda: broken.append(router.complete(max_tokens=4000)))
            asking.start()
            wait_until(lambda: sum(router.metric("quire_router:requests_total").values()) == 5, "the first byte")
            os.killpg(one.process.pid, signal.SIGKILL)
            asking.join()
            error = broken[0].error()
            assert error is not None and error["code"] == "backend_failed"
            assert all(router.complete().error() is None for _ in range(3))
            assert list(router.metric("quire_router:backend_up").values()) == [0.0, 1.0]

            operators = router.stderr.split("listening on ")[2].split()[0].removeprefix("http://")
            connection = http.client.HTTPConnection(operators, timeout=10)
            connection.request(
                "POST", "/backends/drain", json.dumps({"backend": two.url}), {"content-type": "application/json"}
            )
            assert json.load(connection.getresponse())["draining"] is True
            assert router.complete().status == 503 and router.ask("/ready").status == 503
            assert router.ask("/v1/models", None, "GET", host="evil.example").status == 403
            router.signal(signal.SIGTERM)
            assert router.exit_code() == 0 and "SIGTERM: no new requests" in router.stderr
