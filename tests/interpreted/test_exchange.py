"""The experts' exchange between ranks: processes whose memory is a shared file stand for GPUs.

A rank runs steps with changing counts in buffers that were full of NaN, and sleeps at random between and inside
kernels. It computes all ranks' parts by the reference, so that it can check its own.
"""

import functools
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")

from quire.contracts.scheme import Wire
from quire.kernels import triton_runtime
from quire.kernels.comm.exchange import Layout, Slots
from quire.kernels.comm.exchange_ref import Replica, combined, dispatched
from quire.kernels.experts import ref, scaled, triton
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.quantize.rows import QuantizedRows

from ..support.forks import Forks
from ..support.full import FULL, full_rows
from ..support.quantized_cases import SCALED, make_matrix
from ..support.triton_interpreter import repair_interpreter

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime import interpreter

from quire.kernels.comm import Peers, triton_exchange

BLOCKS, ROWS, EXPERTS, INNER = 4, 24, 7, 8
NAN = bytes.fromhex("c07f")  # of bfloat16 and float32, and a large int32
FAULTS = ("next slot", "wrong scale", "no barrier A", "no barrier B")
HELD = 2  # a step with rows of all ranks: rank 1 is late
PAGE = 4096
DIRECT = (0, 7 if FULL else 4)  # steps with many rows, and with few
CPU = torch.device("cpu")
WIRES = (Wire("int8"), Wire("e4m3"), Wire("e4m3", 128), Wire("e4m3", 128, True))


@dataclass(frozen=True)
class Part:
    """Steps with one layout, in buffers of their own. A step: (bound, count of each replica)."""

    layout: Layout
    dtype: torch.dtype
    steps: tuple[tuple[int, tuple[int, ...]], ...]
    first: int = 0


def parts(ranks: int, each: int) -> list[Part]:
    """The layouts and steps of a test with `ranks` ranks, `each` of a replica.

    Without --full there are fewer steps, and fewest of replicas of several ranks: nothing but the rows that a rank
    brings differs.
    """
    spread, brief = ranks // each, each > 1 and not FULL
    full = ((9, 0, 17), (0, 0, 0), (17, 17, 17), (0, 17, 1), (1, 0, 0), (5, 16, 2), (0, 3, 17))
    some = full if FULL else full[:3]
    steps = tuple((-(-17 // each), (counts * 3)[:spread]) for counts in some)
    layout = Layout(ranks=ranks, rows=ROWS, hidden=160, top_k=3, item_bytes=4)
    few = ((1, ((1, 0, 1) * 3)[:spread]), (2, ((2 * each, 1, 0) * 3)[:spread]))
    whole = ((ROWS, ((ROWS * each, 2, ROWS) * 3)[:spread]),)
    made = [
        Part(layout, torch.float32, steps + few + (() if brief else whole)),
        *(() if brief else (Part(replace(layout, item_bytes=2), torch.bfloat16, steps[:2]),)),
        Part(layout, torch.float32, ((2, ((9, 5, 0) * 3)[:spread]),), first=4),
    ]
    made += [
        Part(replace(layout, hidden=32, top_k=k), torch.float32, few)
        for k in (range(1, 9) if ranks == 2 else () if brief else (1, 8))
    ]
    made += [
        Part(replace(layout, hidden=384, wire=wire), torch.float32, (steps[1], few[1]))
        for wire in (WIRES if ranks == 2 else WIRES[::2][brief:])
    ]
    return made


def replica(part: Part, number: int, seed: int, count: int, rows: int) -> Replica:
    """The rows of a replica in a step: random, NaN behind its count. An expert may come twice, or be -1.

    In e4m3 x is exact, since the interpreter loses the carry of a number that is rounded up to a power of two.
    """
    random_ = torch.Generator().manual_seed(1000 * seed + number)
    x = torch.randn(rows, part.layout.hidden, generator=random_)
    ids = torch.randint(-1, EXPERTS, (rows, part.layout.top_k), generator=random_, dtype=torch.int32)
    weights = torch.rand(rows, part.layout.top_k, generator=random_)
    if part.layout.wire.values == "e4m3":
        x = x.mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        x[:, ::128] = 448
        if part.layout.wire.group:
            x *= 2.0 ** torch.arange(-10, -7).repeat_interleave(128)  # the scale of each group
    x[count:], weights[count:], ids[count:] = torch.nan, torch.nan, 1 << 30
    return Replica(x.to(part.dtype), ids, weights, count)


def packed(hidden: int, dtype: torch.dtype) -> ref.Packed:
    """The weights of all experts."""
    random_ = torch.Generator().manual_seed(hidden)
    return ExpertWeights(
        torch.randn(EXPERTS, 2 * INNER, hidden, generator=random_).mul(0.1).to(dtype),
        torch.randn(EXPERTS, hidden, INNER, generator=random_).mul(0.3).to(dtype),
    )


def addresses(folder: Path, name: str, size: int, ranks: int) -> list[Tensor]:
    """The memory of all ranks, mapped."""
    return [
        torch.from_file(str(folder / f"{name}{rank}"), shared=True, size=size, dtype=torch.uint8)
        for rank in range(ranks)
    ]


Sent = tuple[Tensor | QuantizedRows, Tensor, Tensor]  # x, weights, ids


def check_rows(got: Sent, expected: Sent) -> None:
    """ids say which rows are here; these are as the reference has them, to the bit."""
    (x, weights, ids), (want_x, want_weights, want_ids) = got, expected
    assert torch.equal(ids, want_ids), "ids"
    assert torch.equal(weights, want_weights), "weights"
    here = (want_ids >= 0).any(1)
    if isinstance(x, QuantizedRows):
        assert isinstance(want_x, QuantizedRows) and x.dtype == want_x.dtype
        assert torch.equal(x[here].scales, want_x[here].scales), "scales"
        x, want_x = x.values.view(torch.uint8), want_x.values.view(torch.uint8)
    assert isinstance(want_x, Tensor)
    assert torch.equal(x[here], want_x[here]), "x"


def as_numbers(sent: Sent) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same rows for the experts of these tests, which are unquantized and have no rule for rows."""
    x, *others = sent
    return (x.float().to(x.dtype) if isinstance(x, QuantizedRows) else x, *others)  # type: ignore[return-value]


def check_quantized_experts(got: Sent, expected: Sent, mapping: Tensor, wire: Wire, room: Tensor) -> None:
    """Experts with 8-bit weights take the rows as they came, and write into symmetric memory."""
    scheme = next(one for one in SCALED.values() if one.wire == wire)
    torch.manual_seed(0)
    pairs = [
        (make_matrix(scheme, 256, room.shape[1], CPU), make_matrix(scheme, room.shape[1], 128, CPU))
        for _ in range(max(1, int(mapping.max()) + 1))
    ]
    local = scaled.empty(len(pairs), *pairs[0], CPU)
    for place, pair in enumerate(pairs):
        scaled.put(local, place, *pair)
    y = scaled.run(*got, local, mapping, room)
    assert y.data_ptr() == room.data_ptr()
    here = (expected[2] >= 0).any(1)
    want = ref.run(*expected, [ExpertWeights(*pair) for pair in pairs], mapping)[here]
    far = float((y[here] - want).norm() / want.norm().clamp(min=1e-9))
    assert far < 0.05, f"experts: {far:.1e} {wire}"  # the interpreter halves numbers that round up to a power of two


def run_step(part: Part, slots: Slots, bound: int, counts: tuple[int, ...], seed: int) -> None:
    """Run an exchange, checked against the reference and against the experts on one device."""
    (rank, each), layout = (slots.peers.rank, slots.each), part.layout
    rows = part.first + max(bound * each, *counts)
    everyone = [replica(part, number, seed, count, rows) for number, count in enumerate(counts)]
    owner = torch.randint(
        0, layout.ranks, (EXPERTS,), generator=torch.Generator().manual_seed(seed // 2), dtype=torch.int32
    )
    weights, number = packed(layout.hidden, part.dtype), rank // each
    own = everyone[number]
    given = dict(owner=owner, bound=bound, each=each, first=part.first)
    results = []
    for other in range(layout.ranks):
        mapping = torch.full((EXPERTS,), -1, dtype=torch.int32)
        mine = (owner == other).nonzero()[:, 0]
        mapping[mine] = torch.arange(len(mine), dtype=torch.int32)
        local = ExpertWeights(*(one[mine] for one in weights[:2]))
        sent = dispatched(everyone, rank=other, wire=layout.wire, **given)
        if other != rank:
            results.append(ref.run(*as_numbers(sent), local, mapping))
            continue
        count = torch.tensor([own.count], dtype=torch.int32)
        *found, room = triton_exchange.dispatch(own.x, own.ids, own.weights, count, owner, slots, bound, part.first)
        check_rows(tuple(found), sent)
        here = (sent[2] >= 0).any(1)
        assert not room[here].any(), "y of these rows is zeroed"
        if layout.wire.values and (layout.ranks, each) == (2, 1):
            check_quantized_experts(tuple(found), sent, mapping, layout.wire, room)
        found, sent = as_numbers(tuple(found)), as_numbers(sent)
        if seed in DIRECT:  # the kernel for GPUs writes into symmetric memory
            y = triton.run(*found, local, mapping, room)
            assert y.data_ptr() == room.data_ptr()
        else:
            y = ref.run(*found, local, mapping)
        results.append(y.clone())
        torch.testing.assert_close(y[here], ref.run(*sent, local, mapping)[here], rtol=0.02, atol=0.01)
        got_y = y
    residual = torch.randn(own.x.shape, generator=torch.Generator().manual_seed(seed)).to(part.dtype)
    got = triton_exchange.combine(residual.clone(), got_y, own.ids, count, owner, slots, bound, part.first)
    # Other ranks' kernels may differ from the reference by the order of sums, so their results agree up to that.
    want = combined(residual, everyone, results, number=number, **given)
    far = 1e-5 if part.dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, want, rtol=far, atol=far, msg=lambda text: f"combined: {text}")
    taken = slice(part.first, min(own.count, part.first + bound * each))
    assert torch.equal(got[taken.stop :], residual[taken.stop :]), "rows behind stay"
    if not layout.wire.values:
        alone = ref.run(
            own.x[taken], own.weights[taken], own.ids[taken].clone(), weights, torch.arange(EXPERTS), residual[taken]
        )
        torch.testing.assert_close(got[taken], alone, rtol=3 * far, atol=3 * far, msg=lambda text: f"alone: {text}")


def sleepy(meet: Callable[..., None], rank: int) -> Callable[..., None]:
    """`_meet`, with pauses before and after it in some programs: another rank is then far ahead, or behind."""
    chance = random.Random(rank)

    def paused(*args: object) -> None:
        for doing in (lambda: None, lambda: meet(*args)):
            doing()
            if chance.random() < 0.2:
                time.sleep(chance.random() * 0.05)

    return paused


def in_turns(call: Callable[..., object], folder: Path, rank: int) -> Callable[..., object]:
    """`dispatch` or `combine`. In step HELD rank 1 begins when rank 0 waits for it, or has returned without.

    A call without its barrier then always reads memory that rank 1 has not written, on any machine.
    """
    came = folder / f"came to {call.__name__}"
    steps = itertools.count()

    def turn(*args: object) -> object:
        if next(steps) != HELD or rank > 1:
            return call(*args)
        while rank and not came.exists():
            time.sleep(0.001)
        meet = triton_exchange._meet
        if rank == 0:
            triton_exchange._meet = lambda *given: (came.touch(), meet(*given))
        try:
            return call(*args)
        finally:
            triton_exchange._meet = meet
            came.touch()

    return turn


def yielding(patch: pytest.MonkeyPatch) -> None:
    """Let a rank that waits give its core away."""
    swap = interpreter.InterpreterBuilder.create_atomic_cas

    def slow(*args: object) -> object:
        time.sleep(0.0005)
        return swap(*args)

    patch.setattr(interpreter.InterpreterBuilder, "create_atomic_cas", slow)


def rank_main(rank: int, ranks: int, each: int, fault: str, folder: str) -> None:
    """Run all parts. Ends with an error at the first difference."""
    repair_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        yielding(patch)
        run_parts(rank, ranks, each, fault, Path(folder))


def run_parts(rank: int, ranks: int, each: int, fault: str, folder: Path) -> None:
    """Run all parts with a fault, or with none."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("error")  # torch.empty gives NaN
    triton_exchange.WIDE = 128  # several tiles of columns
    meet = sleepy(triton_exchange._meet, rank)
    triton_exchange._meet = meet
    if fault == "next slot" and rank == 1:
        whole = Slots.y
        Slots.y = lambda self, bound, dtype: whole(self, bound + 1, dtype)[self.layout.ranks :]
    if fault == "wrong scale" and rank == 1:
        exact = triton_exchange.scale_of
        triton_exchange.scale_of = lambda *given: exact(*given) * 2
    if fault.startswith("no barrier"):
        calls = {"no barrier A": "dispatch", "no barrier B": "combine"}[fault]
        real = getattr(triton_exchange, calls)

        @functools.wraps(real)
        def blind(*args: object) -> object:
            triton_exchange._meet = lambda *_: None
            try:
                return real(*args)
            finally:
                triton_exchange._meet = meet

        setattr(triton_exchange, calls, blind)
    for name in ("dispatch", "combine"):
        setattr(triton_exchange, name, in_turns(getattr(triton_exchange, name), folder, rank))
    signals = addresses(folder, "signal", 4 * BLOCKS * ranks, ranks)
    buffers = addresses(folder, "buffer", (folder / "buffer0").stat().st_size, ranks)
    at, seed = 0, 0
    for part in parts(ranks, each):
        size = part.layout.num_bytes
        peers = Peers(
            torch.tensor([one.data_ptr() + at for one in buffers]),
            torch.tensor([one.data_ptr() for one in signals]),
            rank,
            size,
            BLOCKS,
        )
        slots = Slots(peers, part.layout, buffers[rank][at : at + size], each)
        for bound, counts in part.steps if fault != "wrong scale" or part.layout.wire.values else ():
            run_step(part, slots, bound, counts, seed)
            seed += 1
        at += -(-size // PAGE) * PAGE


def run_ranks(forks: Forks, folder: Path, ranks: int, each: int, fault: str = "") -> tuple[list[int], str]:
    """Return the exit codes of the ranks' processes, and what they wrote. All end when one fails."""
    room = sum(-(-part.layout.num_bytes // PAGE) * PAGE for part in parts(ranks, each))
    for rank in range(ranks):
        (folder / f"buffer{rank}").write_bytes(NAN * (room // 2))
        (folder / f"signal{rank}").write_bytes(bytes(4 * BLOCKS * ranks))
    return forks.run(
        folder / "said",
        "tests.interpreted.test_exchange",
        [(rank, ranks, each, fault, folder) for rank in range(ranks)],
    )


@pytest.mark.parametrize(
    ("ranks", "each"),
    [
        (3, 1),
        (4, 2),
        *full_rows(((2, 1), (2, 2), (4, 1), (8, 1), (8, 2))),
    ],
)
def test_rows_reach_their_experts_and_come_back(tmp_path: Path, interpreted: Forks, ranks: int, each: int) -> None:
    codes, said = run_ranks(interpreted, tmp_path, ranks, each)
    assert codes == [0] * ranks, said
    assert all(not any((tmp_path / f"signal{rank}").read_bytes()) for rank in range(ranks)), "signals are 0 after"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(tmp_path: Path, interpreted: Forks, fault: str) -> None:
    codes, said = run_ranks(interpreted, tmp_path, 2, 1, fault)
    assert any(codes) and ("AssertionError" in said or min(codes) < -9), said  # others' ids may end a process


def test_parts_of_a_buffer_are_aligned_and_counted() -> None:
    layout = Layout(ranks=2, rows=4096, hidden=2048, top_k=8, item_bytes=2)
    assert layout.num_bytes == 512 + 4096 * (2048 * 2 + 8 * 4 + 8 * 4 + 2 * 2048 * 2)
    for wire in (layout.wire, *WIRES):
        offsets = list(replace(layout, rows=3, top_k=5, wire=wire).offsets().values())
        assert all(one % 16 == 0 for one in offsets) and offsets == sorted(offsets)
    # The plan of memory needs the layout.
    ask = "import sys, quire.kernels.comm.exchange; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout == "False\n"


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    assert compiled("compile_exchange") == {"_dispatch_kernel", "_combine_kernel"}
