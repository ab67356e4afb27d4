"""Compiles routing and experts for sm_90, at the sizes of real models; prints the name of each kernel."""

import re
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.contracts.scheme import Scheme
from quire.kernels import pdl, triton_runtime
from quire.kernels.activation import ACTS, UNGATED
from quire.kernels.experts import hopper, scaled, scaled_hopper, triton, weight_only, weight_only_hopper
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.linear import weight_only as linear
from quire.kernels.pack.matrix import empty as empty_matrix
from quire.kernels.routing import triton as routing
from quire.kernels.weight_only import pairs_in_tiles

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made

DEEPSEEK = Routing(
    num_experts=256,
    top_k=8,
    scoring="sigmoid",
    correction=True,
    num_groups=8,
    top_groups=4,
    group_score="top2",
    normalize=True,
    normalize_eps=1e-20,
    scaling=2.5,
)
INTEGERS = Scheme(values="w4", block=(1, 128), zeros=True)
GPT_OSS = ExpertForm("swiglu_oai", biased=True)
NEMOTRON = 128, 6, 2688, 1856  # Nemotron 3 Nano: experts, those of a token, hidden and inner size
MXFP4 = Scheme(values="e2m1", block=(1, 32))
NVFP4 = Scheme(values="e2m1", block=(1, 16), factor=True)
QWEN = Routing(num_experts=128, top_k=8, scoring="softmax", normalize=True)


def check(made: Made) -> None:
    """Products run on tensor cores; Hopper's gather 16 bytes at a time, and scales one by one. NaN stays NaN."""
    given = made.constants
    if "MOST" in given or "POWERS" in given:  # a maximum that leaves NaN out would make a number of it
        assert not re.search(r"(min|max)\.(ftz\.)?f32", made.ptx), made
    if made.name == "_product_kernel" and made.options["num_stages"] > 1 and "TOP_K" in given:
        assert ("wgmma" if given.get("TALL", True) or given["ROWS"] >= 64 else "mma.sync") in made.ptx, made
    if made.name == "_packed_kernel":
        on_hopper = made.options["target"].arch >= 90
        assert ("wgmma" if on_hopper else "mma.sync") in made.ptx and "cp.async" in made.ptx, made
        assert made.stack == 0 or not on_hopper, (made.stack, made)
    if made.name == "hopper._grouped_kernel":
        ptx = made.ptx
        copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (\S+), \S+;", ptx))
        assert "wgmma" in ptx and copies == ({"0x10"} if given["ACT"] else set()), (copies, made)
    if made.name == "hopper._pairs_kernel":
        assert "wgmma" in made.ptx and "cp.async.bulk.tensor" in made.ptx, made
    if made.name in ("_alone_up_kernel", "_alone_down_kernel"):  # numbers go from words to tensor cores in registers
        assert "mma.sync.aligned.m16n8k16" in made.ptx and "ldmatrix" not in made.ptx, made
        assert made.stack == 0 and made.shared <= 2048 and made.loads_ahead >= 12, (made.loads_ahead, made)
    if made.name == "hopper._scaled_kernel":
        ptx = made.ptx
        copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (\S+), \S+;", ptx))
        assert "wgmma" in ptx and "e4m3.e4m3" in ptx, made
        assert copies == ({"0x10", "0x4"} if given["ACT"] else {"0x4"}), (copies, made)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def absent_gpu() -> AbsentGpu:
    """A Hopper GPU, whose sizes the modules know."""
    gpu = AbsentGpu(check)
    gpu.describe_to(triton, hopper, scaled_hopper, pairs_in_tiles)
    return gpu


def launch(
    tokens: int, experts: int, k: int, hidden: int, inner: int, mapped: bool = False, form: ExpertForm = PLAIN
) -> None:
    """Launch experts of bfloat16."""
    x, ids = empty(tokens, hidden), empty(tokens, k, dtype=torch.int32)
    gated = form.act not in UNGATED
    packed = triton.empty(experts, empty(inner << gated, hidden), empty(hidden, inner), x.device, form)
    places = empty(2 * experts, dtype=torch.int32) if mapped else None
    for module in (triton, hopper) if gated else (triton,):
        module.run(x, empty(tokens, k, dtype=torch.float32), ids, packed, places, x)


def launch_quantized(
    module: Any,
    tokens: int,
    experts: int,
    k: int,
    hidden: int,
    inner: int,
    scheme: Scheme,
    form: ExpertForm = PLAIN,
) -> None:
    """Launch experts of a scheme with the kernels of a module."""
    shapes = (empty_matrix(scheme, shape, "meta") for shape in ((2 * inner, hidden), (hidden, inner)))
    packed = module.empty(experts, *shapes, torch.device("meta"), form)
    x = empty(tokens, hidden)
    module.run(x, empty(tokens, k, dtype=torch.float32), empty(tokens, k, dtype=torch.int32), packed, None, x)


def decodes() -> None:
    """Routing; few tokens of Qwen3-30B-A3B with and without dependent launches, and a rank of eight of DeepSeek-V3."""
    absent_gpu()
    for plan in (QWEN, DEEPSEEK):
        for live in (None, empty(4, dtype=torch.bool)):
            routing.route(
                empty(4, plan.num_experts, dtype=torch.float32),
                empty(plan.num_experts, dtype=torch.float32) if plan.correction else None,
                plan,
                live,
            )
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        launch(16 if dependent else 1, 128, 8, 2048, 768)
    launch(64, 32, 8, 7168, 2048, mapped=True)
    for tokens in (1, 16):
        launch(tokens, 32, 4, 2880, 2880, form=GPT_OSS)
        launch(tokens, *NEMOTRON, form=ExpertForm("relu2"))


def prompts() -> None:
    """Many tokens of the same model, with and without dependent launches, and of gpt-oss-20b; with --full also of
    DeepSeek-V2-Lite and of Mixtral 8x7B."""
    absent_gpu()
    launch(4096, 32, 4, 2880, 2880, form=GPT_OSS)
    launch(4096, *NEMOTRON, form=ExpertForm("relu2"))
    for act in FULL * ACTS[1:]:
        launch(8192, 128, 8, 2048, 768, form=ExpertForm(act))
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for tokens in (8192 if dependent else 256, *full_rows((1, 16, 256, 512, 8192))):
            launch(tokens, 128, 8, 2048, 768)
    for tokens in full_rows((1, 64, 16384)):
        launch(tokens, 64, 6, 2048, 1408)
        launch(tokens, 8, 2, 4096, 14336)
        launch(tokens, 32, 8, 7168, 2048, mapped=True)


def eight_bits() -> None:
    """Experts in e4m3 on Hopper, with dependent launches; also with an activation and biases."""
    absent_gpu()
    setattr(pdl, "in_use", lambda: True)  # noqa: B010
    setattr(triton_runtime, "missing_hopper", lambda: "")  # noqa: B010
    for tokens, powers in ((1, False), (8192, False), (64, True), *full_rows(product((1, 64, 8192), (False, True)))):
        experts, hidden, inner = (32, 7168, 2048) if powers else (128, 2048, 768)
        scheme = Scheme(values="e4m3", block=(128, 128), inputs="group", ue8m0=powers)
        launch_quantized(scaled, tokens, experts, 8, hidden, inner, scheme)
    scheme = Scheme(values="e4m3", block=(128, 128), inputs="group")
    for tokens in (1, 512, *full_rows((8192,))):
        launch_quantized(scaled, tokens, 32, 4, 2880, 2944, scheme, GPT_OSS)
    for act in ACTS[1:]:
        launch_quantized(scaled, 8192, 128, 8, 2048, 768, scheme, ExpertForm(act))


def integers() -> None:
    """Experts in 4 and 8 bits on Hopper. Dense products and experts on an A100, whose bf16 has less arithmetic."""
    gpu = absent_gpu()
    setattr(pdl, "in_use", lambda: True)  # noqa: B010
    for tokens in (1, 512, *full_rows((128, 8192))):
        launch_quantized(weight_only, tokens, 128, 8, 2048, 768, INTEGERS)
    launch_quantized(weight_only, 64, 8, 2, 4096, 14336, Scheme(values="w4", block=(1, 32), order=True))
    launch_quantized(weight_only, 64, 64, 6, 2048, 1408, Scheme(values="w8", block=(1, 0)))
    for scheme in (MXFP4, *full_rows([Scheme(values="w4", block=(1, 32))])):
        launch_quantized(weight_only, 64, 32, 4, 2880, 2880, scheme, GPT_OSS)
    for tokens in (512, *full_rows((1, 128, 8192))):
        launch_quantized(weight_only, tokens, 128, 8, 2048, 768, NVFP4)
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for tokens in (1, *full_rows([64]), 8192) if dependent else (5, *full_rows((1, 16, 256, 512, 1024))):
            form, inner = GPT_OSS if dependent else PLAIN, 2880
            if tokens == 1 and not FULL:  # half: a pair's kernels are unrolled, and take 13 s at the size of gpt-oss
                inner = 1440
            launch_quantized(weight_only_hopper, tokens, 32 if dependent else 128, 4, 2880, inner, MXFP4, form)
    gpu.capability, gpu.room = 80, 163 << 10
    setattr(pdl, "in_use", lambda: False)  # noqa: B010
    for tokens in (8192, *full_rows((1,))):
        launch_quantized(weight_only, tokens, 128, 8, 2048, 768, INTEGERS)
    packed = linear.pack(empty_matrix(INTEGERS, (4096, 2048), "meta"))
    for rows in (64, 300, *full_rows((1,))):
        linear.run(empty(rows, 2048), packed, None)
