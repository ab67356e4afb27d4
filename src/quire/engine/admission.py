"""Admission of waiting requests to the next step, with the blocks that they reuse."""

import msgspec
import numpy as np

from quire.contracts.output import PrefixStats
from quire.contracts.request import MovedTokens, Request, RequestState
from quire.contracts.step import I32, Admission, Fetched, Tier
from quire.engine.roster import MOST_FETCHES, Roster
from quire.kv.blend import blocks_within, sources
from quire.kv.miss_reasons import PrefixHistory
from quire.kv.prefix import PrefixMatch


class Admitter:
    """Moves waiting requests into slots, until the token budget, the slots or the blocks are used up.

    headroom         KV blocks that must stay free when a request is admitted while others run
    waits_for        what the first waiting request lacked in the last step that could admit: "slots", "blocks",
                     "budget", "result" (of the step in which it was preempted); "" if none was left
    prefix_queries   prompt tokens looked up in the prefix cache since the start
    prefix_hits      of these, tokens found
    """

    def __init__(self, roster: Roster, history: PrefixHistory, *, by_priority: bool, headroom: int) -> None:
        self._roster, self._history = roster, history
        self._table, self._queue, self._allocator = roster.table, roster.queue, roster.allocator
        self._by_priority, self._headroom = by_priority, headroom
        self.prefix_queries = self.prefix_hits = 0
        self.waits_for = ""

    def stats(self) -> PrefixStats:
        """Return the counters of the prefix cache."""
        states, store = self._allocator.states, self._roster.store
        if states is None:
            return PrefixStats(queries=self.prefix_queries, hits=self.prefix_hits)
        found = states.stats()
        if store is not None and store.states is not None:
            found = msgspec.structs.replace(found, tiers=store.states.counters())
        return PrefixStats(queries=self.prefix_queries, hits=self.prefix_hits, states=found)

    def admit(self, slots: I32, num_tokens: I32, room: int) -> tuple[I32, I32, list[Admission]]:
        """Admit waiting requests in order, up to `room` tokens in all; stop at the first request that does not fit.

        Returns `slots` and `num_tokens` extended by the new requests, and the admissions.
        """
        admitted: list[Admission] = []
        new_tokens: list[int] = []
        lacks = ""
        while room > 0 and self._table.num_free and (request := self._queue.peek()) is not None:
            if request.in_flight:
                lacks = "result"
                break  # it was preempted, and its last result is still to come
            try:
                match = self._match(request)
                if not self._fits(request, match, room):
                    lacks = "blocks"
                    break
                if self._fetches(request, match):
                    continue
                admission = self._enter(request, match, self._moved(request, match, room), room)
            except Exception:
                self._roster.fail(request)
                continue
            self._queue.pop()
            request.to(RequestState.RUNNING)
            self._roster.tell(request, RequestState.WAITING)
            admitted.append(admission)
            count = min(len(request.tokens) - admission.num_computed, room)
            new_tokens.append(count)
            room -= count
            if admission.num_computed + count == len(request.tokens):
                self._roster.prompt_planned(request)
        lacks = lacks or ("budget" if self._table.num_free else "slots")
        self.waits_for = lacks if len(self._queue) else ""
        if not admitted:
            return slots, num_tokens, admitted
        return (
            np.concatenate([slots, np.array([a.slot for a in admitted], np.int32)]),
            np.concatenate([num_tokens, np.array(new_tokens, np.int32)]),
            admitted,
        )

    def offer_chunks(self, slots: I32, num_tokens: I32) -> bool:
        """Publish the prompt blocks that running requests compute in this step, so that new requests can share them.

        slots, num_tokens   [S] int32, the running slots of the step and the tokens that each computes
        Returns True when the bookkeeping of a request failed; `Roster.fail` has ended that request.
        """
        planned = self._table.planned[slots]
        failed = False
        for i in np.flatnonzero(planned < self._table.goal[slots]).tolist():
            request = self._table.requests[int(slots[i])]
            assert request is not None
            try:
                self._publish_planned(request, int(planned[i] + num_tokens[i]))
            except Exception:
                self._roster.fail(request)
                failed = True
                continue
            if planned[i] + num_tokens[i] == len(request.tokens):
                self._roster.prompt_planned(request)
        return failed

    def _match(self, request: Request) -> PrefixMatch:
        """Return the blocks to reuse."""
        return self._allocator.match(self._roster.chain(request), self._most_reused(request))

    @staticmethod
    def _most_reused(request: Request) -> int:
        """Return the most tokens to reuse. The last token, and prompt rows that must still be scored, are computed."""
        limit = len(request.tokens) - 1
        if request.new.sampler.num_prompt_logprobs is not None:
            limit = min(limit, request.prompt_scored)
        elif not request.new.read_prefix_cache and (request.num_preemptions == 0 or request.new.pool):
            limit = 0
        return limit

    def _moved(self, request: Request, match: PrefixMatch, room: int) -> tuple[MovedTokens, ...]:
        """Return the tokens behind the match whose KV is moved from other positions; () without room for both."""
        if self._roster.chunks is None:
            return ()
        moved = self._roster.chunks.find(request.new.handle, match.num_tokens, self._most_reused(request))
        matched = {block for blocks in match.blocks for block in blocks}
        more = [block for block in sources(moved, self._allocator.block_sizes) if block not in matched]
        return moved if self._fits(request, match, room, self._allocator.pool.num_free_among(more)) else ()

    def _fits(self, request: Request, match: PrefixMatch, room: int, more: int = 0) -> bool:
        """True when KV blocks are free for a request of up to `room` tokens in its first step, plus `more` blocks."""
        headroom = more + (self._headroom if len(self._table) else 0)
        upto = min(len(request.tokens), match.num_tokens + room)
        return self._allocator.can_admit(match, len(request.tokens), headroom, upto)

    def _fetches(self, request: Request, match: PrefixMatch) -> bool:
        """Let a request wait if other tiers have blocks that continue the match. Returns True when it waits.

        It comes back to the queue and is matched again: after a failure with fewer blocks, and at last without any.
        """
        store, index, most = self._roster.store, self._roster.chunks, self._most_reused(request)
        chunks = [] if index is None or not most else index.chains(request.new.handle, match.num_tokens)
        if store is None or request.num_fetches == MOST_FETCHES or (match.broke_at is None and not chunks):
            return False
        chain = self._roster.chain(request)
        if (found := store.fetch(request.new.handle, chain, most, match, chunks)) is None:
            return False
        for block, (tier, key) in found.items():
            if block not in request.origins:  # else it comes from a disk, through host memory
                why, seconds = self._history.dropped(key)
                request.origins[block] = Fetched(tier=tier, why=why, seconds=seconds, peer=store.holder(tier, key))
        self._roster.await_blocks(request)
        return True

    def _enter(self, request: Request, match: PrefixMatch, moved: tuple[MovedTokens, ...], room: int) -> Admission:
        """Give a waiting request a slot, blocks and up to `room` planned tokens, of which it reuses `moved`.

        The request stays in the queue until the caller moves it to RUNNING, so that `Roster.fail` can undo all of this.
        """
        new, size, upto = request.new, self._allocator.block_size, min(len(request.tokens), match.num_tokens + room)
        if request.num_cached < 0 and new.parent is None:
            request.prefix = self._history.admit(
                new.request_id, self._roster.chain(request), match, request.num_prompt, reads=new.read_prefix_cache
            )
        slot = self._table.enter(request, match.num_tokens, self._by_priority)
        if (states := self._allocator.states) is not None:
            states.enter(slot, self._roster.chain(request), match.checkpoint, match.num_tokens, match.reach)
        request.moved = moved
        if moved:
            self._allocator.loans.begin(slot, sources(moved, self._allocator.block_sizes), _num_found(request, size))
        blocks = self._allocator.admit(slot, match, len(request.tokens), upto)
        self._publish_planned(request, upto)
        admission = Admission(
            slot=slot,
            request_id=new.request_id,
            token_ids=np.array(request.tokens, np.int32),
            block_ids=blocks,
            num_computed=match.num_tokens,
            sampler=new.sampler,
            pool=new.pool,
            embeds=np.frombuffer(new.embeds, np.float32).reshape(request.num_prompt, -1) if new.embeds else None,
            adapter=-1 if self._roster.adapters is None else self._roster.adapters.slot_of(request),
        )
        if request.num_cached < 0:
            if self._roster.store is not None:
                self._roster.store.sharing.settle(new.handle)
            num_blocks = match.num_tokens // size
            request.num_cached = match.num_tokens + sum(one.last - one.first for one in moved)
            request.origins = {block: one for block, one in request.origins.items() if block < num_blocks}
            request.origins |= {block: Fetched(tier=Tier.BLENDED) for block in blocks_within(moved, size)}
            self.prefix_queries += request.num_prompt
            self.prefix_hits += match.num_tokens
        return admission

    def _publish_planned(self, request: Request, num_tokens: int) -> None:
        # Valid in the same step: each layer writes all KV before any row attends (a kernel contract).
        self._roster.publish(request, min(num_tokens, len(request.tokens)))


def _num_found(request: Request, block_size: int) -> int:
    """Return how many blocks of a request with moved tokens others may find: the exact ones, or all of a transfer."""
    if request.new.transfer is not None:
        return len(request.tokens)  # their keys are private
    return request.moved[0].first // block_size
