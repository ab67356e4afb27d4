"""A tour of the page of `quire serve` in headless Chromium: it uses every view, and fails where the page does.

    python tools/page_tour.py [--images docs/images] [--axe axe.min.js] [--chromium PATH]

Starts a server with the bundled model and one with the mock device. Asserted: no request leaves the origin, no error on
the console, no violation of the content security policy, hostile output is text, no serious finding of axe-core (the
npm package axe-core has the file). `--images` writes the pictures of docs/live.md.
"""

import argparse
import base64
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from chromium import Tab, find_chromium, opened_tab

START_TIMEOUT = 120.0
STREAMS = 50
LOOK = 25.0  # seconds for which the live view is watched before its picture
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'
MODEL = ("--max-num-seqs", "40", "--num-blocks", "1400", "--kv-offload-gb", "0.02", "-sc", DRAFTS)
MOCK = ("--device", "mock", "--mock-step-ms", "20", "--max-num-seqs", "40")
KEY = "sk-tour"  # of the server with the mock device; other servers take every key
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
SIZE = (1120, 720)  # pixels of the window
SERIOUS = ("serious", "critical")
LARGEST_PICTURE = 150_000  # bytes
PAINT = "first-contentful-paint"
FIRST_PAINT = 500.0  # ms
HOSTILE = '<img src=x onerror=alert(1)><script>alert(2)</script>\u202eabc\u202c &amp; "quoted"'
LONG = 1_000_000  # characters without a space
ANSWER = "document.querySelector('.lane .turn:last-child')"
IDLE = "document.querySelector('button.stop').disabled"
FRAMES = """new Promise((done) => {
  const begun = performance.now();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
})"""
AXE = "axe.run().then((found) => found.violations.map((one) => [one.impact, one.id, one.nodes[0].html]))"


def one(selector: str) -> str:
    """Return a JavaScript expression for the first element of a CSS selector."""
    return f"document.querySelector({json.dumps(selector)})"


def named(selector: str, words: str) -> str:
    """Return a JavaScript expression for the element of a CSS selector whose text begins with some words."""
    return f"{every(selector)}.find((one) => one.textContent.startsWith({json.dumps(words)}))"


def with_option(value: str) -> str:
    """Return a JavaScript expression for the list in the settings that has an option of this value."""
    return one(f'.settings select:has([value="{value}"])')


def every(selector: str) -> str:
    """Return a JavaScript expression for the list of all elements of a CSS selector."""
    return f"[...document.querySelectorAll({json.dumps(selector)})]"


@contextmanager
def served(*flags: str, command: str = "serve") -> Iterator[str]:
    """Start a server or a router, wait until it is ready, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        words = [sys.executable, "-m", "quire", command, "--port", str(port), *flags]
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            wait_ready(port, process)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def wait_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers /ready with 200."""
    ends = time.monotonic() + START_TIMEOUT
    while time.monotonic() < ends and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise SystemExit("the server did not become ready.")


@contextmanager
def streams(url: str, number: int) -> Iterator[None]:
    """Keep completions running against a server: prompts of several lengths, most with a shared beginning."""
    stop = threading.Event()

    def ask(place: int) -> None:
        while not stop.is_set():
            words = ("Shared beginning of many prompts. " * 14 if place % 4 else "") + f"Note {place}: " * (
                8 + place * 5 % 70
            )
            body = {"prompt": words, "max_tokens": 200 + place * 37 % 500, "ignore_eos": True, "stream": True}
            connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port or 80, timeout=120)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
                answer = connection.getresponse()
                while answer.read(4096) and not stop.is_set():
                    pass
            except OSError:
                return
            finally:
                connection.close()

    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


class Tour:
    """The tour of one server in one tab.

    images   folder for pictures; None: no pictures
    axe      text of axe-core; "": the page is not looked at by it
    """

    def __init__(self, tab: Tab, url: str, images: Path | None = None, axe: str = "") -> None:
        self.tab, self.url, self._images, self._axe = tab, url, images, axe

    def start(self, key: str = "") -> float:
        """Load the page, and return milliseconds to its first paint. key: the API key that it asks for."""
        self.tab.size(*SIZE)
        paints = []
        for _ in range(3):
            self.tab.open(self.url)
            self.tab.until(f"performance.getEntriesByName('{PAINT}').length && {one('#prompt')}")
            paints.append(self.tab.look(f"performance.getEntriesByName('{PAINT}')[0].startTime"))
        told(f"first paint after {min(paints):.0f} ms (of three loads)")
        if key:
            self.tab.until("document.getElementById('key-dialog').open")
            self.look_with_axe("the question for a key")
            self.tab.write(one("#key-input"), key)
            self.tab.press("Enter")
        self.tab.until(one(".lane-settings option"))
        self.look_with_axe("talk")
        return float(min(paints))

    def view(self, name: str) -> None:
        """Choose a tab of the page."""
        self.tab.click(one(f"#tab-{name}"))
        self.tab.until(f"document.getElementById('tab-{name}').getAttribute('aria-selected') === 'true'")

    def number(self, selector: str) -> int:
        """Return the number of elements of a CSS selector."""
        found: int = self.tab.look(f"{every(selector)}.length")
        return found

    def ask(self, prompt: str) -> None:
        """Send a prompt, and wait for the end of the answer."""
        turns = self.number(".lane .turn")
        self.tab.write(one("#prompt"), prompt)
        self.tab.press("Enter")
        self.tab.until(f"{every('.lane .turn')}.length > {turns} && {IDLE} && {ANSWER}.querySelector('.foot button')")
        assert not self.tab.look(f"{ANSWER}.querySelector('.error')?.textContent ?? ''")

    def late_refusal(self, key: str) -> None:
        """A refusal of a key that was replaced meanwhile does not ask for a key again."""
        api = "import(document.querySelector('script').src.replace('main.js', 'api.js'))"
        late = f"{api}.then(({{send, setKey}}) => {{ setKey('old'); const asked = send('v1/models'); setKey('{key}');"
        assert self.tab.look(f"{late} return asked.catch((error) => error.status); }})") == 401
        assert not self.tab.look("document.getElementById('key-dialog').open")

    def refused(self) -> None:
        """A request that is refused gives its text back, and stays out of the conversation and of the export."""
        tab, words = self.tab, "A request that is refused"
        tab.look(f"{one('.lane-settings input')}.value = '999999999'")
        tab.write(one("#prompt"), words)
        tab.press("Enter")
        tab.until(f"{every('.turn.failed')}.length === 2 && {ANSWER}.querySelector('.error').textContent && {IDLE}")
        assert tab.look(f"{one('#prompt')}.value") == words
        tab.click(named(".composer button", "Export"))
        assert all(
            text.count(words) == 1 for text in tab.look(f"{every('dialog[open] pre')}.map((one) => one.innerText)")
        )
        tab.press("Escape")
        tab.click(named(".composer button", "New conversation"))
        tab.look(f"({one('.lane-settings input')}.value = '60', {one('#prompt')}.value = '')")

    def again(self) -> None:
        """Another answer to the last prompt; side by side takes the conversation over."""
        tab, turns = self.tab, self.number(".lane .turn")
        tab.click(f"{ANSWER}.querySelector('.again')")
        tab.until(f"{ANSWER}.querySelector('.variants').textContent.includes('2 of 2') && {IDLE}")
        tab.click(f"{named('.check', 'Two settings')}.firstChild")
        assert self.number(".lane .turn") == 2 * turns
        tab.click(f"{named('.check', 'Two settings')}.firstChild")

    def own_life(self) -> None:
        """The timeline of an answer of Talk has every event, though nobody had Live open."""
        tab = self.tab
        tab.click(f"{ANSWER}.querySelector('.foot button')")
        tab.until(one("svg.timeline"))
        words = "document.querySelector('.timeline-box').textContent"
        tab.until(f"{words}.includes('finished with') && !{words}.includes('not known')", 20)
        assert "admitted" in tab.look(words), tab.look(words)
        assert not self.number(".timeline .unknown")

    def trace(self) -> None:
        """A request of Talk is sent again, and its trace goes down to the model runner or its stand-in."""
        tab = self.tab
        tab.click(named(".timeline-box button", "Send it again"))
        tab.until(f"{every('.trace .tree > details')}.length > 2", 60)
        tab.click(f"{every('.trace .tree > details')}[1].querySelector('.branch summary')")
        calls = tab.look(f"{every('.trace .name')}.map((one) => one.textContent)")
        assert {"EngineCore.add", "EngineCore.step"} <= set(calls), calls
        tab.size(SIZE[0], 480)
        self.picture("trace")
        tab.size(*SIZE)
        self.look_with_axe("a trace")
        tab.click(named(".trace button", "Trace the next"))
        tab.until(f"!{named('.trace button', 'Cancel')}.hidden")
        tab.click(named(".trace button", "Cancel"))
        tab.until(f"{one('.trace [role=status]')}.textContent === 'Cancelled.'")
        self.view("talk")

    def panel_closes(self) -> None:
        """The panel of a token closes on a second click, a click elsewhere, Escape from anywhere, and with the view."""
        tab, token = self.tab, f"{ANSWER}.querySelector('.t')"
        shown = f"{every('.token-panel')}.some((one) => !one.hidden)"
        for close in (
            lambda: tab.click(token),
            lambda: tab.click(one("h1")),
            lambda: (tab.look(f"{one('#prompt')}.focus()"), tab.press("Escape")),
            lambda: (self.view("live"), self.view("talk")),
        ):
            tab.click(token)
            assert tab.look(shown)
            close()
            assert not tab.look(shown)

    def chat(self) -> None:
        """Chat; point at a token; branch; the keyboard does the same."""
        tab, tokens = self.tab, f"[...{ANSWER}.querySelectorAll('.t')]"
        self.ask("What does the json module do?")
        tab.point(f"{tokens}[3]")
        tab.until(f"!{one('.token-panel')}.hidden")
        assert self.number(".token-panel li") >= 5
        self.picture("talk")
        kept = tab.look(f"{tokens}.slice(0, 3).map((one) => one.textContent).join('')")
        tab.click(one(".token-panel button:not(.same)"))
        tab.until(f"{ANSWER}.querySelector('.variants').textContent.includes('2 of 2') && {IDLE}")
        text = tab.look(f"{ANSWER}.querySelector('.tokens').textContent")
        assert text.startswith(kept), (kept, text)
        assert tab.look(f"{tokens}[3].classList.contains('picked')")
        tab.look(f"{ANSWER}.querySelector('.tokens').focus()")
        tab.press("ArrowRight", "ArrowRight", "Enter")
        assert tab.look("document.activeElement.closest('.token-panel') !== null")
        tab.press("Escape")
        assert tab.look(f"{one('.token-panel')}.hidden")
        tab.press("Enter", "Tab", "Enter")  # another alternative, which goes with its panel
        tab.until(f"{ANSWER}.querySelector('.variants').textContent.includes('3 of 3') && {IDLE}")
        assert tab.look("document.activeElement.matches('.tokens')"), "the focus stays at the answer"
        self.panel_closes()
        self.look_with_axe("an answer")

    def edit(self) -> None:
        """A message goes back into the field; it leaves both conversations, with what follows."""
        tab, words = self.tab, "The message to change"
        tab.click(named(".composer button", "New conversation"))
        tab.click(f"{named('.check', 'Two settings')}.firstChild")
        for prompt in ("Hello", words, "More"):
            self.ask(prompt)
        tab.write(one("#prompt"), "A draft")
        tab.click(f"{every('.turn.user button')}[1]")
        assert self.number(".turn") == 12 and tab.look(f"{one('#prompt')}.value") == "A draft"
        tab.write(one("#prompt"), "")
        tab.click(f"{every('.turn.user button')}[1]")
        assert self.number(".turn") == 4 and tab.look(f"{one('#prompt')}.value") == words
        tab.press("Enter")
        tab.until(f"{every('.turn')}.length === 8 && {IDLE}")
        tab.click(f"{named('.check', 'Two settings')}.firstChild")

    def tool(self) -> None:
        """A call of a tool, its result, and the answer to the result."""
        tab, choice = self.tab, with_option("required")
        tab.click(named(".settings summary", "Tools"))
        tab.click(named(".settings button", "Example"))
        tab.look(f"{choice}.value = 'required'")
        self.ask("What is the weather in Paris?")
        assert tab.look(f"{ANSWER}.querySelector('.call strong').textContent") == "get_weather"
        assert "city" in json.loads(tab.look(f"{ANSWER}.querySelector('.call pre').textContent"))
        tab.look(f"{choice}.value = 'auto'")
        tab.write(one(".results textarea"), '{"temperature": 21}')
        tab.click(one(".results button"))
        tab.until(f"{every('.turn.tool')}.length === 1 && {IDLE} && {ANSWER}.matches('.assistant')")
        tab.click(named(".settings summary", "Tools"))
        tab.look(f"{one('.settings textarea.code')}.value = ''")

    def compare(self) -> None:
        """Two settings side by side, with a schema; the export of the request."""
        tab, form = self.tab, with_option("json_schema")
        choose = f"{form}.dispatchEvent(new Event('change'))"
        tab.click(named(".composer button", "New conversation"))
        for words in ("Two settings", "Colour tokens"):
            tab.click(f"{named('.check', words)}.firstChild")
        tab.look(f"{form}.closest('details').open = true")
        tab.look(f"({form}.value = 'json_schema', {choose})")
        self.ask("Who made Python, and in which year?")
        last = "one.querySelector('.turn:last-child .tokens').textContent"
        texts = tab.look(f"{every('.lane')}.map((one) => {last})")
        assert len(texts) == 2 and all({"name", "year"} == set(json.loads(text)) for text in texts), texts
        self.picture("side-by-side")
        tab.click(named(".composer button", "Export"))
        texts = tab.look(f"{every('dialog[open] pre')}.map((one) => one.textContent)")
        assert len(texts) == 4, "curl and Python, of the settings A and B"
        for curl, python in (texts[:2], texts[2:]):
            assert curl.startswith("curl http") and "json_schema" in curl and '"assistant"' not in curl
            compile(python, "export", "exec")
        self.look_with_axe("the export")
        tab.press("Escape")
        tab.click(f"{named('.check', 'Two settings')}.firstChild")
        tab.look(f"({form}.value = '', {choose})")

    def hostile(self) -> None:
        """Output with HTML, scripts, marks of direction and a word of a megabyte is text, and the page stays quick."""
        tab, lanes = self.tab, one(".lanes")
        pieces = [HOSTILE, "x" * LONG, HOSTILE]
        chunks = [{"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        tab.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/chat/completions"}])
        tab.write(one("#prompt"), HOSTILE)
        tab.press("Enter")
        ends = time.monotonic() + 20
        while not (paused := tab.events("Fetch.requestPaused")) and time.monotonic() < ends:
            time.sleep(0.05)
        tab.call(
            "Fetch.fulfillRequest",
            requestId=paused[-1]["requestId"],
            responseCode=200,
            responseHeaders=[{"name": "content-type", "value": "text/event-stream"}],
            body=base64.b64encode("".join([*lines, "data: [DONE]\n\n"]).encode()).decode(),
        )
        tab.call("Fetch.disable")
        tab.until(f"{ANSWER}.querySelector('.more') && {IDLE}")
        assert tab.look(f"{ANSWER}.querySelector('.tokens').textContent").startswith(HOSTILE)
        assert self.number(".lanes img, .lanes script") == 0
        assert tab.look(f"{lanes}.scrollWidth <= {lanes}.clientWidth")
        told(f"two frames take {tab.look(FRAMES):.0f} ms beside a word of {LONG:,} characters")
        tab.click(named(".composer button", "New conversation"))

    def live(self, picture: str) -> None:
        """Watch while streams run: tiles, steps, blocks, and the request of a block."""
        tab, view, cells = self.tab, one("#view-live"), one("canvas.cells")
        self.view("live")
        tab.until(f"{one('.tiles b')}.textContent.startsWith('0 of ')")  # the lives of all requests are watched
        with streams(self.url, STREAMS):
            tab.until(f"parseInt({one('.tiles b')}?.textContent) > 20", 60)
            tab.until(f"{every('tr[data-handle]')}.length > 20", 60)
            time.sleep(LOOK)
            tab.look(f"{cells}.scrollIntoView({{block: 'center'}})")
            x, y = tab.look(f"[{cells}.getBoundingClientRect().x + 30, {cells}.getBoundingClientRect().y + 6]")
            tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            tab.until(f"{one('canvas.cells + .hint')}.textContent.startsWith('Block')")
            tab.click(named("th button", "blocks"))
            tab.until(one('th[aria-sort="descending"]'))
            blocks = f"{every('tr[data-handle]')}.map((row) => Number(row.cells[7].textContent))"
            tab.until(f"{blocks}.every((one, at, all) => at === 0 || one <= all[at - 1])")
            for _ in range(2):  # smallest first, then the order of service
                tab.click(named("th button", "blocks"))
            assert "every slot is taken" in tab.look(f"{one('.tiles .warn')}.textContent")
            young = f"({every('tr[data-handle]')}.findLast((row) => row.cells[1].textContent === 'running'))"
            tab.click(f"{young}.querySelector('button')")
            tab.until(one("tr.selected"))
            tab.look(f"{view}.scrollTop = 0")
            time.sleep(1)
            self.picture(picture)
            self.look_with_axe("live")
            tab.click(one(".live-head button"))
            tab.until(f"{one('.live-head')}.textContent.includes('paused')")
            tab.click(one(".live-head button"))
        tab.until(f"parseInt({one('.tiles b')}.textContent) === 0", 60)

    def compare_counts(self) -> None:
        """Blocks and tokens that an idle page shows are those that the routes tell."""
        tab = self.tab
        tab.look(f"{named('.panel summary', 'Table of blocks')}.parentElement.open = true")
        tab.until(f"{named('.tiles li', 'steps/s')}.textContent === 'steps/s0'")  # a mean over the last seconds
        time.sleep(2)  # tables come once more
        cells = f"{named('.panel', 'KV blocks')}.querySelector('tbody tr').cells"
        total, own, shared, _, cached, free = tab.look(f"[...{cells}].slice(1).map((one) => +one.textContent)")
        letters = tab.look("fetch('debug/blocks').then((one) => one.json()).then((one) => one.engines[0].device)")
        assert (total, own + shared) == (len(letters), 0)
        assert (cached, free) == (letters.count("c"), letters.count("."))
        tiles = dict(
            tab.look(
                f"{every('.tiles li')}.map((one) => [...one.children].slice(0, 2).map((part) => part.textContent))"
            )
        )
        assert tiles["running"].startswith("0 of ") and tiles["waiting"] == "0", tiles

    def inside(self) -> None:
        """The plan, a search in it, the table of meetings, and the timeline of a request."""
        tab = self.tab
        self.view("inside")
        self.view("plan")
        tab.until(f"{every('.kernel s')}.length > 2")
        tab.look(f"{one('.tree details')}.open = true")
        tab.until(f"{one('.tree .branch')}.childElementCount > 3")
        self.picture("plan")
        tab.write(one('[aria-label="Search the plan"]'), "attention, feed-forward")  # a heading
        tab.until(f"/\\d+ found/.test({one('#part-plan')}.textContent)")
        assert self.number("#part-plan mark") and tab.look(named(".tree .branch summary", "0 to 7") + " !== undefined")
        self.look_with_axe("the plan")
        self.view("meetings")
        tab.until(f"{every('#part-meetings tbody tr')}.length > 20")
        self.look_with_axe("the meetings")
        self.view("timeline")
        order, head = one('[aria-label="Order of requests"]'), one(".two-columns th:last-child")
        for value, words in (("3", "each token"), ("0", "time")):
            tab.look(f"({order}.value = '{value}', {order}.dispatchEvent(new Event('change')))")
            assert tab.look(f"{head}.textContent") == words
        tab.write(one('[aria-label="Search requests"]'), "length")
        long = "Number(row.cells[3].textContent) > 50 && Number(row.cells[2].textContent) > 150"
        tab.click(f"{every('.two-columns > div:first-child tbody tr')}.find((row) => {long})?.querySelector('button')")
        tab.until(f"{every('svg.timeline rect')}.length > 2")
        tab.write(one('[aria-label="Search requests"]'), tab.look(f"{one('.timeline-box h3')}.textContent")[:2])
        self.picture("timeline")
        self.look_with_axe("a timeline")

    def phone(self) -> None:
        """Every view at a width of 390 pixels, in dark colours: nothing is wider than the window."""
        tab = self.tab
        tab.size(390, 844, dark=True)
        with streams(self.url, STREAMS // 5):
            for name in ("talk", "live", "inside"):
                self.view(name)
                time.sleep(LOOK / 4)
                assert tab.look("document.documentElement.scrollWidth") <= 390, name
                assert tab.look(f"{one(f'#view-{name}')}.scrollWidth") <= 390, name
                self.look_with_axe(f"{name} on a phone")
                if name == "live":
                    self.picture("phone")
        tab.size(*SIZE)

    def hidden(self) -> None:
        """A page that nobody sees watches nothing."""
        self.view("live")
        self.tab.until(one(".tiles b"))
        self.view("talk")
        time.sleep(1)
        before = len(self.tab.events("Network.requestWillBeSent"))
        time.sleep(2)
        asked = [one["request"]["url"] for one in self.tab.events("Network.requestWillBeSent")[before:]]
        assert not [url for url in asked if "/debug/" in url], asked

    def picture(self, name: str) -> None:
        """Write a picture of the window."""
        if self._images is not None:
            size = self.tab.picture(self._images / f"page-{name}.png")
            told(f"page-{name}.png: {size:,} bytes")
            assert size < LARGEST_PICTURE, name

    def look_with_axe(self, where: str) -> None:
        """Let axe-core look at the page as it stands."""
        if not self._axe:
            return
        if not self.tab.look("Boolean(window.axe)"):
            self.tab.look(f"{self._axe}; 0")
        found = self.tab.look(AXE)
        told(f"axe, {where}: {[one[:2] for one in found] or 'no finding'}")
        assert not [one for one in found if one[0] in SERIOUS], found

    def check(self, *, locked: bool = False) -> None:
        """Raise if a request left the origin, or the console has an error or a violation of the policy.
        locked: the server has a key, so that refusals (401) before it was given are no error."""
        asked = [one["request"]["url"] for one in self.tab.events("Network.requestWillBeSent")]
        foreign = [url for url in asked if not url.startswith((self.url, "data:", "about:"))]
        assert asked and not foreign, foreign
        told(f"{len(asked)} requests, all of them to {self.url}")
        logged = [one["entry"] for one in self.tab.events("Log.entryAdded")]
        errors = [f"{one['level']}: {one['text']}" for one in logged if one["level"] in ("error", "warning")]
        errors = [one for one in errors if not (locked and "status of 401" in one)]
        errors = [one for one in errors if "status of 400" not in one]  # `refused` asks for one
        errors += [one["exceptionDetails"]["text"] for one in self.tab.events("Runtime.exceptionThrown")]
        errors += [
            str(one["args"])
            for one in self.tab.events("Runtime.consoleAPICalled")
            if one["type"] in ("error", "assert")
        ]
        assert not errors, errors


def told(words: str) -> None:
    """Print a line at once."""
    print(words, flush=True)


def tour_of_model(tab: Tab, url: str, images: Path | None, axe: str) -> None:
    """Use every view of a server with the bundled model."""
    tour = Tour(tab, url, images, axe)
    assert tour.start() < FIRST_PAINT
    tour.chat()
    tour.own_life()
    tour.trace()
    tour.tool()
    tour.compare()
    tour.hostile()
    tour.live("live")
    tour.compare_counts()
    tour.inside()
    tour.phone()
    tour.hidden()
    tour.check()


def tour_of_mock(tab: Tab, url: str, axe: str) -> None:
    """Chat with a server whose device is the mock, with an API key, and watch it."""
    tour = Tour(tab, url, None, axe)
    tour.start(KEY)
    tour.late_refusal(KEY)
    tour.refused()
    tour.ask("Hello")
    tour.own_life()
    tour.trace()
    tour.again()
    tour.edit()
    tour.live("mock")
    tour.check(locked=True)


def tour_of_router(tab: Tab, url: str, backends: int, stop: Callable[[], None]) -> None:
    """Watch several servers through a router, and look into one of them. stop: ends a backend."""
    tour = Tour(tab, url)
    tour.start()
    tour.ask("Hello")
    tour.own_life()
    tour.trace()
    tour.view("live")
    engines = every("input[name=engine]")
    tab.until(f"{engines}.length === {backends}")
    tab.click(f"{engines}.at(-1)")
    tab.until(f"{engines}.at(-1).checked")
    tour.view("inside")
    tab.until(f"{every('.inside-head option')}.length === {backends}")
    tour.view("timeline")
    tab.until(one("#part-timeline table, #part-timeline .hint"))
    tour.check()
    tour.view("live")
    stop()
    tab.until(f"{every('.engines tr.down')}.length === 1")
    tab.until(f"{one('#state')}.textContent === '{backends - 1} of {backends} backends'")


def main() -> None:
    """Make the tour, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, help="folder for the pictures")
    parser.add_argument("--axe", type=Path, help="axe.min.js of the npm package axe-core")
    parser.add_argument("--chromium", default=find_chromium(), help="path of Chromium")
    given = parser.parse_args()
    if given.chromium is None:
        raise SystemExit("there is no Chromium: install one, or give --chromium PATH.")
    axe = given.axe.read_text() if given.axe else ""
    with ExitStack() as stack:
        url = stack.enter_context(served(*MODEL))
        tour_of_model(stack.enter_context(opened_tab(given.chromium)), url, given.images, axe)
    with ExitStack() as stack:
        url = stack.enter_context(served(*MOCK, "--api-key", KEY))
        tour_of_mock(stack.enter_context(opened_tab(given.chromium)), url, axe)
    with ExitStack() as stack:
        last = stack.enter_context(ExitStack())
        backends = [stack.enter_context(served(*MOCK)), last.enter_context(served(*MOCK))]
        flags = [flag for backend in backends for flag in ("--backend", backend.rstrip("/"))]
        url = stack.enter_context(served(*flags, command="route"))
        tour_of_router(stack.enter_context(opened_tab(given.chromium)), url, len(backends), last.close)


if __name__ == "__main__":
    main()
