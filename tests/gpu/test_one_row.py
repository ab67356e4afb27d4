"""Products of one row in CUDA C++, beside the kernels in Triton that they replace."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.cuda_source import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

from quire.kernels.experts import scaled as scaled_experts
from quire.kernels.experts.scaled_stack import Packed, Stack
from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.linear import scaled_few, weight_only_hopper
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.norm.triton import rms_norm
from quire.kernels.one_row import experts, linear
from quire.kernels.one_row.product import Weight
from quire.kernels.quantize.triton import GROUP
from quire.kernels.triton_runtime import missing_hopper
from quire.kernels.weight_only import words

from ..support.late_kernels import LateCopy
from ..support.quantized_cases import SCALED, WEIGHT_ONLY, make_matrix

needs_words = pytest.mark.skipif(bool(missing_hopper()), reason=missing_hopper() or "runs")
TIMES, TOLERANCE, EPS = 50, 6e-3, 1e-6
# outputs (of gate), inputs, gated, normed, added to a residual: of models with 8 and 70 billion parameters
SIZES = [
    (6144, 4096, False, True, False),
    (4096, 4096, False, False, True),
    (12288, 4096, True, True, False),
    (4096, 12288, False, False, True),
    (28672, 8192, True, True, False),
    (8192, 28672, False, False, True),
]
EXPERTS = [(128, 8, 2048, 768), (16, 8, 7168, 2048), (64, 16, 2048, 512)]  # experts, picks, hidden, inner


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("n", "k", "gated", "normed", "added"), SIZES)
@pytest.mark.parametrize("powers", [False, True])
def test_eight_bits(n: int, k: int, gated: bool, normed: bool, added: bool, powers: bool) -> None:
    packed = eight_bits(n << gated, k, powers)
    x, norm, residual = row(k), norm_of(k) if normed else None, row(n) if added else None
    own, eps = norm or (None, 0.0)
    expected = scaled_few.product(x, packed, into(n, gated, residual), norm=own, eps=eps)
    compare(lambda: linear.scaled(x, packed, into(n, gated, residual), norm), expected)


@needs_words
@pytest.mark.parametrize(("n", "k", "gated", "normed", "added"), SIZES)
@pytest.mark.parametrize("zeros", [False, True])
def test_four_bits(n: int, k: int, gated: bool, normed: bool, added: bool, zeros: bool) -> None:
    weight = four_bits(n, k, gated, zeros)
    x, norm, residual = row(k), norm_of(k) if normed else None, row(n) if added else None
    counters = torch.zeros(n << gated, dtype=torch.int32, device="cuda")
    given = x if norm is None else rms_norm(x, *norm)
    expected = words.product(given, *weight[:3], into(n, gated, residual), bits=4, group=GROUP, counters=counters)
    compare(lambda: linear.words(x, weight, 4, GROUP, into(n, gated, residual), norm), expected)


@pytest.mark.parametrize(("count", "picks", "hidden", "inner"), EXPERTS)
@pytest.mark.parametrize("powers", [False, True])
def test_experts(count: int, picks: int, hidden: int, inner: int, powers: bool) -> None:
    packed, (ids, weights) = stacked(count, hidden, inner, powers), choice(count, picks)
    x, residual = row(hidden), row(hidden)

    def run() -> Tensor:
        y = residual.clone()
        assert experts.run(x, (ids, weights), packed, y, y)
        return y

    expected = residual.clone()
    scaled_experts.few(x, weights, ids, packed, None, expected, expected)
    compare(run, expected)
    ids.fill_(-1)
    assert torch.equal(run(), residual), "no expert is there"


def test_a_graph_reads_new_rows() -> None:
    """Kernels of a layer, which start beside each other, give the bits that each gives alone."""
    x, norm = row(4096), norm_of(4096)
    gate_up, down = eight_bits(2 * 12288, 4096), eight_bits(4096, 12288)
    packed, chosen, residual = stacked(32, 4096, 768), choice(32, 8), torch.empty_like(x)

    def layers() -> Tensor:
        y = residual.copy_(x)
        for _ in range(3):
            h = linear.scaled(y, gate_up, into(12288, True), norm)
            assert h is not None and linear.scaled(h, down, Epilogue(y, residual=y)) is y
            assert experts.run(y, chosen, packed, y, z := torch.empty_like(y))
            y = z
        return y

    layers()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        found = layers()
    for _ in range(TIMES):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        again = found.clone()
        assert again.isfinite().all() and torch.equal(again, layers())


def test_nothing_is_read_before_its_kernel_has_ended(tmp_path: Path) -> None:
    """The row and the choice of experts come late, from the kernel before the last one."""
    copy, packed, weight = LateCopy(tmp_path), stacked(32, 4096, 768), eight_bits(6144, 4096)
    x, norm, residual = row(4096), norm_of(4096), row(4096)
    ids, weights = choice(32, 8)

    def product(x: Tensor) -> Tensor | None:
        return linear.scaled(x, weight, into(6144, False), norm)

    def chosen(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert experts.run(x, (ids, weights), packed, residual, y := torch.empty_like(x))
        return y

    wanted, added = product(x), chosen(x, ids, weights)
    assert wanted is not None
    for _ in range(3):
        late = torch.full_like(x, torch.nan)
        copy.launch(x, late)
        assert torch.equal(wanted, not_none(product(late)))
        for given in (x, ids, weights):
            late = torch.full_like(given, 1)
            copy.launch(given, late)
            assert torch.equal(added, chosen(*(late if one is given else one for one in (x, ids, weights))))


@needs_words
@pytest.mark.parametrize("kind", ["w4 128", "w4 32 order", "w8 128", "mxfp4"])
def test_the_norm_of_weights_in_words(kind: str) -> None:
    """Rows are normed by the kernel, or by another one before: bits are the same then, with a bias and without."""
    matrix = make_matrix(WEIGHT_ONLY[kind], 4096, 1024, torch.device("cuda", 0))
    plain, gated = weight_only_hopper.pack(matrix), weight_only_hopper.pack_gated(matrix)
    norm, bias = torch.rand(1024, device="cuda").bfloat16() + 0.5, torch.randn(4096, device="cuda").bfloat16()
    for rows in (1, 2, 40, 300):
        x = torch.randn(rows, 1024, device="cuda").bfloat16() * 3
        normed = rms_norm(x, norm, EPS)
        for own in (bias, None):
            found = weight_only_hopper.run_norm(x, norm, EPS, plain, own)
            both = weight_only_hopper.run_norm_gated(x, norm, EPS, gated, own)
            wanted = weight_only_hopper.run(normed, plain, own), weight_only_hopper.run_gated(normed, gated, own)
            if rows == 1 and kind == "w4 128" and own is None:
                assert near(found, wanted[0]) and near(both, wanted[1])
            else:
                assert torch.equal(found, wanted[0]) and torch.equal(both, wanted[1])


def eight_bits(n: int, k: int, powers: bool = False) -> Scaled:
    """Return a weight of random numbers of 8 bits in blocks, whose product with normal inputs is about 1."""
    values, scales = blocks(n, k)
    counters = torch.zeros(1, dtype=torch.int32, device="cuda")
    return Scaled(values, scales, scales, GROUP, GROUP, powers, None, counters, SCALED["fp8 block"])


def blocks(*shape: int) -> tuple[Tensor, Tensor]:
    """Return numbers [.., N, K] and scales of a weight, as `eight_bits`."""
    *many, n, k = shape
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in values.view(-1, n, k):
        part.copy_(torch.randn(n, k, device="cuda").mul_(4))
    return values, (torch.rand(*many, n // GROUP, k // GROUP, device="cuda") + 0.5) / (4 * k**0.5)


def stacked(count: int, hidden: int, inner: int, powers: bool = False) -> Packed:
    """Return the weights of experts, as `eight_bits`."""
    sizes = (2 * inner, hidden), (hidden, inner)
    scheme = SCALED["fp8 block"]
    first, second = (Stack(*blocks(count, *size), GROUP, GROUP, powers, None, scheme) for size in sizes)
    return ExpertWeights(first, second)


def four_bits(n: int, k: int, gated: bool, zeros: bool) -> Weight:
    """Return a weight of random words, with N outputs of gate if `gated`."""
    rows = n << gated
    values = torch.randint(256, (rows, k // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(rows, k // GROUP, device="cuda") + 0.5) / (5 * k**0.5)
    points = torch.randint(16, (rows, k // GROUP), dtype=torch.uint8, device="cuda")
    own = words.repack_scales(points, gated) if zeros else None
    return Weight(words.repack(values, 4, gated), words.repack_scales(scales, gated), own, n)


def row(k: int) -> Tensor:
    """Return a row of K normal numbers."""
    return torch.randn(1, k, device="cuda").bfloat16()


def norm_of(k: int) -> tuple[Tensor, float]:
    """Return the weight of a norm, and its eps."""
    return torch.rand(k, device="cuda").bfloat16() + 0.5, EPS


def choice(count: int, picks: int) -> tuple[Tensor, Tensor]:
    """Return ids and weights of experts; one id is -1."""
    ids = torch.randperm(count, device="cuda")[None, :picks].int()
    ids[0, 1] = -1
    return ids, torch.rand(1, picks, device="cuda") + 0.1


def into(n: int, gated: bool, residual: Tensor | None = None) -> Epilogue:
    """Return an epilogue with a result of its own; it overwrites a copy of the residual."""
    y = torch.empty(1, n, dtype=torch.bfloat16, device="cuda") if residual is None else residual.clone()
    return Epilogue(y, None, "silu" if gated else "", None if residual is None else y)


def compare(run: Callable[[], Tensor | None], expected: Tensor) -> None:
    """Compare results of a function, which have the same bits each time."""
    first = not_none(run())
    assert near(first, expected)
    for _ in range(TIMES):
        assert torch.equal(not_none(run()), first)


def near(actual: Tensor, expected: Tensor) -> bool:
    """Return True if both differ by less than the tolerance."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < TOLERANCE)


def not_none(result: Tensor | None) -> Tensor:
    """Return a result of the kernel. Raises AssertionError where it refused the product."""
    assert result is not None, "the product is not for this kernel"
    return result
