"""Checkpoints in every quantized format, written from the formula of the format, with the numbers that they mean.

Nothing here imports the package: the formulas are the independent truth. N: rows (outputs), K: columns (inputs).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .tiny_models import Tiny, random_model, write_model

QUANTIZED = re.compile(r"((?<!weights_)proj|proj_with_mqa|w[123]|query_key_value|indexer\.(wq_b|wk))\.weight$")
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of 8 neighbouring rows in a word: row j lies in bits 4 * AWQ_PLACES[j]
Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """A format with its settings.

    config   quantization_config;  encode  (W [N, K], random) -> stored tensors by suffix, and the numbers they mean
    inputs   activations: "", "token", "tensor" (scale STATIC), "group";  values  "fp8" or "int8" of activations
    others   pattern of names -> `encode` of these matrices
    """

    config: dict[str, Any]
    encode: Callable[[Tensor, torch.Generator], tuple[Stored, Tensor]]
    inputs: str = ""
    values: str = "fp8"
    others: dict[str, Any] = field(default_factory=dict)


STATIC = 0.03125


# --- 8 bits -----------------------------------------------------------------------------------------------------------


def fp8(block: tuple[int, int], suffix: str, *, static: bool = False, flat: bool = False) -> Callable[..., Any]:
    """FP8 with a scale for each block; sides of 0 are the whole axis. flat: the scale of a tensor has no axis."""

    def encode(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        high, wide = block[0] or rows, block[1] or columns
        values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale, means = torch.empty(-(-rows // high), -(-columns // wide)), torch.empty(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale[i, j] = weight[at].abs().max() / 448 * (0.9 + 0.1 * torch.rand((), generator=random))
                values[at] = (weight[at] / scale[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                means[at] = values[at].float() * scale[i, j]
        own = scale.view(()) if flat else scale.view(1) if block == (0, 0) else scale
        more = {"input_scale": torch.tensor(STATIC).view(() if flat else 1)} if static else {}
        return {"weight": values, suffix: own.clone(), **more}, means

    return encode


def int8(channel: bool, *, static: bool = False) -> Callable[..., Any]:
    """Signed integers with a scale for each row, or for the tensor."""

    def encode(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
        most = weight.abs().amax(1, keepdim=True) if channel else weight.abs().max().view(1)
        scale = (most / 127).bfloat16()  # as compressed-tensors stores it
        values = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        more = {"input_scale": torch.tensor([STATIC])} if static else {}
        return {"weight": values, "weight_scale": scale, **more}, values.float() * scale.float()

    return encode


# --- integers in words ------------------------------------------------------------------------------------------------


def words(values: np.ndarray, axis: int, bits: int, places: list[int] | None = None) -> Tensor:
    """Pack unsigned integers [a, b] into int32 words along an axis, the first in the lowest bits; pads with zeros."""
    per = 32 // bits
    values = np.moveaxis(values.astype(np.uint64), axis, 1)
    out = np.zeros((values.shape[0], -(-values.shape[1] // per)), dtype=np.uint64)
    for column in range(values.shape[1]):
        place = (places or list(range(per)))[column % per]
        out[:, column // per] |= values[:, column] << np.uint64(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out.astype(np.uint32).view(np.int32), 1, axis)))


def integers(weight: Tensor, bits: int, groups: Tensor, zeros: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Round to unsigned integers: q [N, K], scale [N, G], zero [N, G], and the numbers that they mean.

    groups   [K]: the group of each column
    """
    rows, count = weight.shape[0], int(groups.max()) + 1
    scale, zero, top = torch.empty(rows, count), torch.full((rows, count), 1 << bits - 1), (1 << bits) - 1
    for group in range(count):
        part = weight[:, groups == group]
        if zeros:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, group] = ((high - low) / top).clamp(min=1e-5)
            zero[:, group] = (-low / scale[:, group]).round().clamp(0, top)
        else:
            scale[:, group] = (part.abs().amax(1) / (top // 2)).clamp(min=1e-5)
    scale = scale.to(dtype).float()
    q = ((weight / scale[:, groups]).round() + zero[:, groups]).clamp(0, top)
    return q, scale.to(dtype), zero, (q - zero[:, groups]) * scale[:, groups]


def natural(columns: int, size: int) -> Tensor:
    """The group of each column without activation order."""
    return torch.arange(columns) // (size if size > 0 else columns)


def shuffled(columns: int, size: int) -> Tensor:
    """Groups of equal size with columns in another order, the same for matrices of equal width."""
    return natural(columns, size)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]


def awq(size: int) -> Callable[..., Any]:
    """AWQ of the version gemm: everything transposed, 8 rows of the matrix in a word."""

    def encode(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
        q, scale, zero, means = integers(weight, 4, natural(weight.shape[1], size), True, torch.float16)
        return {
            "qweight": words(q.t().numpy(), 1, 4, AWQ_PLACES),
            "qzeros": words(zero.t().numpy(), 1, 4, AWQ_PLACES),
            "scales": scale.t().contiguous(),
        }, means

    return encode


def gptq(bits: int, size: int, *, version: int = 1, sym: bool = True, order: bool = False) -> Callable[..., Any]:
    """GPTQ: values packed along K, zero points along N; version 1 stores zero points less one, wrapped."""

    def encode(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
        groups = (shuffled if order else natural)(weight.shape[1], size)
        q, scale, zero, means = integers(weight, bits, groups, not sym, torch.float16)
        stored = (zero - 1) % (1 << bits) if version == 1 else zero
        return {
            "qweight": words(q.t().numpy(), 0, bits),
            "qzeros": words(stored.t().numpy(), 1, bits),
            "scales": scale.t().contiguous(),
            "g_idx": groups.int(),
        }, means

    return encode


def packed(bits: int, size: int, *, sym: bool = True, order: bool = False) -> Callable[..., Any]:
    """compressed-tensors pack-quantized: values packed along K, zero points along N."""

    def encode(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
        groups = (shuffled if order else natural)(weight.shape[1], size)
        q, scale, zero, means = integers(weight, bits, groups, not sym, torch.bfloat16)
        made = {
            "weight_packed": words(q.numpy(), 1, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            made["weight_zero_point"] = words(zero.numpy(), 0, bits)
        return made | ({"weight_g_idx": groups.int()} if order else {}), means

    return encode


# --- 4-bit floating point ---------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
    """MXFP4 of compressed-tensors: two numbers in a byte, the even column low; a power of two for 32 columns."""
    rows, columns = weight.shape
    blocks = weight.view(rows, columns // 32, 32)
    power = torch.floor(torch.log2(blocks.abs().amax(2).clamp(min=2**-100))) - 2
    scaled = blocks / 2.0 ** power[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    means = E2M1[codes] * scaled.sign() * 2.0 ** power[..., None]
    codes = (codes + 8 * (scaled < 0)).view(rows, columns).to(torch.uint8)
    return {
        "weight_packed": codes[:, 0::2] + codes[:, 1::2] * 16,
        "weight_scale": (power + 127).to(torch.uint8),
    }, means.view(rows, columns)


def nvfp4(names: tuple[str, str, str], divides: bool, inputs: str = "") -> Callable[..., Any]:
    """NVFP4: as `mxfp4`, with a scale in e4m3 for 16 columns and one number for the matrix.

    names     of the values, the scales and that number;  divides  it divides the scales, else it multiplies them
    inputs    name of the scale of activations, which is stored beside
    """

    def encode(weight: Tensor, random: torch.Generator) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        factor = weight.abs().max() / (6 * 448) * (0.9 + 0.1 * torch.rand((), generator=random))
        stored = 1 / factor if divides else factor
        factor = 1 / stored if divides else factor
        blocks = weight.view(rows, columns // 16, 16)
        scale = (blocks.abs().amax(2) / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
        scaled = blocks / (scale.float() * factor).clamp(min=1e-30)[..., None]
        codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
        means = E2M1[codes] * scaled.sign() * scale.float()[..., None] * factor  # only the last product is rounded
        codes = (codes + 8 * (scaled < 0)).view(rows, columns).to(torch.uint8)
        more = {inputs: torch.rand((), generator=random) + 1} if inputs else {}
        return {
            names[0]: codes[:, 0::2] + codes[:, 1::2] * 16,
            names[1]: scale,
            names[2]: stored.view(1 if divides else ()),
            **more,
        }, means.view(rows, columns)

    return encode


# --- all of them ------------------------------------------------------------------------------------------------------


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
        "kv_cache_scheme": None,
    }


def numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """The description of weights or activations in compressed-tensors."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


TOKEN8, FP8_TOKEN = (numbers(8, kind, "token", dynamic=True) for kind in ("int", "float"))
FP8_GROUP = numbers(8, "float", "group", dynamic=True, group_size=128)
FP4_GROUP = numbers(4, "float", "tensor_group", group_size=16)
NV_MODELOPT, NV_PACKED = (
    ("weight", "weight_scale", "weight_scale_2"),
    ("weight_packed", "weight_scale", "weight_global_scale"),
)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FORMS: dict[str, Form] = {
    "fp8-block": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        fp8((128, 128), "weight_scale_inv"),
        "group",
    ),
    "fp8-tensor": Form({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8((0, 0), "weight_scale"), "token"),
    "fp8-static": Form(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8((0, 0), "weight_scale", static=True), "tensor"
    ),
    "fbgemm": Form({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8((1, 0), "weight_scale"), "token"),
    "modelopt": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]},
        fp8((0, 0), "weight_scale", static=True, flat=True),
        "tensor",
    ),
    "ct-fp8-channel": Form(
        compressed("float-quantized", numbers(8, "float", "channel"), FP8_TOKEN), fp8((1, 0), "weight_scale"), "token"
    ),
    "ct-fp8-tensor": Form(
        compressed("float-quantized", numbers(8, "float", "tensor"), numbers(8, "float", "tensor")),
        fp8((0, 0), "weight_scale", static=True),
        "tensor",
    ),
    "ct-fp8-block": Form(
        compressed("float-quantized", numbers(8, "float", "block", block_structure=[128, 128]), FP8_GROUP),
        fp8((128, 128), "weight_scale"),
        "group",
    ),
    "ct-int8-channel": Form(
        compressed("int-quantized", numbers(8, "int", "channel"), TOKEN8), int8(True), "token", "int8"
    ),
    "ct-int8-tensor": Form(
        compressed("int-quantized", numbers(8, "int", "tensor"), TOKEN8), int8(False), "token", "int8"
    ),
    "ct-int8-static": Form(
        compressed("int-quantized", numbers(8, "int", "channel"), numbers(8, "int", "tensor")),
        int8(True, static=True),
        "tensor",
        "int8",
    ),
    "ct-int8-weights": Form(compressed("int-quantized", numbers(8, "int", "channel")), int8(True)),
    "ct-w4-group": Form(compressed("pack-quantized", numbers(4, "int", "group", group_size=32)), packed(4, 32)),
    "ct-w4-channel": Form(compressed("pack-quantized", numbers(4, "int", "channel")), packed(4, -1)),
    "ct-w4-zeros": Form(
        compressed("pack-quantized", numbers(4, "int", "group", group_size=32, symmetric=False)),
        packed(4, 32, sym=False),
    ),
    "ct-w4-order": Form(
        compressed("pack-quantized", numbers(4, "int", "group", group_size=32, actorder="group")),
        packed(4, 32, order=True),
    ),
    "ct-w4-static-order": Form(
        compressed("pack-quantized", numbers(4, "int", "group", group_size=32, actorder="static")), packed(4, 32)
    ),
    "ct-w8-group": Form(compressed("pack-quantized", numbers(8, "int", "group", group_size=32)), packed(8, 32)),
    "ct-w8-zeros": Form(
        compressed("pack-quantized", numbers(8, "int", "channel", symmetric=False)), packed(8, -1, sym=False)
    ),
    "ct-mxfp4": Form(compressed("mxfp4-pack-quantized", numbers(4, "float", "group", group_size=32)), mxfp4),
    "ct-nvfp4": Form(compressed("nvfp4-pack-quantized", FP4_GROUP), nvfp4(NV_PACKED, True)),
    "ct-nvfp4-inputs": Form(
        compressed("nvfp4-pack-quantized", FP4_GROUP, FP4_GROUP | {"dynamic": "local"}),
        nvfp4(NV_PACKED, True, "input_global_scale"),
    ),
    "modelopt-nvfp4": Form(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*.mlp.gate"]},
        nvfp4(NV_MODELOPT, False, "input_scale"),
    ),
    "awq": Form(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        awq(32),
    ),
    "gptq": Form(GPTQ, gptq(4, 32)),
    "gptq-channel": Form(GPTQ | {"group_size": -1}, gptq(4, -1)),
    "gptq-zeros": Form(GPTQ | {"sym": False}, gptq(4, 32, sym=False)),
    "gptq-v2-zeros": Form(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 32, version=2, sym=False)),
    "gptq-dynamic": Form(  # experts of several widths: down of some is wider than that of others, and than gate and up
        GPTQ | {"dynamic": {r"+:.*\.experts\.[13]\.down_proj": {"bits": 8, "group_size": 16, "sym": False}}},
        gptq(4, 32),
        others={r"\.experts\.[13]\.down_proj": gptq(8, 16, sym=False)},
    ),
    "gptq-order": Form(GPTQ | {"desc_act": True}, gptq(4, 32, order=True)),
    "gptq-8": Form(GPTQ | {"bits": 8, "sym": False}, gptq(8, 32, sym=False)),
    "gptq-8-v2-order": Form(
        GPTQ | {"bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(8, 32, version=2, order=True)
    ),
}


def quantize_checkpoint(
    plain: Path, folder: Path, form: Form, seed: int = 0, which: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Write the quantized checkpoint of a plain one to `folder`, and return the numbers of all its tensors.

    which   names of the matrices that are quantized, among those that may be
    """
    folder.mkdir(exist_ok=True)
    random, stored, means = torch.Generator().manual_seed(seed), dict[str, Tensor](), dict[str, Tensor]()
    for path in sorted(plain.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            if QUANTIZED.search(name) and which(name):
                encode = next((own for pattern, own in form.others.items() if re.search(pattern, name)), form.encode)
                tensors, means[name] = encode(weight.float(), random)
                stored |= {f"{name.removesuffix('weight')}{suffix}": one for suffix, one in tensors.items()}
            else:
                stored[name] = means[name] = weight
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": form.config}))
    return means


def two_checkpoints(family: str, form: str, head_dim: int, folder: Path) -> tuple[Path, Path]:
    """Write two checkpoints of a family and a format of weights ("": none), which differ in all numbers."""
    found = []
    for seed in (0, 1):
        place = folder / f"{family}-{seed}"
        spec = Tiny(family=family, head_dim=head_dim, changes=(("intermediate_size", 128),) if form else ())
        write_model(random_model(spec, seed), place, family)
        if form:
            quantize_checkpoint(place, folder / f"{form}-{seed}", FORMS[form], seed=seed)
            place = folder / f"{form}-{seed}"
        found.append(place)
    return found[0], found[1]
