"""The two records between engine core and worker: a plan goes down, a result comes up.

Both carry a `step` number, and results arrive in the order of the plans. The device owns the lengths of running
decodes, so a plan never contains a decode's position. A decode that verifies k drafts advances its slot by 1 to 1 + k
tokens; the result says by how many. A prompt advances by exactly its chunk. A row is a position whose logits are
needed; rows are not slots.
"""

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from quire.contracts.adapters import AdapterLoad, AdapterLoaded
from quire.contracts.sampling import SamplerSpec

I32 = np.ndarray[Any, np.dtype[np.int32]]
F32 = np.ndarray[Any, np.dtype[np.float32]]
U8 = np.ndarray[Any, np.dtype[np.uint8]]

NO_MASKS: I32 = np.empty((0, 0), np.int32)  # masks for `Executor.release` of a step without a grammar

# Outputs of a scheduled slot: bits of StepPlan.outputs.
SAMPLE = 1  # sample a token from the slot's last row, or from every row of a decode
PROMPT_LOGPROBS = 2  # score the next prompt token at each row
POOL = 4  # sum hidden states instead of computing logits

# Tokens of a reused text (`BlendedChunk`) that are computed before others.
FIRST_TOKENS = 8  # they had no context when it stood alone (EPIC, arXiv 2410.15332; docs/log.md)

MAX_VERIFY_ROWS = 1024  # of all decodes of a step together; the number of drafts is reduced to fit


def most_drafts(num_slots: int, num_drafts: int) -> int:
    """Return the largest number of drafts of a step: `num_drafts` for each of `num_slots` decodes, if they fit."""
    return min(num_slots * num_drafts, MAX_VERIFY_ROWS)


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A request that takes a slot of the running batch in this step.

    token_ids      [P] int32, the prompt; for a resumed request also the tokens that it had generated
    block_ids      one [n] int32 array per KV group: the start of the slot's block table, cached blocks first;
                   NULL_BLOCK where the group's window has passed
    num_computed   tokens whose KV is already in those blocks, < P
    pool           see `NewRequest`
    embeds         [prompt, hidden] float32, input of the first layer for the prompt; None: the model embeds token_ids
    adapter        slot of the request's adapter on the device; -1: it has none
    """

    slot: int
    request_id: str
    token_ids: I32
    block_ids: tuple[I32, ...]
    num_computed: int
    sampler: SamplerSpec
    pool: str = ""
    embeds: F32 | None = None
    adapter: int = -1


class SharedPrefix(msgspec.Struct, frozen=True):
    """Slots that share their first `num_blocks` blocks of full attention. Attention can read these blocks once.

    If groups of full attention differ in block size, these are those of the first one's size.
    """

    slots: I32
    num_blocks: int


class DraftSync(msgspec.Struct, frozen=True):
    """The part of drafts in the record of a step, of a drafter with layers. Every replica makes the same passes.

    most      most drafts of a decode of any replica, which is the number of passes; one pass at least, if any decodes
    decodes   decodes of each replica; of a pipeline the slots for which drafts are made at the end of the step
    prompts   True for each replica that has chunks of prompts, whose draft entries are made at the end of the step

        replica 0: 3 decodes with 2 drafts each; replica 1: a chunk of a prompt     DraftSync(2, (3, 0), (False, True))
    """

    most: int
    decodes: tuple[int, ...]
    prompts: tuple[bool, ...]


class StepSync(msgspec.Struct, frozen=True):
    """The record of a step on which all replicas in lock-step agree: they take the same step at the same time.

    rows     tokens that each replica computes, by replica. A replica with 0 tokens takes part in the exchanges of
             layers with experts, and does nothing else
    switch   number of the layer with experts (the first: 0) that has new experts in its slots from this step on; -1:
             none
    drafts   passes of a drafter with layers; None: no drafter has layers
    decode   (most decodes of a replica, most tokens of one decode); (0, 0): a replica has chunks of prompts

        replica 0: 3 decodes of 1 token; replica 1: 2 decodes of 1 and 4 tokens     StepSync((3, 5), decode=(3, 4))
    """

    rows: tuple[int, ...]
    switch: int = -1
    drafts: DraftSync | None = None
    decode: tuple[int, int] = (0, 0)


class Tier(StrEnum):
    """Memory that holds KV blocks, the nearest first. PEER is the host memory of other engines, CUDA_IPC their GPUs'.

    DEVICE and HOST have block numbers; the others find blocks by key. BLENDED is no memory: the origin of a block
    whose KV was moved from other positions on the device.
    """

    DEVICE = "device"
    HOST = "host"
    CUDA_IPC = "cuda_ipc"
    DISK = "disk"
    PEER = "peer"
    BLENDED = "blended"


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a block of a prompt that was not on the device.

    why       reason why it was not: "evicted", "reset" or "distrusted" from there; "": it was not known there
    seconds   time since it left the device
    peer      HOST:PORT of the engine that has it; "": of another tier
    """

    tier: Tier
    why: str = ""
    seconds: float | None = None
    peer: str = ""


class CopyJob(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of whole blocks from one tier to another; every rank copies its part of each block.

    id        number of the job, unique among the jobs of an engine core
    keys      [n] keys of the blocks
    sources   [n] int32 blocks in the source tier; empty for a tier that finds blocks by key. Of peers: the number
              of the peer that has the block, or ~number if it has promised the block and may not have it yet
    targets   [n] int32 blocks in the target tier; empty likewise
    states    True: the blocks are checkpoints of states, each of them whole
    """

    id: int
    source: Tier
    target: Tier
    keys: tuple[bytes, ...]
    sources: I32
    targets: I32
    states: bool = False


class DroppedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks whose files the ranks on other hosts than the engine core's delete.

    every    True: the files of all blocks
    states   True: the blocks are checkpoints of states
    """

    keys: tuple[bytes, ...] = ()
    every: bool = False
    states: bool = False


class FileNews(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks whose files came and went on a rank on another host than the engine core's.

    rank     number of the rank in the engine
    states   True: the blocks are checkpoints of states
    """

    rank: int
    came: tuple[bytes, ...] = ()
    went: tuple[bytes, ...] = ()
    states: bool = False


class StepCopies(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that begin with a step and run beside it. No step waits for them: later plans count on reported jobs only.

    before   jobs that begin when all earlier steps are done: they may write blocks that an earlier step still uses
    after    jobs that begin when this step is done, too: they may read blocks that this step computes
    wait     True: the step has no tokens; its result may wait a moment for a job to end
    dropped  files that ranks on other hosts delete
    """

    before: tuple[CopyJob, ...] = ()
    after: tuple[CopyJob, ...] = ()
    wait: bool = False
    dropped: tuple[DroppedFiles, ...] = ()


class FinishedCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a job that has ended on every rank.

    failed      indices of the blocks that were not copied; their targets may hold anything
    num_bytes   bytes copied, over all ranks
    seconds     time from begin to end, of the slowest rank
    error       reason why the tier below takes or gives no blocks at present, such as a full disk; "": it does
    """

    id: int
    failed: tuple[int, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class HostDrafts(msgspec.Struct, frozen=True):
    """Drafts of a decode that the host has chosen, because its rows wait for grammar masks.

    position   position of the first draft in the slot's tokens, behind those that the slot has when the step begins
    tokens     [k] int32, k >= 1
    """

    slot: int
    position: int
    tokens: I32


class BlendedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt chunk that reuse KV of other positions, approximately (CacheBlend). Other tokens are new.

    The first layers compute all tokens of the chunk. The last layers compute the new tokens, and `num_kept` of the
    moved ones: the first tokens of each reused text, then those whose new KV differs most from the moved KV.

    slot       slot of the chunk
    tokens     [n] int32, the moved tokens, as ascending indices in the chunk; never the last token of a prompt
    sources    [groups, n] int32, place of each token's KV in each KV group: block * block size + offset. An earlier
               step has computed it
    shifts     [n] int32, positions from the source to the token
    """

    slot: int
    tokens: I32
    sources: I32
    shifts: I32
    num_kept: int


class StepStates(msgspec.Struct, frozen=True):
    """Copies of the states that recurrent layers keep of requests.

    restored   [R, 2] int32 rows (slot, checkpoint): before the step, an admitted request's state becomes that of the
               checkpoint. The states of other admitted requests begin with their first token
    kept       [K, 3] int32 rows (slot, length, checkpoint), at most two of a slot: the state of the slot is copied to
               the checkpoint as it is after the slot's first `length` tokens. Of a prompt these are more than before
               the step, and at most as many as after it. A decode with drafts may be behind them, or before them: then
               the step copies nothing; or copies the state after drafts that are rejected: then a later step copies
               again
    """

    restored: I32
    kept: I32


class StageRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts of a pipeline. Its last stage alone samples and drafts, so the plan tells all stages what came of it.

    slots     [D] int32, the decodes of the step
    lengths   [D] int32, tokens of each when the step begins; all but the last have KV
    begins    [D] int32, position of the first token of each in `tokens`
    counts    [D] int32, tokens of each in `tokens`: those that came since the slot's last plan, then the drafts that
              the step verifies. Those of a slot with a grammar are in `StepPlan.drafts`
    tokens    [sum of counts] int32
    limits    [N] int32, of each slot that samples: most tokens and drafts after the step; 0: the last stage makes no
              drafts for the slot. There are KV blocks for one less
    most      most drafts that the last stage makes behind the tokens of the step
    """

    slots: I32
    lengths: I32
    begins: I32
    counts: I32
    tokens: I32
    limits: I32
    most: int

    @property
    def num_drafting(self) -> int:
        """Number of slots for which the last stage makes drafts."""
        return int(np.count_nonzero(self.limits)) if self.most else 0


class PlanFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """The part of features of some engines in a step.

    blended      prompt chunks of the step that reuse KV of other positions
    states       copies of the states of recurrent layers, or None
    runs         drafts of a pipeline, or None
    completes    True: the step may compute the last token of a block of a decode; only for a drafter with KV
    adapters     loads of adapters that begin with the step. With them, too, `slots` may be empty
    """

    blended: tuple[BlendedChunk, ...] = ()
    states: StepStates | None = None
    runs: StageRuns | None = None
    completes: bool = False
    adapters: tuple[AdapterLoad, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a step. The device applies `released`, `admitted` and `appended`, then runs the model over `slots`.

    slots        [S] int32, each at most once: first the decodes, then the slots with a chunk of their prompt
    num_decodes  number of `slots` that decode; all others have a chunk, even if of one token
    num_tokens   [S] int32, tokens to compute (>= 1). Decode: the last token and k drafts; the slot may advance by
                 fewer. Prompt: exactly the chunk
    num_rows     [S] int32, trailing positions whose logits are needed. Decode: all. Chunk: 0; 1 at the end of the
                 prompt; num_tokens for prompt logprobs
    outputs      [S] uint8, bits SAMPLE | PROMPT_LOGPROBS | POOL; a decode always has SAMPLE
    appended     [K, 3] int32 rows (slot, group, block): new blocks, in block-table order. Blocks that a window has
                 passed are not reported: they stay in the device's block table, and no kernel reads them
    released     [R] int32, slots that requests left since the last plan
    grammar      [G] int32, in plan order: the sampling slots whose grammar masks come with `Executor.release`
    drafts       all drafts of the decodes among `grammar`, in plan order; their masks must know them. The drafter has
                 no drafts for these slots
    sync         of replicas in lock-step; None: no other replica takes part in this step. With it, `slots` may be empty
    copies       jobs that copy blocks between tiers, or None. With it, too, `slots` may be empty
    features     the part of features of some engines
    """

    step: int
    slots: I32
    num_decodes: int
    num_tokens: I32
    num_rows: I32
    outputs: U8
    admitted: tuple[Admission, ...] = ()
    appended: I32 = msgspec.field(default_factory=lambda: np.empty((0, 3), np.int32))
    released: I32 = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    shared: tuple[SharedPrefix, ...] = ()
    grammar: I32 = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    drafts: tuple[HostDrafts, ...] = ()
    sync: StepSync | None = None
    copies: StepCopies | None = None
    features: PlanFeatures = PlanFeatures()

    @property
    def joins(self) -> bool:
        """True when replicas in lock-step have tokens in this step."""
        return self.sync is not None and any(self.sync.rows)


class RowLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of R rows: the row's token (sampled, or the next token of the prompt) and k alternatives.

    ids        [R, 1+k] int32; column 0 is the row's token
    logprobs   [R, 1+k] float32
    ranks      [R] int32, rank of the row's token (1 = most likely)
    """

    ids: I32
    logprobs: F32
    ranks: I32

    def part(self, rows: slice) -> "RowLogprobs":
        """Return some of the rows."""
        return RowLogprobs(self.ids[rows], self.logprobs[rows], self.ranks[rows])


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a step.

    slots            [N] int32, the plan's slots with SAMPLE, in plan order
    tokens           [N, 1+k] int32 sampled tokens; k is the largest number of drafts of a slot
    num_accepted     [N] int32, leading tokens of a row that are valid: 1 + the number of accepted drafts
    num_drafted      [N] int32, drafts that the drafter made, at most those planned; empty: it made none
    ahead            [N, most] int32, of a pipeline: drafts of the tokens behind the valid ones, which a later step may
                     verify; -1: none
    logprobs         slot -> log-probabilities, a row for each of its valid tokens
    prompt_logprobs  slot -> log-probabilities of the prompt, a row for each scored token of this step's chunk
    pooled           slot -> [hidden] float32, for prompts with POOL that ended in this step
    failed           slot -> code ("nan_logits", "nan_hidden", "bad_token"); other results of these slots are invalid
    num_computed     tokens that the forward pass computed, summed over slots
    moved            layers, since the start, whose new experts have come to all ranks; see `StepSync.switch`. -1: no
                     expert can move any more, because of a fault
    copied           jobs of `StepPlan.copies` that have ended since the last result
    loaded           loads of adapters that have ended since the last result
    files            changes of the files of ranks on other hosts since the last result
    """

    step: int
    slots: I32
    tokens: I32
    num_accepted: I32
    num_drafted: I32 = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    ahead: I32 = msgspec.field(default_factory=lambda: np.empty((0, 0), np.int32))
    logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    pooled: dict[int, F32] = msgspec.field(default_factory=dict)
    failed: dict[int, str] = msgspec.field(default_factory=dict)
    num_computed: int = 0
    moved: int = 0
    copied: tuple[FinishedCopy, ...] = ()
    loaded: tuple[AdapterLoaded, ...] = ()
    files: tuple[FileNews, ...] = ()
