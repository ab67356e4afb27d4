"""The products that the kernel of one row takes, those that it leaves to others, and its results through the layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from quire.contracts.scheme import Scheme
from quire.kernels import pdl
from quire.kernels.experts import scaled as scaled_experts
from quire.kernels.experts.scaled_stack import Stack
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.linear import scaled, weight_only_hopper
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.norm import ref as norms
from quire.kernels.one_row import experts, linear, product
from quire.kernels.one_row.product import Form, Tiling, Weight, tiling_of
from quire.kernels.quantize.triton import FIXED, GROUP, TOKEN

from ...support.one_row import COMPILER, MULTIPROCESSORS, SHARED, emulate
from ...support.quantized_matrices import SCHEMES, Inputs, make
from ...support.quantized_matrices import product as exact

FOUR_BITS = Scheme(values="w4", block=(1, 128), zeros=True)
EPS = 1e-5
BLOCKS, CHANNELS = (GROUP, GROUP), (0, TOKEN)  # outputs that share a scale, and rule of activations
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs a compiler")


class Launches(list[dict[str, Any]]):
    """A stand-in for the kernel, which keeps how it is launched."""

    def launch(self, grid: tuple[int], block: tuple[int], args: object, **options: Any) -> None:
        """Keep the arguments of a launch."""
        self.append({"blocks": grid[0], **options})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches on a GPU with few multiprocessors, which are kept and not run."""
    kept = Launches()
    monkeypatch.setattr(product, "kernel_of", lambda *_: kept)
    monkeypatch.setattr(product, "multiprocessors", lambda: MULTIPROCESSORS)
    monkeypatch.setattr(product, "shared_memory", lambda: SHARED)
    monkeypatch.setattr(product, "runs_on_hopper", lambda _: True)
    monkeypatch.setattr(pdl, "in_use", lambda: True)
    return kept


def offered(kind: str, **given: Any) -> bool:
    """Return True if a dense product is taken: of one row of 256 numbers, with 64 outputs, but for what is given."""
    (n, k), rows, act = given.get("shape", (64, 256)), given.get("rows", 1), given.get("act", "")
    first = given.get("first", 0)
    x = torch.zeros(rows, k + 8, dtype=given.get("dtype", torch.bfloat16))[:, first : first + k]
    if given.get("strided"):
        x = torch.zeros(k, 2, dtype=x.dtype).t()[:1]
    y = torch.empty(rows, n, dtype=torch.float32 if given.get("wide") else x.dtype)
    bias = torch.zeros(n, dtype=x.dtype) if given.get("bias") else None
    residual = torch.zeros(rows, n, dtype=given["residual"]) if "residual" in given else None
    into = Epilogue(y, bias, act, residual)
    norm = (torch.zeros(k, dtype=given["norm"]), EPS) if "norm" in given else None
    if kind == "scaled":
        values, scales = torch.zeros(n << (act != ""), k, dtype=torch.float8_e4m3fn), torch.ones(1, -(-k // 128))
        block, rule = given.get("block", GROUP), given.get("rule", GROUP)
        packed = Scaled(values, scales, scales, block, rule, False, None, scales, SCHEMES["fp8 blocks"])
        done = linear.scaled(x, packed, into, norm)
    else:
        scales = torch.ones(1, 1, 16, dtype=given.get("scales", torch.float32))
        weight = Weight(torch.zeros(1, 1, 32, 4, dtype=torch.int32), scales, None, n)
        done = linear.words(x, weight, given.get("bits", 4), given.get("group", GROUP), into, norm)
    assert done is None or done is y
    return done is not None


TAKEN: list[dict[str, Any]] = [
    {},
    {"act": "silu", "norm": torch.bfloat16},
    {"wide": True},
    {"residual": torch.bfloat16},
    {"shape": (32, 256), "act": "silu"},
    {"shape": (80, 128)},
    {"first": 4},
]
LEFT: list[dict[str, Any]] = [
    {"rows": 0},
    {"rows": 2},
    {"dtype": torch.float16},
    {"norm": torch.float32},
    {"residual": torch.float32},
    {"bias": True},
    {"act": "gelu"},
    {"act": "gelu_tanh"},
    {"act": "swiglu_oai"},
    {"shape": (48, 256)},  # units for fewer multiprocessors
    {"shape": (24, 256), "act": "silu"},
    {"shape": (72, 256)},  # no whole units
    {"shape": (68, 256), "act": "silu"},
    {"shape": (64, 192)},
    {"strided": True},
    {"first": 2},  # loads have 8 bytes
]


@pytest.mark.parametrize("given", TAKEN, ids=str)
@pytest.mark.parametrize("kind", ["scaled", "words"])
def test_a_product_is_taken(
    kind: str, given: dict[str, Any], launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offered(kind, **given)
    assert len(launches) == 1 and launches[0]["pdl"]
    monkeypatch.setattr(product, "runs_on_hopper", lambda _: False)
    assert not offered(kind, **given)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((kind, given) for kind in ("scaled", "words") for given in LEFT),
        *(("scaled", given) for given in ({"block": 0}, {"block": 1}, {"rule": TOKEN}, {"rule": FIXED})),
        *(("words", given) for given in ({"bits": 8}, {"group": 64}, {"group": 256}, {"scales": torch.int32})),
    ],
    ids=str,
)
def test_a_product_is_left_to_others(kind: str, given: dict[str, Any], launches: Launches) -> None:
    assert not offered(kind, **given)
    assert not launches


def routed(launches: Launches, join: Callable[[], bool] | None = None, **given: Any) -> bool:
    """Return True if experts are taken: 4 of one row, of 256 numbers and 128 between, but for what is given."""
    hidden, inner, picks = given.get("hidden", 256), given.get("inner", 128), given.get("picks", 4)
    act, biased, rows = given.get("act", "silu"), given.get("biased", False), given.get("rows", 1)
    kinds = given.get("kinds", (BLOCKS, BLOCKS))

    def stack(n: int, k: int, kind: tuple[int, int]) -> Stack:
        values = torch.zeros(2, n, k, dtype=torch.float8_e4m3fn)
        return Stack(values, torch.ones(2, 1, 2), *kind, False, None, SCHEMES["fp8 blocks"])

    up, down = stack(inner << (act not in ("", "relu2")), hidden, kinds[0]), stack(hidden, inner, kinds[1])
    biases = (torch.zeros(2, 2 * inner), torch.zeros(2, hidden)) if biased else (None, None)
    packed = ExpertWeights(up, down, act, *biases)
    x = torch.zeros(rows, hidden, dtype=given.get("dtype", torch.bfloat16))
    residual = torch.zeros(rows, hidden, dtype=given.get("residual", x.dtype))
    chosen = torch.zeros(rows, picks, dtype=torch.int32), torch.ones(rows, picks)
    count = len(launches)
    taken = experts.run(x, chosen, packed, residual, residual, join)
    assert len(launches) == count + 2 * taken
    return taken


@pytest.mark.parametrize("given", [{}, {"picks": 1}, {"picks": 16}, {"inner": 256}, {"hidden": 128}], ids=str)
def test_experts_are_taken(given: dict[str, Any], launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second product starts beside the first one, unless a join comes between: it is asked after the first one."""
    assert routed(launches, **given)
    assert [one["pdl"] for one in launches] == [True, True]
    for joins in (False, True):
        launches.clear()
        asked = list[int]()

        def join(joins: bool = joins, asked: list[int] = asked) -> bool:
            asked.append(len(launches))
            return joins

        assert routed(launches, join, **given)
        assert [one["pdl"] for one in launches] == [True, not joins] and asked == [1]
    monkeypatch.setattr(product, "multiprocessors", lambda: 132)
    assert not routed(launches, **given), "few outputs"


@pytest.mark.parametrize(
    "given",
    [
        {"rows": 0},
        {"rows": 2},
        {"dtype": torch.float16},
        {"residual": torch.float32},
        {"act": ""},
        {"act": "relu2"},
        {"act": "gelu"},
        {"act": "swiglu_oai"},
        {"biased": True},
        {"picks": 17},
        {"hidden": 192},
        {"inner": 192},
        {"kinds": (CHANNELS, CHANNELS)},
        {"kinds": (BLOCKS, CHANNELS)},
        {"kinds": (CHANNELS, BLOCKS)},
        {"kinds": (BLOCKS, (GROUP, FIXED))},
        {"kinds": ((1, GROUP), BLOCKS)},
    ],
    ids=str,
)
def test_experts_are_left_to_others(given: dict[str, Any], launches: Launches) -> None:
    """Their join is not called."""

    def join() -> bool:
        raise AssertionError("joined")

    assert not routed(launches, join, **given)


def test_experts_of_other_ranks_are_left_to_others(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, (x, weights, ids, _) = expert_case("fp8 blocks")
    called = list[Tensor]()
    monkeypatch.setattr(scaled_experts, "few", lambda *given, **_: called.append(given[0]))
    scaled_experts.run(x, weights, ids, packed, torch.arange(4, dtype=torch.int32))
    assert called == [x] and not launches
    scaled_experts.run(x, weights, ids, packed)
    assert called == [x] and len(launches) == 2


def test_the_sums_of_a_block_have_room(launches: Launches) -> None:
    form = Form(8, 128)
    row, unit = (product.shared_bytes(form, tiling_of(form), own) for own in (0, 1))
    own = (SHARED - row) // (unit - row)
    assert offered("scaled", shape=(16 * MULTIPROCESSORS * own, 128))
    assert launches[0]["shared_bytes"] <= SHARED and launches[0]["blocks"] == MULTIPROCESSORS
    assert not offered("scaled", shape=(16 * MULTIPROCESSORS * own + 16, 128))


def close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if actual.dtype == torch.float32 else 4e-3), error


@needs_compiler
@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 blocks ue8m0", "w4"])
def test_layers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of a linear layer that may run the kernel; nothing else can run on a CPU."""
    kernel = weight_only_hopper if kind == "w4" else scaled
    inputs = make(FOUR_BITS if kind == "w4" else SCHEMES[kind], 1, 256, 384)
    emulate(monkeypatch, tmp_path, Tiling(2, 2))
    x, norm = inputs.x.bfloat16(), (torch.rand(384) + 0.5).bfloat16()
    residual = torch.randn(1, 256).bfloat16()

    def truth(x: Tensor) -> Tensor:
        return exact(Inputs(x.float(), inputs.matrix, torch.zeros(256)))

    def gated(sums: Tensor) -> Tensor:
        return silu(sums[:, :128]) * sums[:, 128:]

    plain, both = kernel.pack(inputs.matrix), kernel.pack_gated(inputs.matrix)
    normed = norms.rms_norm(x, norm, EPS)
    close(kernel.run(x, plain, None), truth(x))
    close(kernel.run_float(x, plain, None), truth(x))
    close(kernel.run_add(x, plain, None, residual.clone()), truth(x) + residual.double())
    close(kernel.run_gated(x, both, None), gated(truth(x)))
    close(kernel.run_norm(x, norm, EPS, plain, None), truth(normed))
    close(kernel.run_norm_gated(x, norm, EPS, both, None), gated(truth(normed)))


def expert_case(kind: str) -> tuple[Any, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return 4 packed experts, a row, weights and ids of 3 of them, one of them none, and their sum in float64."""
    matrices = [(make(SCHEMES[kind], 1, 256, 256, i), make(SCHEMES[kind], 1, 256, 128, 9 + i)) for i in range(4)]
    first, second = matrices[0]
    packed = scaled_experts.empty(4, first.matrix, second.matrix, torch.device("cpu"))
    x, ids, weights = first.x.bfloat16(), torch.tensor([[3, -1, 1]], dtype=torch.int32), torch.rand(1, 3)
    total = torch.zeros(1, 256, dtype=torch.float64)
    for place, (up, down) in enumerate(matrices):
        scaled_experts.put(packed, place, up.matrix, down.matrix)
        if place in ids:
            sums = exact(Inputs(x.float(), up.matrix, torch.zeros(256)))
            h = (silu(sums[:, :128]) * sums[:, 128:]).bfloat16()
            factor = weights[ids == place].double()
            total += factor * exact(Inputs(h.float(), down.matrix, torch.zeros(256)))
    return packed, (x, weights, ids, total)


@needs_compiler
@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 blocks ue8m0"])
def test_layers_of_experts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, tmp_path, Tiling(2, 3))
    packed, (x, weights, ids, total) = expert_case(kind)
    close(scaled_experts.run(x, weights, ids, packed), total)
    residual = torch.randn(1, 256).bfloat16()
    added = residual.clone()
    assert scaled_experts.run(x, weights, ids, packed, residual=added) is added
    close(added, total + residual.double())
