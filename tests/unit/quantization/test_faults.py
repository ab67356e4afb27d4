"""Faulty quantized checkpoints: each is named in one line, before anything runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.args.checkpoint import read_checkpoint_config
from quire.contracts.errors import UserError, WeightsError
from quire.contracts.parallel import Parallel
from quire.contracts.params import Part
from quire.contracts.scheme import Scheme
from quire.plan.layout import layout
from quire.plan.placement import ranks
from quire.quantization.assigned import with_formats
from quire.quantization.slices import packed_scheme
from quire.weights.files import read_checkpoint
from quire.weights.spare import check_spare

from ...support.quantized_checkpoints import FORMS, quantize_checkpoint
from .test_formats import check, loaded, written

LAYER = "model.layers.0."
UP, Q, V = (f"{LAYER}{name}." for name in ("mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj"))
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("plain"), "qwen3")


def put(value: float) -> Callable[[Tensor], Tensor]:
    """Set a number in the middle of a tensor."""

    def change(tensor: Tensor) -> Tensor:
        flat = tensor.flatten().clone()
        flat[len(flat) // 2] = value
        return flat.view(tensor.shape)

    return change


def code(tensor: Tensor) -> Tensor:
    return put(0xFF)(tensor.view(torch.uint8)).view(torch.float8_e4m3fn)


def remove(tensor: Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("form", "name", "change", "said"),
    [
        (
            "fp8-block",
            f"{UP}weight_scale_inv",
            put(NAN),
            f"{UP}weight_scale_inv has a scale that is not a positive number",
        ),
        ("fp8-block", f"{V}weight_scale_inv", put(0.0), f"{V}weight_scale_inv has a scale"),
        ("fp8-block", f"{UP}weight", code, f"{UP}weight has a value that is NaN"),
        ("fp8-block", f"{V}weight", code, f"{V}weight has a value that is NaN"),
        (
            "fp8-block",
            f"{UP}weight_scale_inv",
            lambda t: t[:-1].clone(),
            "weight_scale_inv has shape [3, 2], config.json",
        ),
        ("fp8-block", f"{UP}weight_scale_inv", remove, f"lacks {UP}weight_scale_inv"),
        (
            "fp8-block",
            f"{UP}weight",
            lambda t: t.float(),
            "up_proj.weight is stored as F32, a fp8 tensor must be F8_E4M3",
        ),
        ("fp8-tensor", f"{UP}weight_scale", put(-1.0), f"{UP}weight_scale has a scale"),
        (
            "fp8-tensor",
            f"{UP}weight_scale",
            lambda t: torch.ones(5),
            "weight_scale has shape [5], config.json makes it [1",
        ),
        ("fp8-static", f"{UP}input_scale", put(INF), f"{UP}input_scale has a scale that is not a positive number"),
        ("fp8-static", f"{UP}input_scale", remove, f"lacks {UP}input_scale"),
        ("ct-int8-channel", f"{UP}weight_scale", put(INF), f"{UP}weight_scale has a scale"),
        ("ct-int8-channel", f"{UP}weight_scale", lambda t: t[:9].clone(), "weight_scale has shape [9, 1], config.json"),
        (
            "ct-w4-group",
            f"{UP}weight_scale",
            lambda t: t[:, :1].clone(),
            "weight_scale has shape [512, 1], config.json",
        ),
        (
            "ct-w4-group",
            f"{UP}weight_shape",
            lambda t: t + 1,
            f"{UP}weight_shape is [513, 161], config.json makes it [512",
        ),
        ("ct-w4-order", f"{UP}weight_g_idx", remove, f"lacks {UP}weight_g_idx"),
        ("ct-w4-zeros", f"{UP}weight_zero_point", remove, f"lacks {UP}weight_zero_point"),
        ("ct-mxfp4", f"{UP}weight_scale", put(255), f"{UP}weight_scale has a scale that is NaN"),
        ("ct-mxfp4", f"{UP}weight_scale", lambda t: t.float(), "weight_scale is stored as F32, a mxfp4-pack-quantized"),
        ("ct-mxfp4", f"{UP}weight_packed", lambda t: t[:, 1:].clone(), "weight_packed has shape [512, 79], config.js"),
        ("awq", f"{UP}scales", put(0.0), f"{UP}scales has a scale"),
        ("awq", f"{UP}qzeros", lambda t: t[:-1].clone(), "qzeros has shape [4, 64], config.json makes it [5, 64]"),
        ("gptq", f"{UP}qzeros", put(0), f"{UP}qzeros has a zero point that is not 8, although sym is true"),
        ("gptq", f"{UP}g_idx", put(0), f"{UP}g_idx permutes the columns, although desc_act is false"),
        (
            "gptq",
            f"{UP}bias",
            lambda t: torch.ones(512),
            f"{UP}bias is a bias that is not zero, and the model has none",
        ),
        ("gptq-order", f"{UP}g_idx", remove, f"lacks {UP}g_idx"),
        ("gptq-order", f"{UP}g_idx", put(0), f"{UP}g_idx has groups that are not of 32 columns"),
        ("gptq-order", f"{V}g_idx", lambda t: t.roll(1), f"{V}g_idx differs from that of the matrix with which it is"),
        (
            "gptq",
            f"{UP}qweight",
            lambda t: t[:-1].clone(),
            "qweight has shape [19, 512], config.json makes it [20, 512]",
        ),
    ],
)
def test_faults_are_named(
    plain: Path, tmp_path: Path, form: str, name: str, change: Callable[[Tensor], Tensor | None], said: str
) -> None:
    quantize_checkpoint(plain, tmp_path, FORMS[form])
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(name, torch.empty(1)))
    save_file(tensors | ({} if changed is None else {name: changed}), tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        loaded(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_other_groups_than_the_config_says(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path, FORMS["awq"])
    raw = json.loads((tmp_path / "config.json").read_text())
    for size, said in (
        (16, "qzeros has shape [16, 20], config.json makes it [32, 20]"),
        (24, "groups of 24 do not"),
        (64, "160 columns, which groups of 64 do not"),
    ):
        raw["quantization_config"]["group_size"] = size
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UserError, match=said.replace("[", r"\[")):
            loaded(tmp_path)


def test_parts_of_a_fused_matrix_in_two_formats(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path, FORMS["fp8-block"], which=lambda name: "v_proj" not in name)
    with pytest.raises(UserError) as error:
        loaded(tmp_path)
    assert f"{Q}weight is fp8 (FP8 in blocks of 128 x 128" in str(error.value)
    assert f"{V}weight is unquantized: they form one matrix" in str(error.value)


def test_a_module_that_the_config_leaves_alone_and_the_checkpoint_quantizes(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path, FORMS["awq"])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="down_proj.qweight is stored, but quantization_config leaves .*down_proj unq"):
        loaded(tmp_path)


def test_names_of_stored_tensors_decide_where_the_config_is_silent(plain: Path, tmp_path: Path) -> None:
    means = quantize_checkpoint(plain, tmp_path, FORMS["fp8-block"], which=lambda name: "down_proj" not in name)
    kept = loaded(tmp_path)
    check(kept, means)
    assert isinstance(kept.weights["layers.0.mlp.down.weight"][0], Tensor)


@pytest.mark.parametrize("form", ["gptq", "awq", "ct-w4-group", "ct-mxfp4", "fp8-block"])
def test_a_quantized_head(plain: Path, tmp_path: Path, form: str) -> None:
    """As it is stored; GPTQ says so in its config, and compressed-tensors by leaving it off its list."""
    head = {"lm_head.weight": load_file(plain / "model.safetensors")["lm_head.weight"]}
    means = quantize_checkpoint(plain, tmp_path, FORMS[form])
    tensors, more = (
        load_file(tmp_path / "model.safetensors"),
        FORMS[form].encode(head["lm_head.weight"].float(), torch.Generator()),
    )
    del tensors["lm_head.weight"]
    save_file(tensors | {f"lm_head.{suffix}": one for suffix, one in more[0].items()}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] |= {
        "gptq": {"lm_head": True},
        "ct-w4-group": {"ignore": []},
        "ct-mxfp4": {"ignore": []},
    }.get(form, {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    kept = loaded(tmp_path)
    check(kept, means | {"lm_head.weight": more[1]})
    assert not isinstance(kept.weights["head.weight"][0], Tensor)


def test_a_bias_that_ranks_add_once_is_no_spare_tensor_of_the_others(plain: Path, tmp_path: Path) -> None:
    """Ranks share the columns of a projection with a bias, which only the first one reads."""
    quantize_checkpoint(plain, tmp_path, FORMS["gptq"])
    name = f"{LAYER}self_attn.o_proj.bias"
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(160)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, args, config = read_checkpoint(tmp_path), read_checkpoint_config(tmp_path), FORMS["gptq"].config
    first, second = (with_formats(layout(args, rank), config) for rank in ranks(args, Parallel(tp=2)))
    with pytest.raises(WeightsError, match="o_proj.bias is a bias that is not zero"):
        check_spare(checkpoint, first)  # this model has none at all
    check_spare(checkpoint, second)


def test_zero_biases_of_gptq_are_no_biases(plain: Path, tmp_path: Path) -> None:
    means = quantize_checkpoint(plain, tmp_path, FORMS["gptq"])
    tensors = load_file(tmp_path / "model.safetensors") | {f"{UP}bias": torch.zeros(512, dtype=torch.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    check(loaded(tmp_path), means)


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "k_scale"])
def test_scales_of_a_cache_are_no_weights(plain: Path, tmp_path: Path, name: str) -> None:
    means = quantize_checkpoint(plain, tmp_path, FORMS["ct-fp8-tensor"])
    tensors = load_file(tmp_path / "model.safetensors") | {f"{LAYER}self_attn.{name}": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    check(loaded(tmp_path), means)


def parts(*rows: tuple[int, int, int], order: tuple[int, ...] = ()) -> tuple[Part, ...]:
    """Parts of stored rows, first row, number of rows."""
    return tuple(
        Part(f"{i}.weight", (stored, 256), start, count, order=order) for i, (stored, start, count) in enumerate(rows)
    )


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (parts((512, 0, 512)), 128),
        (parts((576, 0, 576)), 128),
        (parts((512, 128, 256), (512, 128, 256)), 128),
        (parts((1536, 0, 1536), (576, 0, 576)), 128),
        (parts((576, 0, 576), (1536, 0, 1536)), 1),
        (parts((512, 64, 64)), 1),
        (parts((192, 0, 192), (192, 0, 192)), 1),
        (parts((768, 0, 768), order=(*range(128), *range(128, 192, 2), *range(129, 192, 2))), 128),
        (parts((768, 0, 768), order=(*range(64), *range(64, 192, 2), *range(65, 192, 2))), 1),
        (parts((384, 0, 384), order=tuple(reversed(range(128)))), 128),
        (parts((288, 0, 288), order=tuple(reversed(range(96)))), 1),
        (parts((256, 0, 256), order=tuple(range(96))), 128),
    ],
)
def test_blocks_stay_where_rows_stay_in_them(given: tuple[Part, ...], rows: int) -> None:
    stored = Scheme(values="e4m3", block=(128, 128), inputs="group")
    assert packed_scheme(given, stored).block == (rows, 128)
    assert packed_scheme(given, Scheme(values="e4m3", block=(0, 0), inputs="token")).block == (1, 0)
    assert packed_scheme(given, Scheme(values="w4", block=(1, 32))).block == (1, 32)
