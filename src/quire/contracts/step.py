"""The two records that cross between brain and muscle: a plan goes down, a result comes up.

Both carry a `step` number; results arrive in the order of the plans. A plan never names the position of a running
decode: the device owns lengths, the plan says how many tokens each slot advances. Rows (positions whose logits are
wanted) are not slots.
"""

from typing import Any

import msgspec
import numpy as np

from quire.contracts.sampling import SamplerSpec

I32 = np.ndarray[Any, np.dtype[np.int32]]
F32 = np.ndarray[Any, np.dtype[np.float32]]
U8 = np.ndarray[Any, np.dtype[np.uint8]]

NO_MASKS: I32 = np.empty((0, 0), np.int32)  # what `Executor.release` gets for a step without a grammar

# What a scheduled slot outputs: bits of StepPlan.outputs.
SAMPLE = 1  # sample one token from the slot's last row
PROMPT_LOGPROBS = 2  # score the next prompt token at each row
POOL = 4  # sum hidden states instead of computing logits


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a slot.

    token_ids      [P] int32, prompt and, for a resumed request, what it had already generated
    block_ids      one [n] int32 array per KV group: the blocks it starts with (shared ones first)
    num_computed   tokens whose KV is already in those blocks, < P
    pool           see `NewRequest`
    """

    slot: int
    request_id: str
    token_ids: I32
    block_ids: tuple[I32, ...]
    num_computed: int
    sampler: SamplerSpec
    pool: str = ""


class SharedPrefix(msgspec.Struct, frozen=True):
    """Slots whose first `num_blocks` blocks are the same, so that attention can read them once."""

    slots: I32
    num_blocks: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Order on the device: `released`, `admitted`, `appended`, then the forward pass over `slots`.

    slots        [S] int32, each at most once
    num_decodes  the first so many slots decode; the others are chunks of prompts, whatever their length
    num_tokens   [S] int32, tokens the slot advances (>= 1)
    num_rows     [S] int32, trailing positions whose logits are needed: 0 for an unfinished chunk, 1 for a decode,
                 k+1 for verification, num_tokens for prompt logprobs
    outputs      [S] uint8, bits SAMPLE | PROMPT_LOGPROBS | POOL
    appended     [K, 3] int32 rows (slot, group, block), in block-table order
    released     [R] int32 slots given back before this step
    grammar      [G] int32 those of the sampling slots, in plan order, whose masks come with `Executor.release`
    """

    step: int
    slots: I32
    num_tokens: I32
    num_rows: I32
    outputs: U8
    num_decodes: int = 0
    admitted: tuple[Admission, ...] = ()
    appended: I32 = msgspec.field(default_factory=lambda: np.empty((0, 3), np.int32))
    released: I32 = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    shared: tuple[SharedPrefix, ...] = ()
    grammar: I32 = msgspec.field(default_factory=lambda: np.empty(0, np.int32))


class RowLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of rows. `ids[r, 0]` is the token that came (sampled, or the prompt's own), the rest the top k.

    ids [R, 1+k] int32, logprobs [R, 1+k] float32, ranks [R] int32 of the token that came (1 = most likely)
    """

    ids: I32
    logprobs: F32
    ranks: I32


class StepTimings(msgspec.Struct, frozen=True):
    """Seconds the step took on the device side."""

    forward: float = 0.0
    sample: float = 0.0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one plan.

    slots            [N] int32, the plan's slots with SAMPLE, in plan order
    tokens           [N, 1+k] int32 sampled tokens;  num_accepted [N] int32 how many of them count (1 without drafts)
    logprobs         slot -> its sampled rows;  prompt_logprobs  slot -> the rows of this chunk
    pooled           slot -> [hidden] float32, of prompts with POOL that ended in this step
    failed           slot -> code; what came of those slots is meaningless ("nan_logits", "nan_hidden", "bad_token")
    num_computed     tokens the forward pass really computed, summed over slots
    """

    step: int
    slots: I32
    tokens: I32
    num_accepted: I32
    logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    pooled: dict[int, F32] = msgspec.field(default_factory=dict)
    failed: dict[int, str] = msgspec.field(default_factory=dict)
    num_computed: int = 0
    timings: StepTimings = StepTimings()
