"""Kernels of quantized linear layers and experts on a GPU, against float64 on the same quantized activations."""

from types import ModuleType

import pytest
import torch

from quire.kernels.linear import scaled, weight_only, weight_only_hopper
from quire.kernels.triton_runtime import missing_hopper

from ..quantized_cases import (
    CALLS,
    SCALED,
    WEIGHT_ONLY,
    Call,
    compare,
    compare_experts,
    exact_values,
    make_matrix,
    stands_for,
)  # fmt: skip

LARGE = (
    Call(1, 1024, 4096, norm=True), Call(1, 1024, 12288, residual=True), Call(2, 2048, 2048, norm=True, gated=True),
    Call(17, 4096, 1024, bias=True), Call(64, 1024, 4096, residual=True), Call(65, 2048, 768, norm=True, gated=True),
    Call(256, 1024, 2048, residual=True), Call(1000, 2048, 2176, norm=True),
)  # fmt: skip
INTEGERS = (
    *(call for call in (*CALLS, *LARGE) if not call.norm),
    Call(1, 1024, 1152, bias=True), Call(3, 72, 640, gated=True, bias=True), Call(8, 8192, 2048, gated=True),
    Call(9, 1001, 1024, residual=True), Call(16, 12288, 1024, gated=True), Call(40, 1024, 1024, gated=True, bias=True),
    Call(100, 1024, 3072), Call(128, 520, 1024, gated=True), Call(256, 4096, 1024, bias=True),
    Call(300, 1024, 1024, gated=True, bias=True), Call(1000, 1032, 2176, bias=True, residual=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("call", (*CALLS, *LARGE), ids=str)
@pytest.mark.parametrize("kind", SCALED)
def test_products_of_eight_bits(kind: str, call: Call, device: torch.device) -> None:
    if why := scaled.unsupported():
        pytest.skip(why)
    compare(scaled, SCALED[kind], call, torch.bfloat16, device, 1e-2)


@pytest.mark.parametrize("call", INTEGERS, ids=str)
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("kernel", [weight_only_hopper, weight_only], ids=["hopper", "triton"])
def test_products_of_integer_weights(kernel: ModuleType, kind: str, call: Call, device: torch.device) -> None:
    """Of one row, few and some, in tiles of 16 to 128 rows; more than 256 are multiplied by the unpacked weight."""
    if kernel is weight_only_hopper and (why := missing_hopper()):
        pytest.skip(why)
    if kernel is weight_only and call.gated and call.n % 64:
        pytest.skip("the reference would run")
    compare(kernel, WEIGHT_ONLY[kind], call, torch.bfloat16, device, 1e-2)


@pytest.mark.parametrize("kind", SCALED)
def test_activations_are_quantized_exactly_by_the_rule(kind: str, device: torch.device) -> None:
    matrix = make_matrix(SCALED[kind], 64, 4096, device)
    x = torch.randn(33, 4096, device=device).bfloat16() * torch.logspace(-6, 3, 33, device=device)[:, None].bfloat16()
    x[1] = 0
    x[2, ::7] *= 100
    assert torch.equal(stands_for(x, matrix), exact_values(x, matrix))


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("kind", SCALED)
def test_experts_of_eight_bits(kind: str, tokens: int, device: torch.device) -> None:
    if why := scaled.unsupported():
        pytest.skip(why)
    for away in ((), (1, 4)):
        compare_experts(SCALED[kind], tokens, 8, 2, 512, 384, torch.bfloat16, device, 2e-2, residual=True, away=away)
