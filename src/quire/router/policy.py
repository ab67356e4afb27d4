"""The choice of a backend for a request.

    round-robin       the one that was chosen longest ago
    least-load        the one with the fewest requests in flight
    prefix-affinity   the lowest cost, where prompts that it got before count as cached
    exact             the lowest cost, where the blocks of its KV events count as cached
    consistent-hash   the home of its session by hashing; the next one if that has more than its share (`rendezvous.py`)

    cost = (PREFILL * (tokens that it must compute before streams begin + STAY * tokens of this prompt that it lacks)
            + tokens of all its prompts) / weight

A token costs more to compute than to attend to: PREFILL. A prefix that is computed elsewhere costs the requests there,
too, and pushes out other blocks: STAY. With STAY 1 a third of the turns of conversations changed their backend, since
backends are never exactly even; with 4, one in 20 (docs/performance.md). Ties go to fewer requests, then in turn.

A backend that has not got the adapter of a request on its device, where another has, must compute LOAD tokens more.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.router.affinity import PrefixTable
from quire.router.backends import Backend
from quire.router.events import block_chain
from quire.router.prompts import CHUNK, RoutedBody, TokenIds
from quire.router.rendezvous import hash_of, place
from quire.router.settings import COSTED, EXACT, HASHED, RouterConfig
from quire.router.upstream import Header, UpstreamError

PREFILL, STAY = 4, 4
LOAD = 512  # tokens of a prompt that take about as long as bringing an adapter to a device
JSON_BODY: Header = (b"content-type", b"application/json")
FORWARDED = (b"authorization", b"x-api-key")  # headers of a client that /tokenize needs, too


class Tokenized(msgspec.Struct):
    """Answer of /tokenize."""

    tokens: TokenIds


@dataclass(kw_only=True)
class Sight:
    """View on a request before its backend is chosen.

    total    tokens of the prompt, counted or estimated
    cached   tokens of it that a backend has, by its number; backends that are left out have none
    resident   numbers of the backends that have its adapter on their device; empty for no adapter
    session    hash of its session; of policy consistent-hash alone
    """

    total: int
    session: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    resident: frozenset[int] = frozenset()

    def of(self, backend: Backend) -> int:
        """Return the tokens that a backend has; at least one token is always computed."""
        return max(0, min(self.total - 1, self.cached.get(backend.number, 0)))


class Chooser:
    """Chooses backends by a policy, and remembers which prompts they got.

    backends   all backends of now; the list changes
    overflows  requests that went past the home of their session, since that had more than its share
    """

    def __init__(self, config: RouterConfig, backends: Sequence[Backend]) -> None:
        choice = config.choice
        self._policy, self._timeout = choice.policy, config.faults.connect_timeout
        self._header, self._bound = choice.session_header.encode(), choice.load_bound
        self._table, self._backends = PrefixTable(choice.affinity_entries), backends
        self._turn, self._choices = 0.0, 0
        self.overflows = 0

    async def look(self, body: RoutedBody, path: str, headers: Sequence[Header], asked: Backend | None) -> Sight:
        """Return what is known of a prompt. With policy exact, `asked` tokenizes it."""
        if self._policy == HASHED:
            named = next((value for name, value in headers if name == self._header), b"")
            return Sight(total=body.num_tokens, session=hash_of(named or body.session()))
        if self._policy not in COSTED:
            return Sight(total=body.num_tokens)
        total, exact, resident = body.num_tokens, {}, self._resident(body)
        if self._policy == EXACT and asked is not None and not resident:  # the indexes have blocks of the base model
            tokens = body.token_ids() or await self._tokenize(body, path, headers, asked)
            total, exact = len(tokens) or total, self._blocks(tokens)
        share = total * CHUNK / max(1, body.size)  # tokens of a chunk
        cached = {number: int(chunks * share) for number, chunks in self._table.match(body.chunks).items()}
        return Sight(total=total, cached=cached | exact if any(exact.values()) else cached, resident=resident)

    def pick(self, sight: Sight, candidates: Collection[Backend]) -> Backend:
        """Choose one of the candidates, of which there is at least one."""
        if self._policy == "round-robin":
            chosen = min(candidates, key=lambda b: (b.turn, b.chosen))
            self._turn = max(self._turn, chosen.turn)  # one that was away has not saved turns up
            chosen.turn = self._turn + 1 / chosen.weight
        elif self._policy == "least-load":
            chosen = min(candidates, key=lambda b: (b.in_flight / b.weight, b.chosen))
        elif self._policy == HASHED:
            chosen, overflows = place(sight.session, candidates, self._bound)
            self.overflows += overflows
        else:
            chosen = min(candidates, key=lambda b: (self._cost(sight, b), b.in_flight, b.chosen))
        self._choices += 1
        chosen.chosen = self._choices
        return chosen

    def sent(self, body: RoutedBody, backend: Backend) -> None:
        """Remember that a backend computes the prompt of a request."""
        if self._policy in COSTED:
            self._table.add(body.chunks, backend.number)
            if self._resident(body):
                backend.resident |= {body.model}

    def fell(self, backend: Backend) -> None:
        """Forget a backend that went down: its cache may be gone."""
        self._table.forget(backend.number)
        if backend.index is not None:
            backend.index.clear()

    def _cost(self, sight: Sight, backend: Backend) -> float:
        load = LOAD if sight.resident and backend.number not in sight.resident else 0
        lacking = backend.waiting + load + STAY * (sight.total - sight.of(backend))
        return (PREFILL * lacking + backend.active) / backend.weight

    def _resident(self, body: RoutedBody) -> frozenset[int]:
        return frozenset(one.number for one in self._backends if body.model and body.model in one.resident)

    def _blocks(self, tokens: Sequence[int]) -> dict[int, int]:
        """Return the tokens of a prompt in the blocks of each backend."""
        indexes = {one.number: one.index for one in self._backends if one.index is not None and one.index.block_size}
        chains = {size: block_chain(tokens, size) for size in {index.block_size for index in indexes.values()}}
        return {number: index.match(chains[index.block_size]) * index.block_size for number, index in indexes.items()}

    async def _tokenize(self, body: RoutedBody, path: str, headers: Sequence[Header], backend: Backend) -> list[int]:
        """Return the tokens of a completion or a chat, from a backend; [] if it does not tell."""
        if path not in ("/v1/completions", "/v1/chat/completions") or body.given("cache_salt"):
            return []
        kept = [header for header in headers if header[0] in FORWARDED]
        try:
            status, answer = await backend.pool.fetch(
                b"POST", b"/tokenize", [JSON_BODY, *kept], body.to_tokenize(), self._timeout
            )
            return msgspec.json.decode(answer, type=Tokenized).tokens if status == 200 else []
        except (UpstreamError, msgspec.DecodeError):
            return []
