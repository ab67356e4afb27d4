"""Explanations of prefix cache misses, from a bounded memory of the last prompts and of dropped keys.

Costs an append per admitted prompt and an entry per dropped key. A prompt that missed is compared with the remembered
prompts that begin with its first token. Knows key chains and the drops of one pool. Knows nothing of requests and holds
no block.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial

from quire.contracts.prefix import Miss, PrefixReport
from quire.kv.hashing import DIGEST_BYTES, TENANT, KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixMatch
from quire.kv.states import StateCheckpoints

PROMPTS = 32  # prompts to remember at most; the last one is always remembered
TOKENS = 1 << 20  # of these prompts together, at admission: 4 MB, as much again for keys; outputs come on top
DROPPED = 1 << 14  # dropped keys to remember
Drops = OrderedDict[bytes, tuple[str, float]]  # dropped key -> reason, and time


class PrefixHistory:
    """Explains prefix cache misses of one pool. When not `enabled`, it reports every miss as `Miss.OFF`.

    Reports count blocks of the chain. A match grows by `per_hit` of them: above 1 if KV groups differ in block size.
    states   checkpoints of states; None: no layer keeps states
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        enabled: bool,
        per_hit: int = 1,
        states: StateCheckpoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled, self._per_hit, self._clock = enabled, per_hit, clock
        self._prompts: deque[tuple[str, KeyChain, int]] = deque()  # name, keys, length at admission
        self._held, self._first = 0, Counter[int]()  # tokens of all prompts; first token -> number of prompts
        self._dropped, self._states = Drops(), Drops()
        if enabled:
            pool.on_drop.append(partial(self._note_drop, self._dropped))
        self._checkpoints = states
        if enabled and states is not None:
            states.pool.on_drop.append(partial(self._note_drop, self._states))

    def admit(
        self, name: str, chain: KeyChain, match: PrefixMatch, num_prompt: int, *, reads: bool
    ) -> PrefixReport | None:
        """Return the report of why `match` lacks full blocks of the prompt; None when it has all of them.

        Remembers the prompt and its later output under `name`. Call this before the prompt's blocks are in the pool.
        num_prompt   number of tokens of `chain` that are the prompt
        reads        False: the request does not read the prefix cache
        """
        at = match.num_tokens // chain.block_size
        num_blocks = num_prompt // (chain.block_size * self._per_hit) * self._per_hit
        say = partial(PrefixReport, num_reused=at, num_blocks=num_blocks, block=at, position=at * chain.block_size)
        report = None
        if at < num_blocks and (not self.enabled or not reads):
            report = say(why=Miss.OFF)
        elif at < num_blocks and match.reach > match.num_tokens:
            report = self._no_state(chain, at, match.reach, say)
        elif at < num_blocks:
            report = say(why=Miss.LIMIT) if match.broke_at is None else self._why(chain, at, say)
        if self.enabled:
            self._remember(name, chain)
        return report

    def dropped(self, key: bytes) -> tuple[str, float | None]:
        """Return the reason why a key was dropped, and the seconds since then; ("", None) when nothing is known."""
        found = self._dropped.get(key[:DIGEST_BYTES])
        return ("", None) if found is None else (found[0], self._clock() - found[1])

    def _no_state(self, chain: KeyChain, at: int, reach: int, say: Callable[..., PrefixReport]) -> PrefixReport:
        """Return the report about cached blocks from `at` to `reach` tokens, where there is no checkpoint."""
        coming = set() if self._checkpoints is None else self._checkpoints.coming()
        say = partial(say, why=Miss.STATE, num_cached=reach)
        for key in reversed(chain.keys(reach // chain.block_size, at)):
            if key in coming:
                return say(detail="pending")
            if key in self._states:
                why, since = self._states[key]
                return say(detail=why, seconds=self._clock() - since)
        return say(detail="none")

    def _remember(self, name: str, chain: KeyChain) -> None:
        prompts, count = self._prompts, len(chain.tokens)
        prompts.append((name, chain, count))
        self._held += count
        self._first[chain.tokens[0]] += 1
        while len(prompts) > PROMPTS or (self._held > TOKENS and len(prompts) > 1):
            _, old, count = prompts.popleft()
            self._held -= count
            self._first[old.tokens[0]] -= 1
            if not self._first[old.tokens[0]]:
                del self._first[old.tokens[0]]

    def _why(self, chain: KeyChain, at: int, say: Callable[..., PrefixReport]) -> PrefixReport:
        """Return the report about the blocks from `at` on, of which one is not in the pool; `say` makes the report."""
        for key in chain.keys(at + self._per_hit, at):
            detail, seconds = self.dropped(key)
            if detail:
                return say(why=Miss.DROPPED, detail=detail, seconds=seconds)
        before, first = chain.continues(at), at * chain.block_size
        end = first + self._per_hit * chain.block_size
        mine, most = chain.tokens[first:end], -1 if at else 0  # at block 0, one token must be the same
        found = say(why=Miss.NEW)
        if chain.tokens[0] not in self._first:
            return found
        tenant = dict(chain.tags).get(TENANT)
        for name, other, _ in reversed(self._prompts):
            if dict(other.tags).get(TENANT) != tenant:
                continue  # a tenant must not learn of another one's prompts
            token = first + min(max(most, 0), len(mine) - 1)  # a prompt nearer than `found` has it
            if len(other.tokens) < end or (most >= 0 and other.tokens[token] != chain.tokens[token]):
                continue
            theirs = other.tokens[first:end]
            if theirs == mine and other.tokens[:first] == chain.tokens[:first]:
                if other.continues(0) == chain.continues(0):
                    return say(why=Miss.PENDING, nearest=name)
                if most < len(mine):
                    why = Miss.EXTRAS if chain.root == other.root else Miss.NAMESPACE
                    tags = sorted({tag for tag, _ in set(chain.tags) ^ set(other.tags)})
                    most, found = len(mine), say(why=why, nearest=name, detail=", ".join(tags))
            elif other.continues(at) == before:
                same = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
                if same > most:
                    most, found = same, say(why=Miss.TOKENS, nearest=name, differs_at=first + same)
        return found

    def _note_drop(self, drops: Drops, key: bytes, why: str) -> None:
        key = key[:DIGEST_BYTES]  # without the group: a block missing in one group ends the match
        drops[key] = (why, self._clock())
        drops.move_to_end(key)
        if len(drops) > DROPPED:
            drops.popitem(last=False)
