"""A core on the mock executor with a record of all it says, checked after every step; fixture `Rig` is the class."""

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from quire.answers.grammar import Grammar, GrammarCompiler
from quire.config.checkpoints import CheckpointPlaces
from quire.config.engine import SchedulerConfig
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.errors import InvalidParameter
from quire.contracts.output import Finish, StepOutputs
from quire.contracts.prefix import PrefixReport
from quire.contracts.request import FinishReason, NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import MAX_VERIFY_ROWS, StepPlan, StepResult, Tier
from quire.engine.adapters import AdapterSlots
from quire.engine.core import EngineCore
from quire.engine.mock_executor import allowed_token, chain, first_digest, mock_hidden, next_token
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool
from quire.kv.states import ALL_PLACES, StateCheckpoints
from quire.kv.store import KVStore, StateTiers
from quire.text.tokenizer import Tokenizer

from ...support.checked_executor import CheckedExecutor
from ...support.mock_copies import MockCopies, MockDisk, MockPeers, MockRanks, MockRanksDisk
from ...support.mock_tokens import mock_tokens
from ...support.watched_core import WatchedCore

LETTERS = "abcdefg"  # ids 0 to 6; llguidance takes the last one for the end of a text


def letters() -> Tokenizer:
    """A tokenizer of a token per letter."""
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@cache
def true_compiler(vocab: int) -> GrammarCompiler:
    """Return the compiler that right answers come from. Each rig has a compiler of its own for the engine."""
    return GrammarCompiler(letters, vocab)


@cache
def compiled(spec: str, vocab: int) -> Grammar | str:
    """Return a grammar, or the fault that it is refused for. It is compiled once for all right answers."""
    try:
        return true_compiler(vocab).compile(spec)
    except InvalidParameter as error:
        return str(error)


class Jobs:
    """Stands for the threads that compile: one job is done after every step."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.num_done = 0
        self.closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: work(*args)))
        return future

    def run_one(self) -> None:
        while self.jobs:
            future, work = self.jobs.popleft()
            if future.set_running_or_notify_cancel():
                self.num_done += 1
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
                return

    def shutdown(self, **_: object) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def no_idle_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle core does not wait for what is being compiled: `Jobs` would not go on meanwhile."""
    monkeypatch.setattr("quire.engine.grammar.IDLE_SECONDS", 0.0)


def least_tokens(new: NewRequest) -> int:
    """Return the number of outputs before the first that may end the request."""
    return max(0, new.sampler.min_length - new.sampler.num_prompt)


class EngineRig:
    """`add` and `step` as a front end would, keeping per handle what was asked and what came.

    asked      handle -> the request;  prompts  handle -> its token ids
    tokens     handle -> tokens so far;  finish  handle -> its end
    rows       handle -> prompt rows so far, as (how many came before, id, value)
    cached     handle -> reused prompt tokens, as reported;  prefixes  handle -> why they were not more
    plans      every plan submitted;  events  ("submit" | "collect", step number), in order
    sizes      tokens of a block of each group, in turn, as multiples of `block_size`
    states     checkpoints of states; None: no layer keeps states;  places  at which they are taken
    host_states   checkpoints in host memory; 0: as many as blocks
    state_disk, state_peers   tiers of checkpoints
    adapters   slots of the device and of host memory for adapters;  loads  steps that each load takes
    num_sampled   tokens that the device came to;  now  what the core's clock shows
    """

    def __init__(
        self,
        depth: int = 1,
        *,
        slots: int = 8,
        blocks: int = 40,
        block_size: int = 4,
        budget: int = 16,
        max_len: int = 128,
        vocab: int = 1000,
        policy: str = "fcfs",
        max_waiting: int | None = 1000,
        watermark: float = 0.0,
        caching: bool = True,
        mock: type[CheckedExecutor] = CheckedExecutor,
        drafts: int = 0,
        accepts: Sequence[int] = (0,),
        drafts_cached: bool = False,
        windows: Sequence[int | None] = (None,),
        sizes: Sequence[int] = (1,),
        host_blocks: int = 0,
        disk: MockDisk | MockRanksDisk | None = None,
        peers: MockPeers | None = None,
        write_through: bool = False,
        delays: Sequence[int] = (0,),
        faults: Sequence[str] = ("",),
        reserve: int = 8,
        blends: bool = False,
        states: int = 0,
        places: CheckpointPlaces = ALL_PLACES,
        host_states: int = 0,
        state_disk: MockDisk | None = None,
        state_peers: MockPeers | None = None,
        adapters: tuple[int, int] = (0, 0),
        loads: Sequence[int] = (1,),
    ) -> None:
        self.peers, below = peers, tuple(one for one in (disk, peers) if one is not None)
        copies: Any = MockRanks if isinstance(disk, MockRanksDisk) else MockCopies
        tiers = partial(
            copies, num_host_blocks=host_blocks, below={one.tier: one for one in below}, delays=delays, faults=faults
        )
        self.state_peers = state_peers
        below_states = tuple(one for one in (state_disk, state_peers) if one is not None)
        state_tiers = partial(
            MockCopies,
            num_host_blocks=host_states or host_blocks,
            below={one.tier: one for one in below_states},
            delays=delays[::-1],
            faults=faults[::-1],
        )
        component = KVComponent("kv", num_heads=1, head_dim=1, dtype="float32", item_bytes=4)
        groups = tuple(
            KVGroup(layers=(i,), components=(component,), window=w, block_size=block_size * many)
            for i, (w, many) in enumerate(zip(windows, cycle(sizes), strict=False))
        )
        geometry = KVGeometry(groups=groups)
        self.mock = mock(
            num_slots=slots,
            num_blocks=blocks,
            block_size=geometry.block_size,
            vocab_size=vocab,
            max_model_len=max_len,
            depth=depth,
            num_drafts=drafts,
            accepts=accepts,
            drafts_cached=drafts_cached,
            draft_lookup=(1, 3) if drafts else (0, 0),
            windows=windows,
            sizes=geometry.block_sizes,
            blends=blends,
            loads=loads,
            tiers=tiers if host_blocks else None,
            states=states,
            state_tiers=state_tiers if host_blocks and states else None,
        )
        self.budget = budget
        self.vocab, self.block_size, self.num_blocks, self.num_slots = vocab, geometry.block_size, blocks, slots
        self.pool = BlockPool(blocks)
        unit = geometry.hit_size
        self.states = StateCheckpoints(states, unit, 2 * unit, places=places) if states else None
        self.allocator = KVAllocator(self.pool, geometry, num_slots=slots, states=self.states)
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=slots,
            max_waiting=max_waiting,
            scheduling_policy=policy,
            watermark=watermark,
        )
        self.now = 0.0
        self.store = (
            KVStore(
                self.pool,
                geometry,
                num_host_blocks=host_blocks,
                reserve=reserve,
                below=below,
                promises=peers,
                write_through=write_through,
                clock=lambda: self.now,
            )
            if host_blocks
            else None
        )
        if self.store is not None and self.states is not None:
            self.store.keep_states(
                StateTiers(
                    checkpoints=self.states,
                    num_host_blocks=host_states or host_blocks,
                    below=below_states,
                    promises=state_peers,
                )
            )
        self.compiler = GrammarCompiler(letters, vocab)
        self.core = EngineCore(
            self.mock,
            config,
            self.allocator,
            root_key=bytes(32),
            prefix_caching=caching,
            compiler=self.compiler,
            store=self.store,
            clock=lambda: self.now,
        )
        if adapters[0]:
            self.core.scheduler.roster.adapters = AdapterSlots(*adapters)
        self.jobs = self.core._grammars._pool = Jobs()  # type: ignore[assignment]
        self.scheduler, self.table = self.core.scheduler, self.core.scheduler.table
        self.asked: dict[int, NewRequest] = {}
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.rows: dict[int, list[tuple[int, int, float]]] = {}
        self.cached: dict[int, int] = {}
        self.prefixes: dict[int, PrefixReport] = {}
        self.origins: dict[int, dict[int, Tier]] = {}
        self.reasons: dict[int, set[str]] = {}
        self.plans: list[StepPlan] = []
        self.events: list[tuple[str, int]] = []
        self.num_sampled = 0
        self.outputs = StepOutputs(handles=np.empty(0, np.int32), tokens=np.empty(0, np.int32))
        self.watched: WatchedCore | None = None
        self._listen()

    def watch(self) -> None:
        """Watch the core, and check every frame."""
        self.watched = WatchedCore(self)

    def _listen(self) -> None:
        submit, collect = self.mock.submit, self.mock.collect

        def submitted(plan: StepPlan) -> None:
            self.plans.append(plan)
            rows, prompts = plan.num_tokens[: plan.num_decodes], plan.num_tokens[plan.num_decodes :]
            assert prompts.sum() + plan.num_decodes <= self.budget
            assert rows.sum() <= max(MAX_VERIFY_ROWS, plan.num_decodes)
            self.events.append(("submit", plan.step))
            submit(plan)

        def collected() -> StepResult:
            result = collect()
            self.events.append(("collect", result.step))
            self.num_sampled += int(result.num_accepted.sum())
            return result

        self.mock.submit, self.mock.collect = submitted, collected  # type: ignore[method-assign]

    # --- what a front end does ----------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        handle: int | None = None,
        seed: int | None = None,
        fail_after: int | None = None,
        scored: bool = False,
        places: int = 1,
        min_tokens: int = 0,
        **fields: Any,
    ) -> int:
        """Add a request; `fail_after` plants a device failure after so many outputs; `scored` asks for prompt rows."""
        handle = len(self.asked) if handle is None else handle
        sampler = SamplerSpec(
            seed=handle if seed is None else seed,
            num_prompt=len(prompt),
            min_length=len(prompt) + min_tokens,
            num_prompt_logprobs=0 if scored else None,
        )
        new = NewRequest(
            handle=handle,
            request_id=str(handle),
            token_ids=array("I", prompt).tobytes(),
            max_tokens=max_tokens,
            sampler=sampler,
            **fields,
        )
        self.core.add(new, places=places)
        if fail_after is not None:
            self.mock.fail[str(handle)] = fail_after
        self.asked[handle], self.prompts[handle] = new, list(prompt)
        self.tokens[handle], self.rows[handle] = [], []
        self.finish.pop(handle, None)
        self.cached.pop(handle, None)
        self.core.check()
        return handle

    def abort(self, handle: int) -> None:
        """Abort, then check."""
        self.core.abort(handle)
        self.core.check()

    def step(self, times: int = 1) -> StepOutputs:
        """Run steps, record and check each; returns the last one's outputs."""
        for _ in range(times):
            self.outputs = self.core.step()
            self.core.check()
            if self.watched is not None:
                self.watched.check()
            self.jobs.run_one()
            self._record(self.outputs)
        return self.outputs

    def drain(self, limit: int = 20_000) -> "EngineRig":
        """Step until there is nothing left to do; everything must be back then."""
        for self.core.flushing in (False, True):
            while self.core.has_work:
                self.step()
                limit -= 1
                assert limit > 0, "the engine makes no progress"
        self.core.flushing = False
        self.assert_idle()
        if self.watched is not None:
            self.watched.finish()
        assert self.finish.keys() == self.asked.keys(), "a request was never reported as finished"
        return self

    def assert_idle(self) -> None:
        """Assert that the core holds nothing."""
        if self.store is not None:
            assert self.store.host.num_free == self.store.host.num_blocks and not self.store.busy(writes=True)
            if (states := self.store.states) is not None:
                assert states.host.num_free == states.host.num_blocks, "a checkpoint in host memory leaked"
        assert self.pool.num_free == self.num_blocks and self.table.num_free == self.num_slots
        assert len(self.events) == 2 * len(self.plans), "a step was not collected"
        assert not self.core._finisher._num_stopping.any(), "stop ids of requests that are gone are watched"
        assert not self.core._grammars._compiling and not self.scheduler.roster._compiling, "grammars are waited for"

    def _record(self, outputs: StepOutputs) -> None:
        for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
            assert handle not in self.finish, f"a token of {handle} after its end"
            self.tokens[handle].append(token)
        for handle, rows in outputs.prompt_logprobs.items():
            assert handle not in self.finish, f"prompt rows of {handle} after its end"
            for token, value in zip(rows.ids[:, 0].tolist(), rows.logprobs[:, 0].tolist(), strict=True):
                self.rows[handle].append((len(self.rows[handle]), token, value))
        for handle, num in outputs.cached.items():
            assert handle not in self.finish, f"cached tokens of {handle} after its end"
            assert handle not in self.cached, f"cached tokens of {handle} reported twice"
            self.cached[handle] = num
        assert outputs.prefixes.keys() <= outputs.cached.keys()
        self.prefixes.update(outputs.prefixes)
        for handle, blocks in outputs.origins.items():
            assert all((one.seconds is None) == (not one.why) for one in blocks.values())
            self.origins[handle] = {block: one.tier for block, one in blocks.items()}
            self.reasons[handle] = {one.why for one in blocks.values()}
        for finish in outputs.finished:
            assert finish.handle not in self.finish, f"{finish.handle} finished twice"
            self.finish[finish.handle] = finish

    # --- what is right ------------------------------------------------------------------------------------------

    def answer(self, handle: int) -> tuple[list[int], FinishReason]:
        """The tokens and the reason of a request that nothing disturbs."""
        new = self.asked[handle]
        if new.grammar is not None:
            return self.formed(handle)
        tokens = mock_tokens(
            self.prompts[handle], new.sampler.seed, new.max_tokens, self.vocab, self.adapter_digest(handle)
        )
        for i, token in enumerate(tokens):
            if token in new.stop_ids and i + 1 > least_tokens(new):
                return tokens[: i + 1], FinishReason.STOP
        return tokens, FinishReason.STOP if new.pool else FinishReason.LENGTH

    def adapter_digest(self, handle: int) -> str:
        """Return the digest of a request's adapter; "": the base model."""
        adapter = self.asked[handle].adapter
        return "" if adapter is None else adapter.digest

    def first_digest(self, handle: int) -> int:
        """Return the digest of no tokens, which the adapter of a request changes."""
        return first_digest(self.adapter_digest(handle))

    def refusal(self, handle: int) -> str:
        """Return the fault of a request's grammar; "" for a right grammar or none."""
        spec = self.asked[handle].grammar
        grammar = "" if spec is None else compiled(spec, self.vocab)
        return grammar if isinstance(grammar, str) else ""

    def formed(self, handle: int) -> tuple[list[int], FinishReason]:
        """The same under a grammar, token by token."""
        new, tokens, before = self.asked[handle], [], b""
        digest = self.first_digest(handle)
        for token in self.prompts[handle]:
            digest = chain(digest, token)
        assert new.grammar is not None
        grammar, compiler = compiled(new.grammar, self.vocab), true_compiler(self.vocab)
        assert isinstance(grammar, Grammar), grammar
        matcher, free, budget, closing = grammar.fork(), grammar.after, grammar.budget, list(grammar.closing)
        while len(tokens) < new.max_tokens:
            masks, over = compiler.masks(
                [None if free and not grammar.inside else matcher],
                [new.stop_ids if len(tokens) >= least_tokens(new) else ()],
            )
            if over:
                return tokens, FinishReason.STOP
            if free:  # all letters are in one word
                forced = closing.pop(0) if budget <= 0 else None
                stopping = 0 if grammar.inside else sum(1 << stop for stop in set(new.stop_ids))
                masks[0, 0] = masks[0, 0] & ~stopping if forced is None else 1 << forced
            tokens.append(allowed_token(next_token(digest, new.sampler.seed, self.vocab), masks[0], self.vocab))
            digest = chain(digest, tokens[-1])
            if tokens[-1] in new.stop_ids and len(tokens) > least_tokens(new):
                return tokens, FinishReason.STOP
            if free:
                before, budget = before + LETTERS[tokens[-1]].encode(), budget - 1
                free = b"" if free in before else free
                if not grammar.inside:
                    continue
            if matcher is None:
                continue
            if not matcher.consume_token(tokens[-1]):
                raise AssertionError(matcher.get_error())
            if matcher.is_stopped():
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH

    def vector(self, handle: int) -> np.ndarray:
        """Return the expected vector of a request, if nothing goes wrong."""
        states, digest = [], self.first_digest(handle)
        for token in self.prompts[handle]:
            digest = chain(digest, token)
            states.append(mock_hidden(digest, 8))
        return {"mean": np.mean(states, 0), "last": states[-1], "cls": states[0]}[self.asked[handle].pool]

    def judge(self, handle: int) -> None:
        """Assert that a finished request got exactly what it should, whatever ended it."""
        finish, got = self.finish[handle], self.tokens[handle]
        refusal = self.refusal(handle)
        if refusal or finish.error == "invalid_grammar":
            late = "not compiled within 10 s" in (finish.message or "")  # of the rig's clock
            early = finish.reason is FinishReason.ABORT or finish.error == "deadline"
            assert not got and (late or early or finish.message == refusal)
            return
        tokens, reason = self.answer(handle)
        planted = self.mock.fail.get(str(handle), math.inf)
        failing = planted < len(tokens) or planted == 0 and self.asked[handle].pool
        if finish.reason is FinishReason.ABORT or finish.error == "deadline":
            assert got == tokens[: len(got)] and len(got) <= planted
        elif failing:
            code = "nan_hidden" if self.asked[handle].pool else "nan_logits"
            assert (finish.reason, finish.error, finish.vector) == (FinishReason.ERROR, code, None)
            assert got == tokens[: int(planted)]
        else:
            assert (got, finish.reason, finish.error) == (tokens, reason, None)
            new, last = self.asked[handle], tokens[-1] if tokens else None
            stopped = reason is FinishReason.STOP and last in new.stop_ids and len(tokens) > least_tokens(new)
            assert finish.stop_id == (last if stopped else None)
            assert handle in self.cached
            if self.asked[handle].pool:
                np.testing.assert_allclose(finish.vector, self.vector(handle), atol=1e-5)
            else:
                assert finish.vector is None
        self._judge_rows(handle, complete=finish.reason in (FinishReason.STOP, FinishReason.LENGTH))

    def _judge_rows(self, handle: int, *, complete: bool) -> None:
        prompt = self.prompts[handle]
        wanted = self.asked[handle].sampler.num_prompt_logprobs is not None
        rows = [(p, prompt[p + 1], -float(p)) for p in range(len(prompt) - 1)] if wanted else []
        got = self.rows[handle]
        assert got == rows[: len(got)], f"prompt rows of {handle}"
        assert not complete or len(got) == len(rows), f"prompt rows of {handle} are missing"

    @property
    def requests(self) -> Mapping[int, Any]:
        """The core's records of live requests, by handle."""
        return self.core._requests

    def request(self, handle: int) -> Any:
        """The core's record of a live request."""
        return self.requests[handle]

    def plan_of(self, index: int = -1) -> dict[int, int]:
        """A submitted plan as {slot: tokens}."""
        plan = self.plans[index]
        return dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))


@pytest.fixture(name="Rig", scope="session")
def rig_class() -> type[EngineRig]:
    """The class itself: every test sizes its own."""
    return EngineRig


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps in flight."""
    return int(request.param)
