"""An unquantized checkpoint becomes FP8 while it is loaded: --quantization fp8, LLM(quantization="fp8")."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.args.checkpoint import read_checkpoint_config
from quire.assemble.engine import assemble
from quire.assemble.quantize_checkpoint import Recipe, plan_quantization
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, WeightsError
from quire.contracts.scheme import Scheme
from quire.explain.verify.parity import verify
from quire.kernels.linear import quantized_ref
from quire.kernels.pack.matrix import QuantizedMatrix, moved
from quire.kernels.pack.nearest import quantized
from quire.layers.context import StepContext
from quire.plan.layout import layout
from quire.quantization.assigned import with_formats
from quire.quantization.read import ONLINE

from ...support.filled_models import sliced
from ...support.tiny_models import Tiny, random_model, write_model
from .test_formats import loaded, numbers, written

BLOCKS, CHANNELS = (
    Scheme(values="e4m3", block=block, inputs=inputs) for block, inputs in (((128, 128), "group"), ((1, 0), "token"))
)


def by_formula(weight: Tensor, high: int, wide: int) -> Tensor:
    """max(amax, 1e-10) / 448 for each block, values rounded to the nearest."""
    out = torch.empty_like(weight)
    for i in range(0, weight.shape[0], high):
        for j in range(0, weight.shape[1], wide):
            block = weight[i : i + high, j : j + wide].float()
            scale = block.abs().max().clamp(min=1e-10) / 448
            out[i : i + high, j : j + wide] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return out


@pytest.mark.parametrize(
    ("rows", "columns", "scheme"),
    [(256, 384, BLOCKS), (1280, 128, BLOCKS), (130, 72, CHANNELS), (2050, 8, CHANNELS)],
    ids=str,
)
def test_rounding(rows: int, columns: int, scheme: Scheme) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    weight[1, 0] = 1e30
    high, wide = scheme.block[0], scheme.block[1] or columns
    assert torch.equal(numbers(quantized(weight.clone(), scheme).check()), by_formula(weight, high, wide))


@pytest.mark.parametrize("model", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_blocks_where_they_fit(tmp_path: Path, model: str) -> None:
    folder = written(tmp_path, model)
    stored = load_file(folder / "model.safetensors")
    kept = loaded(folder, asked="fp8")
    blocks = {}
    for param in kept.layout:
        for weight in kept.weights[param.name]:
            if isinstance(weight, QuantizedMatrix):
                blocks[param.name] = weight.scheme.block
                wide = weight.shape[1] % 128 == 0
                rows = [part.rows for part in param.parts[: len(param.parts) // len(kept.weights[param.name])]]
                assert blocks[param.name] == ((128, 128) if wide and not any(n % 128 for n in rows) else (1, 0))
        plain = torch.cat([sliced(part, stored[part.stored]) for part in param.parts])
        assert (kept.numbers(param) - plain).abs().max() <= 0.07 * plain.abs().max()
    assert (blocks and (1, 0) in blocks.values()) and ((128, 128) in blocks.values()) == (model == "deepseek_v3")
    never = ("embed.weight", "head.weight", "router.weight", "kv_up.weight")
    assert not [name for name in blocks if name.endswith(never)]


def test_an_engine(tmp_path: Path) -> None:
    """The option reaches the plan, the banner and the layers; answers are those of the quantized numbers."""
    random_model(Tiny(family="qwen3"), 0).save_pretrained(tmp_path)
    options = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 2, "quantization": "fp8"}
    engine = assemble(EngineConfig.from_flat(model=str(tmp_path), **options))
    said = "quantized to FP8 while they are loaded: blocks of 128 x 128 where they fit"
    assert any(said in note for note in engine.notes)
    layer = engine.worker.model.layers[0].mlp.gate_up
    stored, x = load_file(tmp_path / "model.safetensors"), torch.randn(3, 64)
    weight = torch.cat([stored[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    matrix = quantized(weight.float(), CHANNELS)
    gate, up = F.linear(quantized_ref.rounded(x, matrix), numbers(matrix)).chunk(2, 1)
    step = StepContext(torch.arange(0), (), [])
    torch.testing.assert_close(layer(x, step), F.silu(gate) * up)
    gate, up = (x @ weight.T).chunk(2, 1)
    assert not torch.allclose(layer(x, step), F.silu(gate) * up, rtol=1e-4, atol=1e-4), "activations are not quantized"
    engine.close()
    with LLM(model=str(tmp_path), **options) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 4
    with pytest.raises(ConfigError, match="--quantization awq: .*config.json has no quantization_config"):
        assemble(EngineConfig.from_flat(model=str(tmp_path), **options | {"quantization": "awq"}))


def test_verification_of_weights_that_are_quantized_while_loading(tmp_path: Path) -> None:
    random_model(Tiny(family="qwen3"), 0).save_pretrained(tmp_path)
    config = EngineConfig.from_flat(skip_tokenizer_init=True, max_num_seqs=2, quantization="fp8")
    report = verify(str(tmp_path), config)
    assert report.ok and "FP8 per channel, activations per token" in report.render()


def test_packed_matrices_move(tmp_path: Path) -> None:
    """As with --load-device cpu: every tensor of what a kernel packed, and nothing twice."""
    matrix = quantized(torch.randn(256, 256), BLOCKS)
    gone = moved((matrix, torch.ones(2)), torch.device("meta"))
    assert gone[0].values.device.type == gone[0].scale.device.type == gone[1].device.type == "meta"
    assert gone[0].scheme is matrix.scheme and gone[0].check().shape == (256, 256)
    assert moved(matrix, torch.device("cpu")) is matrix


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    with pytest.raises(WeightsError, match="mlp.down_proj.weight has numbers that are not finite"):
        loaded(tmp_path, asked="fp8")


@pytest.mark.parametrize(
    ("family", "plain"), [("qwen3_next", ["rates"]), ("kimi_linear", ["decays", "gates", "rates"])]
)
def test_decays_strengths_and_low_rank_gates_stay_as_they_are(tmp_path: Path, family: str, plain: list[str]) -> None:
    """While the checkpoint is loaded, and where a quantized one is written."""
    write_model(random_model(Tiny(family=family), 0), tmp_path, family)
    params = layout(read_checkpoint_config(tmp_path))
    matrices = [one for one in with_formats(params, {"quant_method": ONLINE}) if one.name.startswith("layers.0.delta.")]
    matrices = [one for one in matrices if len(one.shape) == 2]
    assert sorted(one.name.split(".")[3] for one in matrices if one.scheme is None) == plain
    items = plan_quantization(tmp_path, Recipe(scheme="fp8-channel")).items
    rules = {item.source.name: item.rule for item in items}
    assert all(bool(rules[part.stored]) == bool(one.scheme) for one in matrices for part in one.parts)
