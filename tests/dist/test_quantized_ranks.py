"""Quantized checkpoints on several ranks, in float32: the tokens of one rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, RequestOutput

from ..support.full import full_rows
from ..support.many_ranks import SIZES
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from ..support.stacked_checkpoints import round_experts, write_mxfp4
from ..support.tiny_models import Tiny, random_model
from .test_answers import WIDE, Row, ask, compare, requests, same


def plain(folder: Path, **changes: object) -> Path:
    """A random checkpoint whose slices for 2 ranks are whole groups of 32."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(WIDE | changes))
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("form", "sizes", "changes"),
    [
        ("ct-w4-group", "pp2", {"tie_word_embeddings": True}),
        ("gptq-order", "tp2", {}),
        *full_rows(
            [("ct-w4-order", "tp2", {}), ("ct-mxfp4", "tp2", {}), ("gptq-zeros", "tp2", {"intermediate_size": 96})]
        ),
    ],
    ids=str,
)
def test_tokens_of_one_rank(form: str, sizes: str, changes: Row, tmp_path: Path, engine: Callable[..., LLM]) -> None:
    quantize_checkpoint(plain(tmp_path / "plain", **changes), tmp_path / "quantized", FORMS[form])
    same(engine, tmp_path / "quantized", sizes)


PLACED = (("qwen3", "tp2"), ("qwen3_moe", "tp2"), ("qwen3_moe", "tp2-ep"), ("qwen3_moe", "pp2"))
NVFP4 = [("modelopt-nvfp4", "qwen3_moe", "tp2")]
NVFP4 += full_rows(("ct-nvfp4-inputs", *placed) for placed in PLACED)
NVFP4 += full_rows(("modelopt-nvfp4", *placed) for placed in PLACED if placed != NVFP4[0][1:])


@pytest.mark.parametrize(("form", "family", "sizes"), NVFP4)
def test_tokens_of_an_unquantized_model_with_the_numbers_of_nvfp4(
    form: str,
    family: str,
    sizes: str,
    tmp_path: Path,
    engine: Callable[..., LLM],
    truth: Callable[..., list[RequestOutput]],
) -> None:
    """Ranks read 48 of 96 columns: three groups of 16. Fused parts, and experts, have factors of their own."""
    changes = (("moe_intermediate_size", 96), ("intermediate_size", 96), ("hidden_size", 48))
    random_model(Tiny(family=family, heads=(8, 4), changes=changes), 0).save_pretrained(tmp_path / "plain")
    means = quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", FORMS[form])
    for path in (tmp_path / "plain").glob("*.safetensors*"):
        path.unlink()
    save_file(means, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    compare(ask(engine(tmp_path / "quantized", **SIZES[sizes]), requests()), truth(requests(), tmp_path / "plain"))


def test_tokens_of_one_rank_with_parts_of_stacked_experts(tmp_path: Path, engine: Callable[..., LLM]) -> None:
    """The ranks read 64 and 32 of 96 numbers between gate and down: whole blocks of MXFP4. Only one has the biases."""
    spec = Tiny(family="gpt_oss", heads=(8, 4), bias=True, changes=(("intermediate_size", 96),))
    model = random_model(spec, 0)
    blocks = round_experts(model)
    model.save_pretrained(tmp_path / "plain")
    same(engine, write_mxfp4(tmp_path / "plain", blocks, tmp_path / "quantized"), "tp2")


@pytest.mark.parametrize(
    ("form", "sizes"), [("ct-w4-order", "tp2"), *full_rows([("gptq-8-v2-order", "tp2"), ("gptq-dynamic", "tp2-ep")])]
)
def test_tokens_of_one_rank_whose_experts_are_in_activation_order_or_of_several_widths(
    form: str, sizes: str, tmp_path: Path, engine: Callable[..., LLM]
) -> None:
    spec = Tiny(family="qwen3_moe", heads=(8, 4), changes=(("moe_intermediate_size", 64), ("intermediate_size", 128)))
    random_model(spec, 0).save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", FORMS[form])
    same(engine, tmp_path / "quantized", sizes)
