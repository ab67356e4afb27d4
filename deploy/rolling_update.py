#!/usr/bin/env python3
"""Restart the backends of a router one after the other, so that no request is lost.

    rolling_update.py --router http://127.0.0.1:9000 --restart 'ssh {host} systemctl restart quire'

--router is the operators' address (`quire route --admin-port 9000`), once for each router. For each backend:

    drain it at every router -> wait until no request runs there -> restart it -> wait for its /ready -> resume it

The command gets {url}, {host} and {port} of the backend. It must return when the old process has ended, as `systemctl
restart` does. The update drains no backend while no other one takes requests. It stops at the first fault; that backend
stays drained, or is down. To go on, run the same line again with the URLs of this backend and of those that are left:
a backend that is named is restarted although it is drained. Without URLs drained backends are left out, and a line
names them. Needs Python 3.9 or later and nothing else; uses no API key: /ready is open.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

ASK_SECONDS = 15.0  # a router asks all its backends before it answers
LOOK_SECONDS = 0.5


class Fault(Exception):
    """A step that did not succeed."""


def ask(router, path, **body):
    """Return the JSON of an answer of a router's operators' side: GET, or POST with a body."""
    data = json.dumps(body).encode() if body else None
    request = Request(router.rstrip("/") + path, data, {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=ASK_SECONDS) as answer:
            return json.load(answer)
    except HTTPError as error:
        hint = ": is that the address of --admin-port?" if error.code in (401, 403, 404) else ""
        raise Fault(f"{router}{path}: {error}{hint}") from None
    except (OSError, ValueError) as error:
        raise Fault(f"{router}{path}: {error}") from None


def listed(router):
    """Return URL -> state of the backends of a router."""
    return {one["backend"]: one for one in ask(router, "/backends")["backends"]}


def is_ready(url):
    """True when a backend itself says that it takes requests."""
    try:
        with urlopen(f"{url}/ready", timeout=ASK_SECONDS) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def wait(seconds, words, done):
    """Wait until `done()` is true. Raises `Fault` after some seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            raise Fault(f"after {seconds:g} s {words}")
        time.sleep(LOOK_SECONDS)


def chosen(args):
    """Return the URLs of the backends to restart: those that were named, else those that nobody drains."""
    if args.backend:
        return args.backend
    known = listed(args.router[0])
    if skipped := [url for url, one in known.items() if one["draining"]]:
        print(f"left out, because drained: {', '.join(skipped)} (name a URL to restart it, too)", flush=True)
    return [url for url in known if url not in skipped]


def update(url, args):
    """Restart one backend."""
    stays = (
        f"{url} stays drained. To go on, run this again with its URL and those of the backends that are left, "
        f"or send POST /backends/resume with {json.dumps({'backend': url})} to each router"
    )
    for router in args.router:
        known = listed(router)
        others = [one for name, one in known.items() if name != url and one["up"] and not one["draining"]]
        if url not in known:
            raise Fault(f"{router} has no backend {url}")
        if not others:
            drained = [name for name, one in known.items() if name != url and one["draining"]]
            resume = f"; drained: {', '.join(drained)} (name such a URL first, or POST it to /backends/resume)"
            raise Fault(
                f"{router}: no other backend takes requests, so {url} is not drained{resume if drained else ''}"
            )
    for router in args.router:
        ask(router, "/backends/drain", backend=url)
    wait(
        args.drain_seconds,
        f"requests still run at {url}; {stays}",
        lambda: not any(listed(router)[url]["in_flight"] for router in args.router),
    )
    parts = urlsplit(url)
    words = [word.format(url=url, host=parts.hostname, port=parts.port) for word in shlex.split(args.restart)]
    print(f"{url}: {shlex.join(words)}", flush=True)
    if code := subprocess.run(words, check=False).returncode:
        raise Fault(f"the command has ended with {code}; {stays}")
    wait(args.ready_seconds, f"{url}/ready is not 200; {stays}", lambda: is_ready(url))
    for router in args.router:
        if not ask(router, "/backends/resume", backend=url)["up"]:
            raise Fault(f"{router} does not reach {url}")


def main(args=None):
    """Update all backends. Return the exit code: 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", action="append", required=True, metavar="URL")
    parser.add_argument("--restart", required=True, metavar="COMMAND")
    parser.add_argument("--drain-seconds", type=float, default=600, help="for running requests to end (600)")
    parser.add_argument("--ready-seconds", type=float, default=1800, help="for a backend to load its model (1800)")
    parser.add_argument(
        "backend",
        nargs="*",
        help="URLs as the routers list them; default: those of the first router that nobody drains",
    )
    given = parser.parse_args(args)
    try:
        for url in chosen(given):
            update(url, given)
            print(f"{url} serves again", flush=True)
    except Fault as fault:
        print(f"rolling_update: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
