"""The front end between users and the core: it turns prompts into requests and sampled tokens into outputs.

`LLM`, `AsyncLLM` and the server share it. Knows text and parameters; never imports torch.
"""

import logging
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Self

from quire.config.engine import EngineConfig
from quire.contracts.chunks import Chunking
from quire.contracts.errors import InvalidParameter
from quire.contracts.output import Finish, RequestOutput, StepOutputs
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.request import NO_ACCOUNT, Account, NewRequest, ReusedParts
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.entry.chunks import read_reuse
from quire.entry.completion import Completion, Generation
from quire.entry.core_request import (
    FrontLimits,
    check_first_token,
    check_options,
    check_request,
    child_request,
    sampler_spec,
)
from quire.entry.prompts import Prompt
from quire.entry.transfer import answer_transfer
from quire.plan.tiers import resolve_offload
from quire.procs.front_ends import ALONE, FrontPlace
from quire.procs.messages import Ready
from quire.text.sequence import SequenceText
from quire.text.tokenizer import Tokenizer

LOG = logging.getLogger("quire")
INTERNAL = "internal"  # error code of a request that failed by a bug in Quire


@dataclass(kw_only=True)
class Taken:
    """Changes that the outputs of one step made to the live generations (prompts with unfinished completions).

    now                monotonic time of this step's tokens
    touched            generations with an output to send
    stopped            handles of requests that the core must abort
    started            generations that got their first token
    finished           generations whose completions have all ended
    broken             generations with a completion that an exception in the front end ended, once per completion
    gaps               time of a previous token -> number of completions whose next token came in this step
    num_tokens         new tokens of the live generations
    num_stop_strings   completions that a stop string ended
    """

    now: float
    touched: list[Generation] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    started: list[Generation] = field(default_factory=list)
    finished: list[Generation] = field(default_factory=list)
    broken: list[Generation] = field(default_factory=list)
    gaps: dict[float, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_stop_strings: int = 0


class FrontEnd:
    """The live `Generation`s of an engine: prompts with unfinished completions. `start` makes the core's requests.

    `take` updates the generations with a step's outputs, for the server. `apply` also makes the users' outputs.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, limits: FrontLimits, *, seed: int = 0, place: FrontPlace = ALONE
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._eos = frozenset(i for i in limits.eos_ids if i < limits.vocab_size)
        self._seeds = random.Random(f"{seed} {place.number} {place.again}" if place.number else seed)
        self._place, self._next_handle = place, place.first
        self._by_handle: dict[int, tuple[Generation, Completion]] = {}

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        facts: ExecutorFacts | Ready,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        place: FrontPlace = ALONE,
        *,
        width: int = 0,
        processors: bool = False,
    ) -> Self:
        """Make the front end of an engine.

        facts        limits that the executor or the core reports
        width        numbers of a hidden state
        processors   requests may have logits processors
        """
        if facts.blends and tokenizer is not None:
            tokenizer.separator = config.cache.blend_separator
        between = tokenizer.encode(tokenizer.separator, add_special_tokens=False) if tokenizer is not None else ()
        limits = FrontLimits(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_logprobs=config.model.max_logprobs,
            eos_ids=eos_ids,
            num_drafts=facts.num_drafts,
            sharing=resolve_offload(config).sharing,
            block_size=facts.block_size,
            by_priority=config.scheduler.scheduling_policy == "priority",
            chunking=Chunking(facts.blends, config.cache.blend_ratio, tuple(between)),
            width=width * config.model.enable_prompt_embeds,
            processors=processors,
        )
        return cls(tokenizer, limits, seed=config.model.seed, place=place)

    def __len__(self) -> int:
        return len(self._by_handle)

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def live(self) -> list[Generation]:
        """Return the generations that have not finished."""
        return list({g.completions[0].handle: g for g, _ in self._by_handle.values()}.values())

    def start(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        pool: str = "",
        account: Account = NO_ACCOUNT,
    ) -> tuple[Generation, list[NewRequest]]:
        """Return the generation of one prompt, and the core's requests: one per completion.

        timeout   seconds after which the request fails
        pool      pooling of an embedding request: "mean", "last" or "cls"; "" = the request generates text
        account   API key of the request
        Raises a `RequestError` when the prompt cannot be served. Then the front end has not changed.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(
                f"sampling_params must be SamplingParams, not {type(params).__name__}.", param="sampling_params"
            )
        limits = self.limits
        params.check()
        check_options(priority, timeout, limits)
        token_ids = self.encode(prompt)
        check_request(params, token_ids, limits, self.tokenizer, prompt.embeds)
        grammar = params.structured_outputs.spec() if params.structured_outputs is not None else None
        seed = params.seed if params.seed is not None and params.seed >= 0 else self._seeds.getrandbits(64)
        stops = tuple(sorted({*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos)}))
        sampler = sampler_spec(params, seed, len(token_ids), stops, limits.vocab_size, self.tokenizer)
        check_first_token(params, sampler, limits.vocab_size)
        transfer, chunks = read_reuse(params, token_ids, prompt, limits.chunking, limits.sharing, limits.block_size)
        first = self._next_handle if self._next_handle + params.n <= self._place.end else self._place.first
        request_id = request_id if request_id is not None else str(first)
        generation = Generation(
            request_id=request_id,
            tenant=account.tenant,
            prompt=prompt.text,
            prompt_token_ids=token_ids,
            params=params,
            completions=[],
            transfer=transfer,
            tokenizer=self.tokenizer if params.detokenize else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        for i in range(params.n):
            text, streamed = self._text(token_ids, params), params.output_kind == OutputKind.DELTA
            generation.completions.append(
                Completion(handle=first + i, index=i, text=text, eos_ids=self._eos, streamed=streamed)
            )
        room = limits.max_model_len - len(token_ids)
        parent = NewRequest(
            handle=first,
            request_id=request_id if params.n == 1 else f"{request_id}.0",
            token_ids=array("I", token_ids).tobytes(),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            sampler=sampler,
            stop_ids=stops,
            priority=priority,
            cache_salt=prompt.cache_salt,
            account=account,
            deadline=None if timeout is None else time.monotonic() + timeout,
            read_prefix_cache=not params.skip_reading_prefix_cache and pool in ("", "last"),  # others: all rows
            pool=pool,
            grammar=grammar,
            num_drafts=0 if params.logits_processors else params.speculative_tokens,
            transfer=transfer,
            reused=ReusedParts(chunks, limits.chunking.ratio if params.blend_ratio is None else params.blend_ratio),
            adapter=prompt.adapter,
            embeds=b"" if prompt.embeds is None else prompt.embeds.tobytes(),
        )
        requests = [parent, *(child_request(parent, i, f"{request_id}.{i}") for i in range(1, params.n))]
        self._next_handle = first + params.n
        self._by_handle.update((c.handle, (generation, c)) for c in generation.completions)
        return generation, requests

    def apply(self, outputs: StepOutputs) -> tuple[list[tuple[int, RequestOutput]], list[int]]:
        """Update the generations with one step's outputs. Return (handle of a prompt's first completion, output) pairs,
        and the handles of requests that the core must abort: a stop string, or an exception here, ended their
        completions.
        """
        taken = self.take(outputs)
        pairs = []
        for generation in taken.touched:
            try:
                output = generation.output()
            except Exception:
                taken.stopped += self.fail(generation)
                output = generation.output()
            pairs.append((generation.completions[0].handle, output))
        return pairs, taken.stopped

    def take(self, outputs: StepOutputs) -> Taken:
        """Update the generations with one step's outputs. The caller makes the outputs of `Taken.touched`."""
        taken = Taken(now=time.monotonic())
        touched: dict[Generation, None] = {}
        finishes = {f.handle: f for f in outputs.finished}
        self._take_prompts(outputs, taken)
        by_handle, now, gaps, handles = self._by_handle, taken.now, taken.gaps, outputs.handles.tolist()
        logprobs, end = outputs.logprobs and {h: (rows, count()) for h, rows in outputs.logprobs.items()}, finishes.get
        if finishes and len(set(handles)) < len(handles):  # a handle with several tokens ends at its last
            end = _Last(handles, finishes).get
        for handle, token in zip(handles, outputs.tokens.tolist(), strict=True):
            found = by_handle.get(handle)
            if found is None:
                continue  # already ended by a stop string, which the core did not know yet
            generation, completion = found
            try:
                if logprobs and handle in logprobs:
                    rows, numbers = logprobs[handle]
                    generation.add_logprobs(completion, rows, next(numbers))
                ended = completion.push(token, end(handle) if finishes else None)
            except Exception:
                self._break(generation, completion, taken)
            else:
                if ended:
                    taken.stopped.append(handle)
                    taken.num_stop_strings += 1
                    del by_handle[handle]
                    self._note_end(generation, taken)
            before, completion.last_token_time = completion.last_token_time, now
            if before is not None:
                gaps[before] = gaps.get(before, 0) + 1
            else:
                completion.first_token_time = now
                if generation.metrics.first_token_time is None:
                    generation.metrics.first_token_time = now
                    taken.started.append(generation)
            taken.num_tokens += 1
            if (length := len(completion.token_ids)) >= generation.due:
                touched[generation] = None
                generation.wait_on(length)
        gaps.pop(now, None)  # tokens of the same step have no time between them
        for generation in (*self._end(finishes.values(), taken), *taken.finished, *taken.broken):
            if generation.wanted:
                touched[generation] = None
        taken.touched = list(touched)
        return taken

    def drop(self, generation: Generation) -> list[int]:
        """Forget a generation. Return the handles of its unfinished completions, which the core must abort."""
        return [c.handle for c in generation.completions if self._by_handle.pop(c.handle, None) is not None]

    def fail(self, generation: Generation) -> list[int]:
        """End a generation with an error. Log the exception of the `except` block. Return the handles to abort."""
        LOG.exception("the text of request %s failed; the others go on", generation.request_id)
        for completion in generation.completions:
            completion.fail(INTERNAL)
        return self.drop(generation)

    def _take_prompts(self, outputs: StepOutputs, taken: Taken) -> None:
        for handle, num_cached in outputs.cached.items():
            if (found := self._by_handle.get(handle)) is not None and found[1].index == 0:
                found[0].num_cached, found[0].metrics.prefix = num_cached, outputs.prefixes.get(handle)
                found[0].metrics.origins = outputs.origins.get(handle, {})
                found[0].for_decode = answer_transfer(
                    found[0].transfer,
                    self.limits.sharing.of(outputs.homes.get(handle, 0)),
                    len(found[0].prompt_token_ids),
                    self.limits.block_size,
                )
        for handle in outputs.preempted:
            if (found := self._by_handle.get(handle)) is not None:
                found[0].num_preemptions += 1
        for handle, rows in outputs.prompt_logprobs.items():
            if (found := self._by_handle.get(handle)) is not None and found[1].index == 0:
                try:
                    found[0].add_prompt_logprobs(rows)
                except Exception:
                    self._break(*found, taken)

    def _break(self, generation: Generation, completion: Completion, taken: Taken) -> None:
        """End one completion after an exception in the handling of its text. Call it in the `except` block."""
        LOG.exception("the text of request %s failed; the others go on", generation.request_id)
        completion.fail(INTERNAL)
        if self._by_handle.pop(completion.handle, None) is not None:
            taken.stopped.append(completion.handle)
        taken.broken.append(generation)
        self._note_end(generation, taken)

    @staticmethod
    def _note_end(generation: Generation, taken: Taken) -> None:
        if generation.finished and generation.metrics.finished_time is None:
            generation.metrics.finished_time = taken.now
            taken.finished.append(generation)

    def _end(self, finishes: Iterable[Finish], taken: Taken) -> list[Generation]:
        ended = []
        for finish in finishes:
            found = self._by_handle.pop(finish.handle, None)
            if found is None:
                continue
            generation, completion = found
            try:
                completion.end(finish)
            except Exception:
                self._break(generation, completion, taken)
            ended.append(generation)
            self._note_end(generation, taken)
        return ended

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt that was given as ids or as text."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        assert prompt.text is not None
        if self.tokenizer is None:
            raise InvalidParameter(
                "this engine has no tokenizer (skip_tokenizer_init): give prompt_token_ids.", param="prompt"
            )
        return self.tokenizer.encode(prompt.text)

    def tokenized(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its token ids, so that `start` need not encode it. Any thread may call this."""
        return replace(prompt, token_ids=self.encode(prompt))

    def _text(self, token_ids: list[int], params: SamplingParams) -> SequenceText | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return SequenceText(self.tokenizer, token_ids, params)


class _Last:
    """Finishes of requests that got several tokens in this step: a finish belongs to the last of them."""

    def __init__(self, handles: list[int], finishes: dict[int, Finish]) -> None:
        self._left, self._finishes = Counter(handles), finishes

    def get(self, handle: int) -> Finish | None:
        """Return a handle's finish at its last token of the step, None at earlier ones. Call this once per token."""
        self._left[handle] -= 1
        return None if self._left[handle] else self._finishes.get(handle)
