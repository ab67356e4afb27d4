"""Kernels of quantized linear layers and experts on a GPU, against float64 on the same quantized activations."""

import pytest
import torch

from quire.kernels.activation import ACTS
from quire.kernels.experts import weight_only as weight_only_experts
from quire.kernels.experts import weight_only_hopper as weight_only_hopper_experts
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.linear import scaled, weight_only, weight_only_hopper
from quire.kernels.triton_runtime import missing_hopper

from ..support.quantized_cases import (
    ACTIVATED,
    CALLS,
    ODD,
    SCALED,
    WEIGHT_ONLY,
    Call,
    compare,
    compare_experts,
    exact_values,
    make_matrix,
    stands_for,
)
from ..support.quantized_cases import WORDS as IN_WORDS

LARGE = (
    Call(1, 1024, 4096, norm=True), Call(1, 1024, 12288, residual=True), Call(2, 2048, 2048, norm=True, gated=True),
    Call(17, 4096, 1024, bias=True), Call(64, 1024, 4096, residual=True), Call(65, 2048, 768, norm=True, gated=True),
    Call(256, 1024, 2048, residual=True), Call(1000, 2048, 2176, norm=True), Call(1, 2048, 4096, norm=True),
    Call(1, 1024, 2176, norm=True, gated=True), Call(1, 2112, 12288, residual=True),
)  # fmt: skip
WORDS = (
    Call(1, 1000, 1152, bias=True), Call(3, 72, 1152, gated=True, bias=True), Call(9, 1001, 1152, residual=True),
    Call(40, 1000, 1152, gated=True, bias=True), Call(40, 16384, 1152), Call(64, 1000, 1152, residual=True),
    Call(100, 1000, 1152), Call(256, 520, 1152, gated=True), Call(300, 72, 1152, gated=True, bias=True),
    Call(1000, 1000, 1152, bias=True, residual=True), Call(1, 2080, 1152, norm=True),
    Call(1, 1000, 1152, norm=True, gated=True), Call(1, 2048, 12288, residual=True), Call(40, 1000, 1152, norm=True),
)  # fmt: skip


FORMS = [ExpertForm(act, biased) for act in ACTS for biased in (False, True)][1:]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("call", (*CALLS, *ODD, *LARGE, *ACTIVATED), ids=str)
@pytest.mark.parametrize("kind", SCALED)
def test_products_of_eight_bits(kind: str, call: Call, device: torch.device) -> None:
    if why := scaled.unsupported():
        pytest.skip(why)
    compare(scaled, SCALED[kind], call, torch.bfloat16, device, 8e-3)


@pytest.mark.parametrize("call", [call for call in (*CALLS, *LARGE, *ACTIVATED) if not call.norm], ids=str)
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_products_of_integer_weights(kind: str, call: Call, device: torch.device) -> None:
    compare(weight_only, WEIGHT_ONLY[kind], call, torch.bfloat16, device, 8e-3)


@pytest.mark.parametrize("call", (*WORDS, *ACTIVATED), ids=str)
@pytest.mark.parametrize("kind", IN_WORDS)
def test_products_of_integer_weights_in_words(kind: str, call: Call, device: torch.device) -> None:
    """Few rows and some, in all heights of tiles; more than 256 rows are multiplied with the unpacked weight."""
    if why := missing_hopper():
        pytest.skip(why)
    compare(weight_only_hopper, WEIGHT_ONLY[kind], call, torch.bfloat16, device, 1e-2)


def test_columns_of_rows_are_copied_where_the_copy_engine_cannot_read_them(device: torch.device) -> None:
    if why := missing_hopper():
        pytest.skip(why)
    packed = weight_only_hopper.pack(make_matrix(WEIGHT_ONLY["w4 128"], 192, 256, device))
    wide = torch.randn(40, 259, device=device).bfloat16()
    for first in (0, 3):
        x = wide[:, first : first + 256]
        assert torch.equal(weight_only_hopper.run(x, packed, None), weight_only_hopper.run(x.clone(), packed, None))


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
    compare_experts(SCALED[kind], tokens, 8, 4, 2048, 384, torch.bfloat16, device, 2e-2, residual=True)


@pytest.mark.parametrize("tokens", [1, 5, 40, 3000])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_quantized_experts(form: ExpertForm, tokens: int, device: torch.device) -> None:
    for kind in ("w4 32 order", "w8 channel symmetric"):
        given = tokens, 8, 2, 512, 384, torch.bfloat16, device, 1e-2
        compare_experts(WEIGHT_ONLY[kind], *given, kernel=weight_only_experts, form=form)
    if why := scaled.unsupported():
        pytest.skip(why)
    for kind in ("fp8 block", "int8 token", "fp8 channel token"):
        compare_experts(SCALED[kind], tokens, 8, 2, 512, 384, torch.bfloat16, device, 2e-2, away=(1, 4), form=form)


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_experts_of_integer_weights(kind: str, tokens: int, device: torch.device) -> None:
    for away in ((), (1, 4)):
        compare_experts(
            WEIGHT_ONLY[kind],
            tokens,
            8,
            2,
            512,
            384,
            torch.bfloat16,
            device,
            1e-2,
            residual=True,
            away=away,
            kernel=weight_only_experts,
        )


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40, 70, 300, 1200])
@pytest.mark.parametrize(("hidden", "inner"), [(512, 384), (1184, 1056), (160, 96)])
def test_experts_of_mxfp4_in_words(hidden: int, inner: int, tokens: int, device: torch.device) -> None:
    """All tilings and few tokens; sizes are whole and odd blocks of 64 outputs, and inputs are no multiple of 128."""
    if why := missing_hopper():
        pytest.skip(why)
    forms = PLAIN, ExpertForm("swiglu_oai", biased=True), ExpertForm("gelu_tanh")
    for (away, count), form in zip((((), 8), ((1, 4), 8), ((), 64)), forms, strict=True):
        compare_experts(
            WEIGHT_ONLY["mxfp4"],
            tokens,
            count,
            2,
            hidden,
            inner,
            torch.bfloat16,
            device,
            1e-2,
            residual=True,
            away=away,
            kernel=weight_only_hopper_experts,
            form=form,
        )


@pytest.mark.parametrize("tokens", [3, 64])
def test_experts_of_mxfp4_in_words_are_the_same_in_a_graph(tokens: int, device: torch.device) -> None:
    """New rows and new experts are read at replay; a second replay has the same bits."""
    if why := missing_hopper():
        pytest.skip(why)
    kernel, count = weight_only_hopper_experts, 32
    pairs = [
        (make_matrix(WEIGHT_ONLY["mxfp4"], 768, 512, device), make_matrix(WEIGHT_ONLY["mxfp4"], 512, 384, device))
        for _ in range(count)
    ]
    packed = kernel.empty(count, *pairs[0], device)
    for place, pair in enumerate(pairs):
        kernel.put(packed, place, *pair)
    x, weights = torch.randn(tokens, 512, device=device).bfloat16(), torch.rand(tokens, 4, device=device)
    ids = torch.stack([torch.randperm(count)[:4] for _ in range(tokens)]).int().to(device)
    kernel.run(x, weights, ids, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.run(x, weights, ids, packed)
    for _ in range(2):
        x.normal_()
        ids.copy_(ids.flip(0))
        graph.replay()
        first = y.clone()
        graph.replay()
        assert torch.equal(y, first) and torch.equal(y, kernel.run(x, weights, ids, packed))


@pytest.mark.parametrize("tokens", [1, 4])
def test_few_tokens_have_the_results_of_sorted_pairs(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gpt-oss-20b: with biases, -1 among the ids, and experts of other ranks."""
    if why := missing_hopper():
        pytest.skip(why)
    kernel, scheme, form = weight_only_hopper_experts, WEIGHT_ONLY["mxfp4"], ExpertForm("swiglu_oai", biased=True)
    packed = None
    for place in range(4):
        pair = make_matrix(scheme, 5760, 2880, device), make_matrix(scheme, 2880, 2880, device)
        packed = packed or kernel.empty(4, *pair, device, form)
        kernel.put(packed, place, *pair, (torch.randn(5760, device=device), torch.randn(2880, device=device)))
    assert packed is not None
    x, weights = torch.randn(tokens, 2880, device=device).bfloat16(), torch.rand(tokens, 4, device=device)
    ids = torch.stack([torch.randperm(6)[:4] for _ in range(tokens)]).int().to(device)
    ids[-1, 1] = -1
    expert_map = torch.tensor([0, 3, -1, 1, -1, 2], dtype=torch.int32, device=device)
    found = []
    for most in (kernel.MOST_FEW, 0):
        monkeypatch.setattr(kernel, "MOST_FEW", most)
        found.append(kernel.run(x, weights, ids, packed, expert_map, x.clone()).double())
    assert (found[0] - found[1]).norm() < 5e-3 * found[1].norm()


def test_the_reference_can_be_captured(device: torch.device) -> None:
    """A weight whose outputs are no multiple of 64 runs the reference, also in graphs."""
    packed = scaled.pack(make_matrix(SCALED["fp8 channel token"], 72, 256, device))
    x = torch.randn(3, 256, device=device).bfloat16()
    expected = scaled.run(x, packed, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scaled.run(x, packed, None)
    graph.replay()
    assert torch.equal(y, expected)
