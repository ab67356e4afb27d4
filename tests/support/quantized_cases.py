"""Products with quantized weights against float64, for tests in Triton's interpreter and on a GPU."""

from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.activation import ACTS
from quire.kernels.experts import scaled as experts
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.layer_copies import HostBlock
from quire.kernels.linear import scaled
from quire.kernels.pack.matrix import TYPES, QuantizedMatrix, dequantize, leaves, moved
from quire.kernels.quantize import ref
from quire.kernels.quantize.triton import GROUP, quantize

SCALED = {
    "fp8 block": Scheme(values="e4m3", block=(128, 128), inputs="group"),
    "fp8 block ue8m0": Scheme(values="e4m3", block=(128, 128), inputs="group", ue8m0=True),
    "fp8 block of one row": Scheme(values="e4m3", block=(1, 128), inputs="group"),
    "fp8 channel token": Scheme(values="e4m3", block=(1, 0), inputs="token"),
    "fp8 channel tensor": Scheme(values="e4m3", block=(1, 0), inputs="tensor"),
    "int8 token": Scheme(values="int8", block=(1, 0), inputs="token"),
    "int8 tensor": Scheme(values="int8", block=(1, 0), inputs="tensor"),
}
WEIGHT_ONLY = {
    "w4 128": Scheme(values="w4", block=(1, 128), zeros=True),
    "w4 64 symmetric": Scheme(values="w4", block=(1, 64)),
    "w4 32 order": Scheme(values="w4", block=(1, 32), zeros=True, order=True),
    "w4 channel": Scheme(values="w4", block=(1, 0)),
    "w8 128": Scheme(values="w8", block=(1, 128), zeros=True),
    "w8 channel symmetric": Scheme(values="w8", block=(1, 0)),
    "mxfp4": Scheme(values="e2m1", block=(1, 32)),
    "nvfp4": Scheme(values="e2m1", block=(1, 16), factor=True),
}
WORDS = tuple(kind for kind in WEIGHT_ONLY if kind != "nvfp4")  # those of `weight_only_hopper`


class Products(Protocol):
    """An implementation of `quire.kernels.linear`; each has a class of its own for packed weights."""

    def pack(self, matrix: QuantizedMatrix) -> Any: ...
    def pack_gated(self, matrix: QuantizedMatrix) -> Any: ...
    def run(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor: ...
    def run_add(self, x: Tensor, packed: Any, bias: Tensor | None, residual: Tensor) -> Tensor: ...
    def run_gated(self, x: Tensor, packed: Any, bias: Tensor | None, act: str = "silu") -> Tensor: ...


@runtime_checkable
class NormedProducts(Products, Protocol):
    """An implementation that also fuses the norm of x with the product."""

    def run_norm(self, x: Tensor, weight: Tensor, eps: float, packed: Any, bias: Tensor | None) -> Tensor: ...
    def run_norm_gated(
        self, x: Tensor, weight: Tensor, eps: float, packed: Any, bias: Tensor | None, act: str = "silu"
    ) -> Tensor: ...


class ExpertProducts(Protocol):
    """An implementation of `quire.kernels.experts`."""

    def empty(
        self,
        num_experts: int,
        gate_up: QuantizedMatrix,
        down: QuantizedMatrix,
        device: torch.device,
        form: ExpertForm = PLAIN,
    ) -> Any: ...
    def put(
        self,
        packed: Any,
        place: int,
        gate_up: QuantizedMatrix,
        down: QuantizedMatrix,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> None: ...
    def run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        packed: Any,
        expert_map: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor: ...


FUSES: NormedProducts = scaled  # the implementation that does


@dataclass(frozen=True)
class Call:
    """A product: rows T, outputs N (each of gate and up, if gated), inputs K, and what is fused with it."""

    rows: int
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    bias: bool = False
    residual: bool = False
    act: str = "silu"


CALLS = (
    Call(1, 192, 384, norm=True), Call(1, 256, 256, norm=True, gated=True, bias=True),
    Call(1, 128, 640, residual=True), Call(3, 128, 256, bias=True, residual=True),
    Call(9, 256, 384, norm=True, gated=True), Call(40, 192, 256, norm=True),
    Call(70, 256, 256, bias=True, residual=True), Call(66, 256, 128, gated=True),
)  # fmt: skip
ACTIVATED = tuple(Call(rows, 256, 256, gated=True, bias=True, act=act) for rows in (1, 9, 70) for act in ACTS[1:])
ODD = (  # inputs that are no multiple of 128
    Call(1, 128, 200, norm=True), Call(9, 128, 200, residual=True), Call(20, 128, 328, norm=True, gated=True),
    Call(70, 128, 200, bias=True),
)  # fmt: skip


def make_matrix(scheme: Scheme, n: int, k: int, device: torch.device) -> QuantizedMatrix:
    """A random matrix whose product with normal inputs is about 1. The values of e4m3 have all magnitudes."""
    if scheme.values == "e4m3":
        values = (torch.randn(n, k) * 2.0 ** torch.randint(-4, 8, (n, 1))).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif scheme.values == "int8":
        values = torch.randint(-127, 128, (n, k)).to(torch.int8)
    else:
        values = torch.randint(0, 256, (n, k * scheme.bits // 8), dtype=torch.uint8)
    shape = scheme.scales(n, k)
    middle, typical = {"e4m3": (0, 60), "int8": (0, 74), "w4": (16, 5), "w8": (256, 74), "e2m1": (0, 3)}[scheme.values]
    scale, factor = (torch.rand(shape) + 0.1) / (typical * k**0.5), None
    if scheme.factor:  # rows have factors of several sizes
        factor = (torch.rand(n, 1) + 0.1) * 2.0 ** torch.randint(-8, -5, (n, 1))
        scale = (scale / factor).to(torch.float8_e4m3fn)
    made = QuantizedMatrix(
        scheme,
        values.to(TYPES[scheme.values]),
        scale.log2().round().add(127).to(torch.uint8) if scheme.kind == "mxfp4" else scale,
        torch.randint(0, middle, shape, dtype=torch.uint8) if scheme.zeros else None,
        torch.randperm(k).int() if scheme.order else None,
        torch.tensor(0.05) if scheme.inputs == "tensor" else None,
        factor,
    )
    return cast(QuantizedMatrix, moved(made.check(), device))


def stands_for(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return the numbers that x has after it was quantized by the rule of the matrix, by our kernel, in float64."""
    scheme = matrix.scheme
    if not scheme.inputs:
        return x.double()
    padded = F.pad(x, (0, -x.shape[1] % GROUP))
    q, scales = quantize(
        padded,
        scaled.RULES[scheme.inputs],
        TYPES[scheme.values],
        powers=scheme.ue8m0,
        scale=None if matrix.input_scale is None else matrix.input_scale.view(1),
    )
    spread = scales.t().repeat_interleave(GROUP, 1) if scheme.inputs == "group" else scales.view(-1, 1)
    return (q.double() * spread.double())[: len(x), : x.shape[1]]


def exact_values(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """`stands_for` by the reference of `quire.kernels.quantize`."""
    scheme, given = matrix.scheme, matrix.input_scale
    if scheme.inputs == "tensor":
        assert given is not None
        return (ref.int8_static if scheme.values == "int8" else ref.fp8_static)(x, given).double() * given.double()
    if scheme.inputs == "group":
        q, scales = ref.fp8_groups(x, scheme.ue8m0)
        return q.double() * scales.repeat_interleave(GROUP, 1).double()
    q, scales = (ref.int8_tokens if scheme.values == "int8" else ref.fp8_tokens)(x)
    return q.double() * scales.double()


def compare(
    kernel: Products, scheme: Scheme, call: Call, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """Run the call through `kernel` and compare with float64 on the same quantized activations.

    Four inputs of 128 are 30 or 100 times as large as others (the largest alone would be exact in e4m3), some rows are
    zeros. Raises AssertionError for an error above `tolerance`, relative to the norm of the result, and when the result
    is as near to that of activations that are not quantized.
    """
    n = call.n << call.gated
    matrix = make_matrix(scheme, n, call.k, device)
    x = torch.randn(call.rows, call.k).to(dtype).to(device)
    x[:, torch.arange(call.k) % 128 % 37 == 3] *= 30 if call.gated else 100
    if call.rows > 2:
        x[1] = 0
    norm = torch.rand(call.k).to(dtype).to(device) + 0.5 if call.norm else None
    bias = torch.randn(n).to(dtype).to(device) if call.bias else None
    residual = torch.randn(call.rows, call.n).to(dtype).to(device) if call.residual else None
    normed = x if norm is None else (F.rms_norm(x.float(), (call.k,), eps=1e-6) * norm.float()).to(dtype)
    weight = dequantize(matrix).double()
    order = slice(None) if matrix.order is None else matrix.order.long()

    def expected(inputs: Tensor) -> Tensor:
        y = inputs[:, order] @ weight.t() + (0 if bias is None else bias.double())
        if call.gated:
            y = activated(y, call.act)
        return y if residual is None else y + residual.double()

    packed = (kernel.pack_gated if call.gated else kernel.pack)(matrix)
    assert not isinstance(packed, QuantizedMatrix), "the reference would run"
    through_host_memory(packed)
    if residual is not None:
        y = kernel.run_add(normed, packed, bias, residual.clone())
    elif norm is not None and isinstance(kernel, NormedProducts):
        given = x, norm, 1e-6, packed, bias
        y = kernel.run_norm_gated(*given, call.act) if call.gated else kernel.run_norm(*given)
    elif call.gated:
        y = kernel.run_gated(normed, packed, bias, call.act)
    else:
        y = kernel.run(normed, packed, bias)
    assert y.shape == (call.rows, call.n) and y.dtype == dtype
    truth = expected(stands_for(normed, matrix))
    error = (y.double() - truth).norm() / truth.norm()
    assert error < tolerance, f"{float(error):.2e} {scheme} {call}"
    if scheme.inputs:
        without = (expected(normed.double()) - truth).norm() / truth.norm()
        assert error < without / 1.5, f"{float(error):.2e}: as good as without quantization, {float(without):.2e}"


def through_host_memory(packed: object) -> None:
    """Move a packed weight to host memory and back to other memory of its device. The old memory of matrices is
    overwritten; scales of activations may still be the caller's."""
    tensors = list(leaves(packed))
    device, old = tensors[0].device, [one.view_as(one) for one in tensors if one.dim() > 1 and one.is_contiguous()]
    block = HostBlock(tensors, torch.device("cpu"))
    for one in old:
        one.view(torch.uint8).fill_(0xFF)  # numbers that are none
    for source, target in block.lie_in(torch.empty(block.num_bytes, dtype=torch.uint8, device=device)):
        target.copy_(source)


def activated(product: Tensor, act: str) -> Tensor:
    """Return the activation of gate and up, the halves of each row, in the dtype of `product`."""
    gate, up = product.chunk(2, 1)
    if act == "silu":
        return F.silu(gate) * up
    if act == "gelu":
        return F.gelu(gate) * up
    if act == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=7)
    return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)


def compare_experts(
    scheme: Scheme,
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    *,
    residual: bool = False,
    away: tuple[int, ...] = (),
    kernel: ExpertProducts = experts,
    form: ExpertForm = PLAIN,
    second: Scheme | None = None,
) -> None:
    """Run experts through a kernel and compare with float64 on the same quantized activations.

    away   experts of another rank, which add nothing;  second  scheme of down; None: that of gate and up
    """
    pairs = [
        (make_matrix(scheme, 2 * inner, hidden, device), make_matrix(second or scheme, hidden, inner, device))
        for _ in range(count)
    ]
    x = torch.randn(tokens, hidden).to(dtype).to(device)
    x[:, 5] *= 30
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).int().to(device)
    weights = torch.rand(tokens, top_k, device=device)
    other = torch.randn(tokens, hidden).to(dtype).to(device) if residual else None
    here = [expert for expert in range(count) if expert not in away]
    packed = kernel.empty(len(here), *pairs[0], device, form)
    added = torch.randn(count, 2 * inner, device=device), torch.randn(count, hidden, device=device)
    for place, expert in enumerate(here):
        kernel.put(packed, place, *pairs[expert], (added[0][expert], added[1][expert]) if form.biased else None)
    places = [here.index(expert) if expert in here else -1 for expert in range(count)]
    expert_map = torch.tensor(places, dtype=torch.int32, device=device) if away else None
    truth = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    for expert in here:
        gate_up, down = pairs[expert]
        product = _in_order(stands_for(x, gate_up), gate_up) @ dequantize(gate_up).double().t()
        h = activated(product + added[0][expert].double() * form.biased, form.act).to(dtype)
        result = _in_order(stands_for(h, down), down) @ dequantize(down).double().t()
        result += added[1][expert].double() * form.biased
        truth += (weights * (ids == expert)).sum(1, keepdim=True).double() * result
    if other is not None:
        truth += other.double()
    through_host_memory(packed)
    y = kernel.run(x, weights, ids, packed, expert_map, None if other is None else other.clone())
    error = (y.double() - truth).norm() / truth.norm()
    assert error < tolerance, f"{float(error):.2e} {scheme} {tokens} tokens"


def _in_order(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return the columns of x in the order of the matrix."""
    return x if matrix.order is None else x[:, matrix.order.long()]
