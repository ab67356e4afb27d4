"""`quire quantize`: its checkpoints read backwards bit by bit, by Quire's loader and by transformers."""

import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.assemble.quantize_checkpoint import Recipe, quantize_checkpoint
from quire.contracts.errors import UserError
from quire.entry.cli.main import main
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.weights.files import ITEM_BYTES, StoredTensor, read_checkpoint, read_header

from ...support.foreign_models import random_foreign
from ...support.quantized_checkpoints import AWQ_PLACES, QUANTIZED
from ..quantization.test_formats import MODELS, check, loaded, written

# Scheme -> the half step of its rounding, as a share of the largest number that shares a scale.
STEPS = {
    "fp8-block": 1 / 27.9,
    "fp8-channel": 1 / 27.8,
    "w8a8-int8": 0.51 / 127,
    "w8a16": 0.51 / 127,
    "w4a16": 0.54 / 7.5,
    "awq-int4": 1.04 / 15,
    "mxfp4": 1 / 5,
    "nvfp4": 1 / 5.6,
}
GROUPED = ("w8a16", "w4a16", "awq-int4")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
UP, Q = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("plain")

    def made(model: str) -> Path:
        if not (folder / model).is_dir():
            written(folder, model)
            stored = load_file(folder / model / "model.safetensors")
            stored = {name: one.bfloat16() if one.dim() == 2 else one for name, one in stored.items()}
            save_file(stored, folder / model / "model.safetensors")
        return folder / model

    return made


def recipe(scheme: str, **changes: Any) -> Recipe:
    return Recipe(**{"scheme": scheme, "group_size": 32 if scheme in GROUPED else 0} | changes)


def stored_in(folder: Path) -> dict[str, Tensor]:
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def bits(words: Tensor, axis: int, count: int, places: list[int] | None = None) -> np.ndarray:
    """Unpack int32 words along an axis; number j lies in bits count * places[j]."""
    raw, per = np.moveaxis(words.numpy().view(np.uint32), axis, 1), 32 // count
    out = np.empty((raw.shape[0], raw.shape[1] * per), dtype=np.int64)
    for j in range(per):
        out[:, j::per] = raw >> np.uint32(count * (places or list(range(per)))[j]) & np.uint32((1 << count) - 1)
    return np.moveaxis(out, 1, axis)


def means(scheme: str, stored: dict[str, Tensor], module: str) -> Tensor:
    """The numbers of a matrix by the formula of its format, [N, K] float32."""
    own = {name.removeprefix(f"{module}."): one for name, one in stored.items() if name.startswith(f"{module}.")}
    if scheme == "awq-int4":
        assert set(own) == {"qweight", "qzeros", "scales"} and own["scales"].dtype == torch.float16
        q, zero = (torch.from_numpy(bits(own[name], 1, 4, AWQ_PLACES)) for name in ("qweight", "qzeros"))
        size = len(q) // len(zero)
        return ((q - zero.repeat_interleave(size, 0)) * own["scales"].float().repeat_interleave(size, 0)).t().float()
    if scheme in ("w4a16", "w8a16"):
        assert set(own) == {"weight_packed", "weight_scale", "weight_shape"}
        assert own["weight_scale"].dtype == torch.bfloat16 and own["weight_shape"].dtype == torch.int64
        q = torch.from_numpy(bits(own["weight_packed"], 1, int(scheme[1])))[:, : int(own["weight_shape"][1])]
        assert list(q.shape) == own["weight_shape"].tolist()
        scale = own["weight_scale"].float()
        return (q - (1 << int(scheme[1]) - 1)) * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)
    if scheme == "mxfp4":
        assert set(own) == {"weight_packed", "weight_scale"} and {one.dtype for one in own.values()} == {torch.uint8}
        codes = torch.stack((own["weight_packed"] & 15, own["weight_packed"] >> 4), 2).flatten(1)
        return E2M1[codes.int()] * 2.0 ** (own["weight_scale"].float() - 127).repeat_interleave(32, 1)
    if scheme == "nvfp4":
        assert {name: (one.dtype, one.dim()) for name, one in own.items()} == {
            "weight_packed": (torch.uint8, 2),
            "weight_scale": (torch.float8_e4m3fn, 2),
            "weight_global_scale": (torch.float32, 1),
        }
        codes = torch.stack((own["weight_packed"] & 15, own["weight_packed"] >> 4), 2).flatten(1)
        return (
            E2M1[codes.int()] * own["weight_scale"].float().repeat_interleave(16, 1) * (1 / own["weight_global_scale"])
        )
    suffix = "weight_scale_inv" if scheme == "fp8-block" else "weight_scale"
    assert set(own) == {"weight", suffix}
    values, scale = own["weight"], own[suffix]
    assert values.dtype == (torch.int8 if scheme == "w8a8-int8" else torch.float8_e4m3fn)
    if scheme == "fp8-block":
        assert scale.dtype == torch.float32
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(values), : values.shape[1]]
    else:
        assert scale.dtype == torch.bfloat16 and scale.shape == (len(values), 1)
    return values.float() * scale.float()


def check_rounding(scheme: str, weight: Tensor, found: Tensor) -> None:
    """Every number is at most half a step of its block from the weight."""
    size = {**dict.fromkeys((*GROUPED, "mxfp4"), 32), "nvfp4": 16}.get(scheme, weight.shape[1])
    high, wide = {"fp8-block": (128, 128)}.get(scheme, (1, size))

    def blocks(x: Tensor) -> Tensor:
        """Rows and columns of blocks, and the rows and columns of each; zeros fill the last ones."""
        x = F.pad(x, (0, -x.shape[1] % wide, 0, -x.shape[0] % high))
        return x.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)

    parts = blocks(weight)
    size = parts.abs().amax((2, 3))
    if scheme == "awq-int4":
        size = parts.clamp(min=0).amax((2, 3)) - parts.clamp(max=0).amin((2, 3))
    assert (blocks(weight - found).abs().amax((2, 3)) <= size * STEPS[scheme]).all(), scheme


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scheme", STEPS)
def test_a_written_checkpoint(plain: Callable[[str], Path], tmp_path: Path, scheme: str, model: str) -> None:
    given, out = stored_in(plain(model)), tmp_path / "out"
    quantize_checkpoint(plain(model), out, recipe(scheme))
    stored, numbers = stored_in(out), dict(given)
    for name, weight in given.items():
        if not QUANTIZED.search(name):
            assert torch.equal(stored[name], weight) and stored[name].dtype == weight.dtype, name
            continue
        numbers[name] = means(scheme, stored, name.removesuffix(".weight"))
        check_rounding(scheme, weight.float(), numbers[name])
    kept = loaded(out)
    check(kept, numbers)
    assert any(isinstance(one, QuantizedMatrix) for weights in kept.weights.values() for one in weights)
    found = transformers.AutoConfig.from_pretrained(out).quantization_config
    method = {"fp8-block": "fp8", "awq-int4": "awq"}.get(scheme, "compressed-tensors")
    assert (
        found["quant_method"]
        == method
        == json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
    )
    left = found.get("ignore") or found.get("modules_to_not_convert")
    routers = {name.removesuffix(".weight") for name in given if name.endswith("mlp.gate.weight")}
    assert set(left) == {"lm_head", *routers}


@pytest.mark.parametrize("scheme", STEPS)
def test_transformers_reads_the_same(tmp_path: Path, scheme: str) -> None:
    """If the packages that transformers needs are installed. It dequantizes on a CPU."""
    needed = {"fp8-block": "accelerate", "awq-int4": "gptqmodel"}
    pytest.importorskip(needed.get(scheme, "compressed_tensors"))
    folder, out = tmp_path / "plain", tmp_path / "out"
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    quantize_checkpoint(folder, out, recipe(scheme))
    stored, given = stored_in(out), stored_in(folder)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), found
    if scheme != "fp8-block":
        model(torch.tensor([[1, 2]]))  # compressed-tensors dequantizes at the first call
    read = model.state_dict()
    for name, weight in given.items():
        if QUANTIZED.search(name):
            expected, exact = means(scheme, stored, name.removesuffix(".weight")), scheme != "fp8-block"
            # transformers rounds scales and products of FP8 blocks to bfloat16.
            assert torch.allclose(read[name].float(), expected, rtol=0 if exact else 2**-7, atol=0), name
        else:
            assert torch.equal(read[name].float(), weight.float()), name


@pytest.mark.parametrize("scheme", STEPS)
def test_values_are_rounded_for_the_stored_scale(plain: Callable[[str], Path], tmp_path: Path, scheme: str) -> None:
    quantize_checkpoint(plain("qwen3"), tmp_path / "out", recipe(scheme))
    stored, weight = stored_in(tmp_path / "out"), stored_in(plain("qwen3"))[f"{UP}.weight"].float()
    name = next(f"{UP}.{name}" for name in ("weight_scale_inv", "weight_scale", "scales") if f"{UP}.{name}" in stored)
    scale = stored[name].float().t() if scheme == "awq-int4" else stored[name].float()
    high, wide = (128, 128) if scheme == "fp8-block" else (1, -(-160 // scale.shape[1]))
    scale = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:512, :160]
    if scheme == "mxfp4":
        powers = 2.0 ** (scale - 127)
        sizes, step = (weight / powers).abs(), torch.tensor([0.5, 1, 2])
        most = sizes.unflatten(1, (-1, 32)).amax(2)
        assert ((most >= 3.5) & (most < 7)).all(), "the smallest scale whose largest number is rounded to at most 6"
        step = step[(sizes >= 2).int() + (sizes >= 4).int()]
        values = (sizes / step).round().mul(step).clamp(max=6) * weight.sign()  # halves go to even numbers of steps
        assert torch.equal(means(scheme, stored, UP), values * powers)
        return
    if scheme == "nvfp4":
        factor = 1 / stored[f"{UP}.weight_global_scale"]
        scaled = weight / (scale * factor)
        own = weight.abs().unflatten(1, (-1, 16)).amax(2) / 6 / factor
        assert torch.equal(stored[f"{UP}.weight_scale"].float(), own.to(torch.float8_e4m3fn).float())
        error = (means(scheme, stored, UP) / factor / scale - scaled).abs()
        least = (scaled.clamp(-6, 6)[..., None] - E2M1).abs().amin(-1) + (scaled.abs() - 6).clamp(min=0)
        assert torch.allclose(error, least, atol=1e-5), "the nearest values for the stored scales"
        return
    if scheme.startswith("fp8"):
        values = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        zero = torch.tensor({"w8a16": 128, "w4a16": 8}.get(scheme, 0))
        if scheme == "awq-int4":
            zero = torch.from_numpy(bits(stored[f"{UP}.qzeros"], 1, 4, AWQ_PLACES)).t().repeat_interleave(32, 1)
        low, high = {"w8a8-int8": (-128, 127), "w8a16": (0, 255)}.get(scheme, (0, 15))
        values = ((weight / scale).round() + zero).clamp(low, high) - zero
    assert torch.equal(means(scheme, stored, UP), values * scale)


@pytest.mark.parametrize("model", ["qwen3", "glm4_moe"])
def test_parts_of_a_matrix_share_the_factor_of_nvfp4(plain: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    """Engines with one factor for a fused matrix read the same numbers."""
    quantize_checkpoint(plain(model), tmp_path / "out", recipe("nvfp4"))
    stored, given = stored_in(tmp_path / "out"), stored_in(plain(model))
    experts = [f"model.layers.0.mlp.experts.{i}.{{}}_proj" for i in range(4)] if model == "glm4_moe" else []
    matrices = [[f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]]
    matrices += [[name.format(part) for part in ("gate", "up")] for name in experts or ["model.layers.0.mlp.{}_proj"]]
    factors = set()
    for names in matrices:
        most = max(float(given[f"{name}.weight"].float().abs().max()) for name in names)
        found = {float(stored[f"{name}.weight_global_scale"]) for name in names}
        assert len(found) == 1 and found.copy().pop() == pytest.approx(448 * 6 / most, rel=1e-6)
        assert max(float(stored[f"{name}.weight_scale"].float().max()) for name in names) == 448
        factors |= found
    assert len(factors) == len(matrices), "each matrix has its own"


def test_a_head_of_its_own(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """A tied head becomes a tensor, of the same scheme or another one of compressed-tensors."""
    tied = tmp_path / "tied"
    shutil.copytree(plain("qwen3"), tied)
    given = stored_in(tied)
    del given["lm_head.weight"]
    save_file(given, tied / "model.safetensors")
    raw = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(raw))
    for i, (scheme, head) in enumerate(
        (
            ("fp8-block", "fp8-block"),
            ("awq-int4", "awq-int4"),
            ("w4a16", "w4a16"),
            ("w4a16", "w8a16"),
            ("w4a16", "fp8-channel"),
            ("mxfp4", "mxfp4"),
            ("nvfp4", "nvfp4"),
            ("w8a8-int8", "w8a16"),
        )
    ):
        out = tmp_path / str(i)
        quantize_checkpoint(tied, out, recipe(scheme, head=head, group_size=32 if {scheme, head} & set(GROUPED) else 0))
        stored = stored_in(out)
        expected = means(head, stored, "lm_head")
        check_rounding(head, given["model.embed_tokens.weight"].float(), expected)
        assert torch.equal(stored["model.embed_tokens.weight"], given["model.embed_tokens.weight"])
        config = json.loads((out / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
        assert not (
            config["quantization_config"].get("ignore") or config["quantization_config"].get("modules_to_not_convert")
        )
        kept = loaded(out)
        assert isinstance(kept.weights["head.weight"][0], QuantizedMatrix)
        numbers = {
            name: means(scheme, stored, name.removesuffix(".weight")) if QUANTIZED.search(name) else one
            for name, one in given.items()
        }
        check(kept, numbers | {"lm_head.weight": expected})
        if scheme != head:
            assert config["quantization_config"]["config_groups"]["group_1"]["targets"] == ["lm_head"]


def test_a_decoder_of_transformers(tmp_path: Path) -> None:
    """Linear layers of GPT-NeoX are quantized; its head is not, which has another name than those of families."""
    random_foreign("gpt_neox", 0, num_hidden_layers=1).save_pretrained(tmp_path / "plain")
    made = quantize_checkpoint(tmp_path / "plain", tmp_path / "made", Recipe(scheme="fp8-block"))
    types = {name: tensor.dtype for name, tensor in read_checkpoint(tmp_path / "made").tensors.items()}
    at = "gpt_neox.layers.0."
    linears = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert made.num_quantized == 4 and all(types[f"{at}{name}.weight"] == "F8_E4M3" for name in linears)
    assert types["embed_out.weight"] == types["gpt_neox.embed_in.weight"] == "F32"
    with pytest.raises(UserError, match="this head is named embed_out.weight"):
        quantize_checkpoint(tmp_path / "plain", tmp_path / "other", Recipe(scheme="fp8-block", head="fp8-block"))


def test_layers_of_prediction_keep_what_published_ones_keep(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """A layer beyond the model's own: its linears are quantized; eh_proj, its head and embedding stay."""
    extra = tmp_path / "extra"
    shutil.copytree(plain("deepseek_v3"), extra)
    given = stored_in(extra)
    more = {
        name.replace(".layers.1.", ".layers.2."): one.clone() for name, one in given.items() if ".layers.1." in name
    }
    more |= {
        f"model.layers.2.{name}.weight": torch.randn(64, 160).bfloat16()
        for name in ("eh_proj", "shared_head.head", "embed_tokens")
    }
    save_file(given | more, extra / "model.safetensors")
    raw = json.loads((extra / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (extra / "config.json").write_text(json.dumps(raw))
    quantize_checkpoint(extra, tmp_path / "out", recipe("fp8-block"))
    stored = stored_in(tmp_path / "out")
    for name in more:
        matrix = bool(QUANTIZED.search(name)) and "eh_proj" not in name
        assert (f"{name}_scale_inv" in stored) == matrix, name
    left = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert set(left) == {
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.2.mlp.gate",
        "model.layers.2.eh_proj",
        "model.layers.2.shared_head.head",
    }
    loaded(tmp_path / "out")


def test_files_and_shards(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Files are about as large as the source's, tensors of a matrix lie together, other files come along."""
    source = tmp_path / "source"
    source.mkdir()
    given, placed = stored_in(plain("glm4_moe")), {}
    names = sorted(given, key=lambda name: not name.startswith("model"))
    for i in range(4):
        some = names[i * len(names) // 4 : (i + 1) * len(names) // 4]
        save_file({name: given[name] for name in some}, source / f"model-0000{i + 1}-of-00004.safetensors")
        placed |= dict.fromkeys(some, f"model-0000{i + 1}-of-00004.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    shutil.copy(plain("glm4_moe") / "config.json", source)
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", ".hidden"):
        (source / name).write_text(name)
    seen: list[tuple[int, int]] = []
    made = quantize_checkpoint(source, tmp_path / "out", recipe("fp8-block"), lambda *now: seen.append(now))
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *made.files,
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }
    limit = max(path.stat().st_size for path in source.glob("*.safetensors"))
    assert 1 < len(made.files) < 4 and all((out / name).stat().st_size < 1.1 * limit for name in made.files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for name in made.files:
        assert all(one.offset % ITEM_BYTES[one.dtype] == 0 for one in read_header(out / name))
        with safe_open(out / name, "pt") as file:
            found |= dict.fromkeys(file.keys(), name)
            assert all(len(file.get_slice(key)[:1]) for key in file.keys())
    assert index["weight_map"] == found and index["metadata"]["total_size"] == made.bytes_after
    assert all(found[name] == found[f"{name}_scale_inv"] for name in found if f"{name}_scale_inv" in found)
    before = sum(one.nbytes for one in given.values())
    assert seen[-1] == (before, before) == (made.bytes_before,) * 2 and len(seen) == len(given)
    assert made.num_quantized == sum(name.endswith("_scale_inv") for name in found)
    assert 0 < made.error < 0.04 and made.worst in given


def test_one_tensor_at_a_time(plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, most, real = 0, 0, StoredTensor.read

    class Bytes(bytearray):
        """Bytes with weak references."""

    def read(source: StoredTensor) -> bytearray:
        nonlocal live, most
        made = Bytes(real(source))
        live, most = live + 1, max(most, live + 1)
        weakref.finalize(made, freed)
        return made

    def freed() -> None:
        nonlocal live
        live -= 1

    monkeypatch.setattr(StoredTensor, "read", read)
    quantize_checkpoint(plain("qwen3"), tmp_path / "out", recipe("fp8-block"))
    assert (most, live) == (1, 0)


def test_ignored_modules_stay(plain: Callable[[str], Path], tmp_path: Path) -> None:
    ignore = ("mlp", r"re:.*[qkv]_proj")
    for scheme in STEPS:
        out = tmp_path / scheme
        quantize_checkpoint(plain("qwen3"), out, recipe(scheme, ignore=ignore))
        given, stored = stored_in(plain("qwen3")), stored_in(out)
        changed = {name for name in given if name not in stored or stored[name].dtype != given[name].dtype}
        assert changed == {"model.layers.0.self_attn.o_proj.weight"}
        kept = loaded(out)
        assert [name for name, (one, *_) in kept.weights.items() if isinstance(one, QuantizedMatrix)] == [
            "layers.0.attention.output.weight"
        ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": "fp4"}, "scheme fp4 does not exist (one of fp8-block, fp8-channel,"),
        ({"scheme": "w4a16", "head": "q4"}, "scheme q4 does not exist"),
        ({"scheme": "w4a16"}, "has 160 columns, not a multiple of 128: use --group-size 32 or --ignore model."),
        ({"scheme": "awq-int4", "group_size": 36}, "--group-size 36 is not a multiple of 8"),
        ({"scheme": "nvfp4", "group_size": 16}, "scheme nvfp4 has no group size: leave --group-size out"),
        ({"scheme": "mxfp4", "group_size": 16}, "scheme mxfp4 has no group size: leave --group-size out"),
        ({"scheme": "fp8-block", "group_size": 32}, "scheme fp8-block has no group size: leave --group-size out"),
        ({"scheme": "fp8-block", "head": "w8a16", "group_size": 32}, "--lm-head w8a16 is stored as compressed-tensors"),
        ({"scheme": "fp8-block", "ignore": ("nothing",)}, "--ignore nothing matches no matrix that would be quantized"),
        ({"scheme": "fp8-block", "ignore": ("re:(",)}, "--ignore re:( is no regular expression"),
        ({"scheme": "fp8-block", "ignore": ("q_proj",)}, f"--ignore leaves {Q}.weight alone and not model.layers.0."),
        ({"scheme": "fp8-block", "ignore": (UP,)}, f"--ignore leaves {UP}.weight alone and not model.layers.0.mlp."),
    ],
)
def test_refusals(plain: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as error:
        quantize_checkpoint(plain("qwen3"), tmp_path / "out", Recipe(**changes))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_refused_folders(plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, folder = tmp_path / "out", tmp_path / "plain"
    quantize_checkpoint(plain("qwen3"), out, recipe("fp8-block"))
    with pytest.raises(UserError, match="out exists and is not an empty folder: choose a new one"):
        quantize_checkpoint(plain("qwen3"), out, recipe("fp8-block"))
    with pytest.raises(UserError, match=r"out is quantized already \(fp8\): give the unquantized checkpoint"):
        quantize_checkpoint(out, tmp_path / "other", recipe("w4a16"))
    shutil.copytree(plain("qwen3"), folder)
    given = stored_in(folder)
    given[f"{UP}.weight"][3, 5] = float("nan")
    save_file(given, folder / "model.safetensors")
    for ready in (False, True):
        if ready:
            (tmp_path / "nan").mkdir()
        with pytest.raises(UserError, match=f"{UP}.weight has numbers that are not finite"):
            quantize_checkpoint(folder, tmp_path / "nan", recipe("fp8-block"))
        assert (tmp_path / "nan").exists() == ready and not (ready and any((tmp_path / "nan").iterdir()))
    given[f"{UP}.weight"][3, 5] = 14.0
    save_file(given, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{UP}.weight has numbers of 14 and more, .* or --ignore {UP}"):
        quantize_checkpoint(folder, tmp_path / "large", recipe("mxfp4"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1000))  # type: ignore
    with pytest.raises(UserError, match="needs 0.00 GB, and 0.00 GB are free"):
        quantize_checkpoint(plain("qwen3"), tmp_path / "full", recipe("fp8-block"))
    assert not (tmp_path / "full").exists()


def test_the_command(plain: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "quantize",
        str(plain("qwen3")),
        "-o",
        str(tmp_path / "out"),
        "--scheme",
        "w4a16",
        "--group-size",
        "32",
        "--ignore",
        "o_proj",
        "down_proj",
        "--lm-head",
        "w8a16",
    ]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "w4a16, 6 matrices quantized in" in told and "became" in told and "largest relative error" in told
    loaded(tmp_path / "out")
    assert main(words) != 0
    assert re.fullmatch(r"quire: error: -o .*out exists and is not an empty folder: .*\n", capsys.readouterr().err)
