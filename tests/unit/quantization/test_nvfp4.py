"""NVFP4 as ModelOpt and compressed-tensors store it, whole, fused and cut over ranks, against float64."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, Part
from quire.kernels.pack.convert import Findings, convert
from quire.kernels.pack.matrix import QuantizedMatrix, dequantize
from quire.quantization.formats import FORMATS, spare_names, tensor_names
from quire.quantization.microscaled import NVFP4

from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from .test_formats import check, written
from .test_formats import loaded as read

ROWS, COLUMNS = 12, 96
SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAMES = {
    "modelopt nvfp4": ("weight", "weight_scale_2", "input_scale"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_global_scale", "input_global_scale"),
}


def e4m3(code: int) -> float:
    """A number of 1 bit for the sign, 4 for the exponent and 3 for the mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


def stored(form: str, module: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a module, with every kind of scale, and the numbers that they mean in float64."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=random, dtype=torch.uint8)
    codes = torch.randint(0, 127, (ROWS, COLUMNS // 16), generator=random, dtype=torch.uint8)
    codes[0, :3] = torch.tensor([0, 1, 126])
    number = torch.rand((), generator=random) + 0.1
    factor = 1 / number.double() if form == "nvfp4-pack-quantized" else number.double()
    means = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    for n in range(ROWS):
        for k in range(COLUMNS):
            code = int(values[n, k // 2]) >> 4 * (k % 2) & 15
            means[n, k] = (-1) ** (code // 8) * SIZES[code % 8] * e4m3(int(codes[n, k // 16])) * factor
    weight, name, _ = NAMES[form]
    tensors = {weight: values, "weight_scale": codes.view(torch.float8_e4m3fn), name: number.view(1)}
    return {f"{module}.{end}": tensor for end, tensor in tensors.items()}, means


def param_of(form: str, *parts: Part) -> Param:
    shape = sum(part.rows for part in parts), parts[0].local_shape[1]
    return Param("qkv.weight", shape, parts, format=form, stored=NVFP4, scheme=NVFP4)


def loaded(param: Param, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a parameter, as a loader fills them: slices of the stored ones."""
    made = {}
    for raw in FORMATS[param.format].tensors(param):
        slices = [tensors[part.stored].narrow(part.axis, part.start, part.count) for part in raw.parts]
        made[raw.name] = torch.cat(slices).clone()
        assert made[raw.name].shape == raw.shape and str(made[raw.name].dtype) == f"torch.{raw.dtype}"
    return made


SLICES = {
    "whole": (("q", 0, ROWS, 0),),
    "rows": (("q", 3, 5, 0),),
    "columns in groups": (("q", 16, 48, 1),),
    "three parts": (("q", 6, 4, 0), ("k", 0, ROWS, 0), ("v", 1, 2, 0)),
}


def case(form: str, name: str) -> tuple[Param, dict[str, Tensor], Tensor]:
    """A parameter, the stored tensors, and its numbers in float64."""
    tensors, parts, means = dict[str, Tensor](), [], []
    for seed, (module, start, count, axis) in enumerate(SLICES[name]):
        own, numbers = stored(form, f"layer.{module}_proj", seed)
        tensors |= own
        parts.append(Part(f"layer.{module}_proj.weight", (ROWS, COLUMNS), start, count, axis=axis, name=module))
        means.append(numbers.narrow(axis, start, count))
    return param_of(form, *parts), tensors, torch.cat(means)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("form", NAMES)
def test_a_matrix_means_what_its_tensors_say(form: str, name: str) -> None:
    """Each part keeps its own factor: the numbers of the formula, rounded once (ModelOpt) or twice to float32."""
    param, tensors, means = case(form, name)
    names = {part.stored for raw in FORMATS[form].tensors(param) for part in raw.parts}
    assert names == set(tensors) == set(tensor_names(param)) and not FORMATS[form].objection(param)
    found = convert(param, loaded(param, tensors), torch.float32, findings := Findings())
    findings.check()
    assert isinstance(found, QuantizedMatrix) and found.check().shape == param.shape
    numbers = dequantize(found)
    if form == "modelopt nvfp4":
        assert torch.equal(numbers, means.float())
    torch.testing.assert_close(numbers.double(), means, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("form", NAMES)
def test_scales_of_activations_are_spare(form: str) -> None:
    param, *_ = case(form, "three parts")
    assert list(spare_names(param)) == [f"layer.{part}_proj.{NAMES[form][2]}" for part in "qkv"]


@pytest.mark.parametrize(
    ("role", "value", "words"),
    [
        ("1.scale", 0, ""),
        ("1.scale", 126, ""),
        ("1.scale", 127, "has a scale that is NaN or below 0"),
        ("1.scale", 128, "has a scale that is NaN or below 0"),
        ("1.scale", 255, "has a scale that is NaN or below 0"),
        ("2.factor", 0.0, "has a scale that is not a positive number"),
        ("2.factor", -1.0, "has a scale that is not a positive number"),
        ("2.factor", torch.nan, "has a scale that is not a positive number"),
        ("2.factor", torch.inf, "has a scale that is not a positive number"),
        ("2.factor", 1e-40, "divides scales by a number so small or large"),
    ],
)
@pytest.mark.parametrize("form", NAMES)
def test_faults_in_the_numbers(form: str, role: str, value: float, words: str) -> None:
    param, tensors, _ = case(form, "three parts")
    given = loaded(param, tensors)
    one = given[f"weight.{role}"]
    (one.view(torch.uint8) if role.endswith("scale") else one).view(-1)[-1] = value
    convert(param, given, torch.float32, findings := Findings())
    if not words or value == 1e-40 and form == "modelopt nvfp4":
        findings.check()
        return
    part, end = ("k", "weight_scale") if role == "1.scale" else ("v", NAMES[form][1])
    with pytest.raises(WeightsError, match=f"^layer.{part}_proj.{end} {words}"):
        findings.check()


@pytest.mark.parametrize("form", NAMES)
def test_a_cut_group_is_refused(form: str) -> None:
    param = param_of(form, Part("layer.q_proj.weight", (ROWS, COLUMNS), 24, 24, axis=1))
    objection = FORMATS[form].objection(param)
    assert objection == f"layer.q_proj.weight has groups of 16 columns, which columns 24 to 48 of {COLUMNS} cut"


@pytest.mark.parametrize("side", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_modules_of_mixed_precision(tmp_path: Path, side: bool) -> None:
    """Experts in NVFP4, the shared expert in FP8, attention as it is. A name stands for the modules inside, too."""
    plain, experts, eight = written(tmp_path, "glm4_moe"), tmp_path / "nvfp4", tmp_path / "fp8"
    means = quantize_checkpoint(plain, experts, FORMS["modelopt-nvfp4"], which=lambda name: ".experts." in name)
    other = quantize_checkpoint(plain, eight, FORMS["modelopt"], which=lambda name: ".shared_experts." in name)
    shared = {name: one for name, one in load_file(eight / "model.safetensors").items() if ".shared_experts." in name}
    save_file(load_file(experts / "model.safetensors") | shared, experts / "model.safetensors")
    mlp = "model.layers.0.mlp"
    layers = {f"{mlp}.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    layers |= {f"{mlp}.shared_experts.{name}_proj": {"quant_algo": "FP8"} for name in ("gate", "up", "down")}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "kv_cache_quant_algo": None}
    raw = json.loads((plain / "config.json").read_text())
    (experts / "config.json").write_text(
        json.dumps(raw if side else raw | {"quantization_config": {"quant_method": "modelopt", **quantization}})
    )
    if side:
        (experts / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    kept = read(experts)
    check(kept, means | {name: one for name, one in other.items() if ".shared_experts." in name})
    kinds = {
        name: {one.scheme.kind if isinstance(one, QuantizedMatrix) else "plain" for one in weights}
        for name, weights in kept.weights.items()
    }
    assert kinds["layers.0.mlp.experts.gate_up"] == kinds["layers.0.mlp.experts.down"] == {"nvfp4"}
    assert kinds["layers.0.mlp.shared.gate_up.weight"] == {"fp8 channel"}
    assert kinds["layers.0.attention.qkv.weight"] == {"plain"}
