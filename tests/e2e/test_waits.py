"""Nothing on the way of a step waits for the device but `collect()`: every call that could is counted, at depth 2.

On the engine's thread a profiler sees each call that can block. In the worker's thread two modes of PyTorch see each
call that hands a value, or a size that depends on values, from a tensor to Python: it is free on a CPU, and would stop
a GPU's queue. A view of a tensor's memory that numpy took earlier (`tensor.numpy()` is counted when it is called) is
not seen.
"""

import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quire.assemble.engine import Engine, assemble
from quire.config.engine import EngineConfig
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import PROMPT_LOGPROBS, SAMPLE, StepPlan, StepResult
from quire.kernels.supports import SUPPORTS
from quire.weights import dummy
from quire.worker.runner import StepRunner

VOCAB = 512
READ_BACK = "StepRunner.collect"  # the one function of the worker that may wait
COLLECT = "LaunchingExecutor.collect"  # the one function of the engine's thread that may wait

# Reads inside READ_BACK: ids, values and ranks of each batch of sampled rows and each chunk of a prompt that is scored.
SCORED_READS = 3

# Reads before READ_BACK: place, call, how many per what (see `Step.count`). Each is one the CPU can afford and a GPU
# could not: its kernels take lengths, edits and draws on the device. A number here may only go down.
CUTS = "the CPU's kernel cuts its work into calls on the host"
SORTS = "rows are sorted by kind on the host"
NO_THREADS = "numpy's logarithm and exponential wait for no second thread; the branch is for tensors on a CPU"
HOT_READS = (
    ("as_list", "tolist", 2, "step", CUTS),  # bounds and lengths
    ("InPlaceUpload.write", "numpy", 1, "change", "a CPU's tables are the host's own memory"),
    ("InPlaceUpload.fetch", "cpu", 1, "step", "a step that is written in place is over when its tokens are asked for"),
    ("InPlaceUpload.fetch", "numpy", 1, "step", "likewise"),
    ("_plan_decode", "numpy", 1, "cutting", CUTS),  # block tables; the native kernel cuts nothing
    ("_num_sound", "item", 1, "chunk", "PyTorch's kernel does a chunk with values that are not finite again without"),
    ("_Batch.__init__", "tolist", 1, "mixed", SORTS),  # needs
    ("_Batch.settle", "tolist", 1, "settling", "the filtered path must not see broken rows"),
    ("TorchSampling._rewrite", "tolist", 3, "rewriting", "edits are applied row by row: slot, position, least length"),
    ("RowEdits.decode", "tolist", 3, "decoding", "words of a request's edits are read at its first row"),
    ("completed_words", "tolist", 1, "bad words", "the last tokens are compared with the words on the host"),
    ("TorchSampling._rewrite", "item", 1, "penalizing", "only the known part of the history is gathered"),
    ("penalize", "item", 1, "penalizing", "only the known part of the history is gathered"),
    ("draw_greedy", "numpy", 1, "pass", "numpy finds the largest without leaving OpenMP threads spinning"),
    ("log_in_place", "numpy", 2, "drawing", NO_THREADS),
    ("log_in_place", "numpy", 2, "filtering", NO_THREADS),
    ("log_in_place", "numpy", 2, "sorting", NO_THREADS),
    ("_exp_in_place", "numpy", 1, "filtering", NO_THREADS),
    ("_exp_in_place", "numpy", 1, "sorting", NO_THREADS),
    ("draw_filtered", "nonzero", 1, "filtering", "only rows that need it are sorted whole"),
    ("_pick", "item", 1, "filtering", "noise is drawn for the kept candidates only"),
    ("_pick", "item", 1, "sorting", "noise is drawn for the kept candidates only"),
    ("sorted_by_id", "numpy", 1, "sorting", "numpy sorts faster; the branch is for tensors on a CPU"),
    ("sent_array", "to", 1, "scoring", "which rows are scored; does not wait for a GPU"),
    ("sent_array", "to", 1, "scoring ids", "which ids; does not wait for a GPU"),
    ("top_by_id", "nonzero", 1, "ranking", "ties at the last alternative; a GPU has another way"),
)

NUM_REQUESTS = 36

BLOCKING = {  # what a thread can block in, as C functions: all of Python's waiting ends in one of these
    "SimpleQueue.get", "lock.acquire", "lock.__enter__", "lock.acquire_lock", "RLock.acquire", "RLock.__enter__",
    "time.sleep", "select.select", "select.poll", "poll.poll", "epoll.poll", "posix.read", "socket.recv",
}  # fmt: skip


class Lock:
    """A lock whose `with` is visible to a profiler."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> bool:
        return bool(self._inner.acquire())

    def __exit__(self, *exc: object) -> None:
        self._inner.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def watched_waits(found: list[tuple[str, bool]]) -> Iterator[None]:
    """Append (call, whether inside COLLECT) for every call of this thread that can block."""

    def see(frame: Any, event: str, arg: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(arg, "__self__", None)
        kind = owner.__name__ if isinstance(owner, type(sys)) else type(owner).__name__
        if f"{kind}.{arg.__name__}" in BLOCKING:
            found.append((f"{kind}.{arg.__name__}", COLLECT in callers(frame)))

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def callers(frame: Any) -> list[str]:
    """Names of this package's functions on the stack, innermost first."""
    names = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("quire."):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names


class Reads:
    """Counts the reads of tensors, by the function they happen in."""

    def __init__(self) -> None:
        self.hot: Counter[tuple[str, str]] = Counter()
        self.result: Counter[tuple[str, str]] = Counter()

    def note(self, call: str) -> None:
        names = callers(sys._getframe(1)) or [""]
        (self.result if READ_BACK in names else self.hot)[names[0], call] += 1

    @contextmanager
    def watched(self) -> Iterator["Reads"]:
        """Everything this thread does with tensors inside is seen."""
        with _Methods(self), _Operations(self):
            yield self


class _Methods(TorchFunctionMode):
    """Methods that read memory without going through an operation, and moves to the host."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moved = [*args[1:], *(kwargs or {}).values()] if name == "to" else []
        if name in ("tolist", "numpy", "cpu", "__array__") or any(isinstance(a, (str, torch.device)) for a in moved):
            self._reads.note(name)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Operations whose result, or whose result's size, the host has to wait for."""

    NAMES = (
        "item",
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",
        "masked_select",
        "argwhere",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    )

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("index", "index_put", "index_put_"):
            waits = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        elif name == "where":
            waits = len(args) == 1
        elif name == "repeat_interleave":
            waits = (kwargs or {}).get("output_size") is None
        else:
            waits = name in self.NAMES
        if waits:
            self._reads.note("item" if name == "_local_scalar_dense" else name)
        return func(*args, **(kwargs or {}))


class Slots:
    """Follows the plans as the runner does: who holds a slot and how far it is, and whose edits were read."""

    def __init__(self, attention: str) -> None:
        self.cuts = attention == "cpu"
        self.specs: dict[int, SamplerSpec] = {}
        self.computed: dict[int, int] = {}
        self.undecoded: set[int] = set()

    def step(self, plan: StepPlan) -> "Step":
        changes = len(plan.appended)
        for a in plan.admitted:
            self.specs[a.slot], self.computed[a.slot] = a.sampler, a.num_computed
            changes += 5 + bool(a.sampler.bad_words)  # blocks, tokens, length, who drafts, parameters; edits
            self.undecoded = self.undecoded | {a.slot} if a.sampler.bad_words else self.undecoded - {a.slot}
        slots = plan.slots.tolist()
        scored = 0
        for slot, tokens, bits in zip(slots, plan.num_tokens.tolist(), plan.outputs.tolist(), strict=True):
            assert not bits & PROMPT_LOGPROBS or self.computed[slot] < self.specs[slot].num_prompt - 1
            scored += bool(bits & PROMPT_LOGPROBS)
            self.computed[slot] += tokens
        sampled = [slot for slot, bits in zip(slots, plan.outputs.tolist(), strict=True) if bits & SAMPLE]
        decoded = self.undecoded & set(sampled)
        self.undecoded -= decoded
        chunks = int((plan.num_tokens > 1).sum()) if self.cuts else 0
        return Step(
            [self.specs[s] for s in sampled],
            scored,
            self.cuts and bool((plan.num_tokens == 1).any()),
            chunks,
            changes,
            len(decoded),
        )


@dataclass(frozen=True)
class Step:
    """The facts that decide how much a step reads: its sampled rows, its scored prompts, whether decode contexts are
    cut up, the chunks that PyTorch's kernel does, changes of tables, edits that are new."""

    rows: list[SamplerSpec]
    scored: int
    cutting: bool
    chunks: int
    changes: int
    decoded: int

    @property
    def result(self) -> int:
        """Reads inside READ_BACK."""
        return SCORED_READS * (len(self.groups) + self.scored)

    @property
    def groups(self) -> set[tuple[int, ...]]:
        """Rows that are scored together: by ids that were asked for, or ()."""
        return {s.logprob_ids for s in self.rows if s.logprob_ids or s.num_logprobs is not None}

    @property
    def hot(self) -> Counter[tuple[str, str]]:
        """Reads before it."""
        expected: Counter[tuple[str, str]] = Counter()
        counts = self.count()
        for place, call, number, per, _ in HOT_READS:
            expected[place, call] += number * counts[per]
        return +expected

    def count(self) -> dict[str, int]:
        """Counts of a step: passes of the sampler and their parts, batches drawn, rows edited."""
        rewritten = [s for s in self.rows if s.bad_words or s.presence_penalty]
        plain = [s for s in self.rows if not s.bad_words and not s.presence_penalty]
        passes = [rows for rows in (plain, rewritten) if rows]
        greedy = not any(s.temperature or s.bad_words or s.presence_penalty for s in self.rows)
        ids = sum(bool(group) for group in self.groups)
        return {
            "step": 1,
            "change": self.changes,
            "cutting": self.cutting,
            "chunk": self.chunks,
            "mixed": bool(self.rows) and not greedy,
            "pass": len(passes),
            "settling": 0 if greedy else len(passes),
            "rewriting": bool(rewritten),
            "decoding": self.decoded,
            "bad words": sum(bool(s.bad_words) for s in rewritten),
            "penalizing": any(s.presence_penalty for s in rewritten),
            "drawing": sum(any(s.temperature and not s.top_k and s.top_p == 1 for s in rows) for rows in passes),
            "filtering": sum(any(s.top_k or s.top_p < 1 for s in rows) for rows in passes),
            "sorting": sum(any(s.top_p < 1 for s in rows) for rows in passes),
            "scoring": len(self.groups),
            "scoring ids": ids,
            "ranking": len(self.groups) - ids + self.scored,
        }


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "num_logprobs": 3},
    {"top_k": 5},
    {"presence_penalty": 1.0},
    {"bad_words": ((3, 4), (5,))},
    {"top_p": 0.9},  # of logits so flat that more than the largest 256 are kept
    {"temperature": 0.0, "num_prompt_logprobs": 2},
    {"logprob_ids": (1, 2)},
    {"top_k": 5, "presence_penalty": -1.0, "bad_words": ((7,),), "num_logprobs": 1},
)


@pytest.fixture
def small_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Engine]:
    """Makes an engine at depth 2 on a random model, with few blocks and a small budget."""
    monkeypatch.setattr(dummy, "SCALE", 0.3)  # flat logits, and yet no two alike: ties are sorted, with reads of it
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, rms_norm_eps=1e-6)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "float32", **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = dict(load_format="dummy", dtype="float32", skip_tokenizer_init=True, num_threads=1)
    batch: dict[str, Any] = dict(max_num_seqs=6, max_num_batched_tokens=48, num_gpu_blocks_override=18, block_size=16)
    return lambda: assemble(EngineConfig.from_flat(model=str(tmp_path), async_depth=2, **options, **batch))


def requests(number: int) -> list[NewRequest]:
    """Prompts of 1 to 80 tokens, every kind of sampling in turn."""
    made = []
    for handle in range(number):
        random = np.random.default_rng(handle)
        prompt = random.integers(0, VOCAB, random.integers(1, 81), dtype=np.uint32)
        spec = SamplerSpec(seed=handle, num_prompt=len(prompt), **KINDS[handle % len(KINDS)])
        ids, tokens = prompt.tobytes(), int(random.integers(1, 40))
        made.append(NewRequest(handle=handle, request_id=str(handle), token_ids=ids, max_tokens=tokens, sampler=spec))
    return made


def run(engine: Engine, waiting: Sequence[NewRequest], during: Callable[[], None]) -> int:
    """Feed the requests, one every three steps, to the end. Returns the number of requests that ended."""
    core, ended, coming = engine.core, 0, list(waiting)
    while coming or core.has_work:
        if coming:
            core.add(coming.pop(0))
        for _ in range(3):
            ended += len(core.step().finished)
            during()
    return ended


@pytest.mark.parametrize("attention", ["native", "cpu"])
def test_reads_of_a_step(attention: str, small_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the worker's thread: exactly the table's reads before the result, and the result's own."""
    steps: list[tuple[Step, Reads]] = []
    slots, whole = Slots(attention), StepRunner.run

    def watched(self: StepRunner, plan: StepPlan, *masks: Any) -> StepResult:
        assert threading.current_thread().name == "quire-worker"
        with Reads().watched() as reads:
            result = whole(self, plan, *masks)
        steps.append((slots.step(plan), reads))
        return result

    monkeypatch.setattr(StepRunner, "run", watched)
    able = SUPPORTS["attention"]
    monkeypatch.setitem(SUPPORTS, "attention", {name: able[name] for name in (attention, "ref")})
    engine = small_engine()
    if engine.kernels.attention.__name__.rpartition(".")[2] != attention:
        pytest.skip(f"no {attention} attention on this machine")
    assert run(engine, requests(NUM_REQUESTS), lambda: None) == NUM_REQUESTS
    assert len(steps) > 180 and engine.core.scheduler.num_preempted > 0
    engine.close()
    for number, (step, reads) in enumerate(steps):
        more, less = reads.hot - step.hot, step.hot - reads.hot
        assert not more and not less, f"step {number} reads more: {more}, less: {less}, of {step.count()}"
        assert reads.result.total() == step.result, f"step {number} reads {reads.result} for {step}"
    seen = Counter[str]()
    for step, _ in steps:
        seen.update({name: bool(count) for name, count in step.count().items()})
    if attention == "native":  # it neither cuts nor asks
        seen.update({"cutting": 6, "chunk": 6})
    assert min(seen.values()) > 5, f"some of the table was hardly used: {seen}"


def test_waits_of_a_step(small_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine's thread: one wait for each step that is confirmed, inside `collect`."""
    real = threading.Lock
    monkeypatch.setattr(threading, "Lock", lambda: Lock(real()))
    engine = small_engine()
    core, executor = engine.core, engine.core.executor
    step = core.step
    calls: Counter[str] = Counter()
    found: list[tuple[str, bool]] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    def watched() -> Any:
        with watched_waits(found):
            return step()

    monkeypatch.setattr(executor, "submit", counted("submit", executor.submit))
    monkeypatch.setattr(executor, "collect", counted("collect", executor.collect))
    monkeypatch.setattr(core, "step", watched)

    ahead: list[int] = []

    def check() -> None:
        assert found == [("SimpleQueue.get", True)] * calls["collect"], found[-3:]
        ahead.append(calls["submit"] - calls["collect"])

    assert run(engine, requests(NUM_REQUESTS), check) == NUM_REQUESTS
    assert calls["submit"] == calls["collect"] > 180
    assert ahead.count(1) > 180, "the core did not run one step ahead"
    engine.close()


ONE_READ: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x[0].item(),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: np.asarray(x),
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: x.to(device=torch.device("cpu")),
    lambda x: bool(x[0]),
    lambda x: int(x[0]),
    lambda x: float(x[0]),
    lambda x: range(x[0]),
    lambda x: [1, 2, 3][x[0]],
    lambda x: x[: x[1]],
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: torch.where(x > 0),
    lambda x: x.masked_select(x > 0),
    lambda x: torch.equal(x, x),
    lambda x: x.unique(),
    lambda x: torch.repeat_interleave(x),
    lambda x: x.clone().index_put_((x > 1,), x[2]),
    lambda x: x[0] if x.any() else x,
    lambda x: 1 in x,
    lambda x: f"{x[0]:d}",
    lambda x: x.bincount(),
)


@pytest.mark.parametrize("inference", [False, True])
def test_the_counter_of_reads_counts(inference: bool) -> None:
    for i, read in enumerate(ONE_READ):
        with torch.inference_mode(inference), Reads().watched() as reads:
            read(torch.tensor([0, 1, 2]))
        assert sum(reads.hot.values()) == 1, (i, reads.hot)
    with torch.inference_mode(inference), Reads().watched() as reads:
        x = torch.arange(4)
        rows = (x + 1)[torch.tensor([1, 2])].to(torch.float32).clone().masked_fill_(torch.tensor([True, False]), 0.0)
        assert len(rows) == rows.shape[0] == torch.from_numpy(np.ones(2)).numel()
        torch.repeat_interleave(x, output_size=6)
        x[torch.tensor([0])] = 5
    assert not reads.hot


def test_the_counter_of_waits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Lock
    monkeypatch.setattr(threading, "Lock", lambda: Lock(real()))
    full: Any = queue.Queue()
    full.put(1)
    future: Future[int] = Future()
    future.set_result(1)
    lock = threading.Lock()
    ways: list[Callable[[], Any]] = [
        lambda: time.sleep(0),
        lambda: threading.Event().wait(1e-4),
        lambda: lock.acquire(timeout=0.1),
        lambda: full.get(),
        lambda: future.result(),
        lambda: threading.Thread(target=len, args=("",)).start(),
    ]
    for i, way in enumerate(ways):
        found: list[tuple[str, bool]] = []
        with watched_waits(found):
            way()
        assert found and not any(inside for _, inside in found), i
    lock.release()
    found = []
    with watched_waits(found), lock:
        pass
    assert found == [("lock.acquire", False)]
