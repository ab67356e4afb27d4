"""Weights "in host memory" beside every feature that a GPU may have with them: answers are those of the plain engine.

The device is a CPU, whose copies of weights come as late as a device may make them: see `support/late_copies.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.errors import ConfigError
from quire.kernels.pack.matrix import leaves

from ..support.adapters import named, write_adapter
from ..support.full import full_rows
from ..support.late_copies import apart
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from .walked import BASE, CONTEXT, MODELS

BUNDLED = "quire-tiny"
ALL = 1.0  # GiB: more than these models have
PROMPTS = [[5, 6, 7, 8] * 5, [9, 3, 4], list(range(20, 60))]


@dataclass(frozen=True)
class Together:
    """The bundled model or one of the random walk, and what its engine has beside weights in host memory.

    form      quantized format, of `quantized_checkpoints`; "": none
    method    of speculative decoding; "": none
    slots     of layers in the device's memory
    """

    model: str
    form: str = ""
    method: str = ""
    slots: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.model, self.form, self.method, *self.options)))


QUANTIZED = "fp8-tensor", "ct-fp8-block", "ct-int8-channel", "ct-w4-channel", "gptq-channel"
ROWS = [Together(BUNDLED, slots=2, options={"quantization": "fp8"})]
MORE = [
    Together(BUNDLED, slots=2),
    Together("qwen3_moe", form="ct-w4-channel", slots=2),
    *(Together("qwen3", form=form) for form in QUANTIZED),
    *(Together("qwen3_moe", form=form) for form in ("fp8-tensor", "ct-int8-channel", "gptq-channel")),
    *(Together(name) for name in MODELS),
    *(Together(name, method=name.rpartition("+")[2]) for name in MODELS if name.endswith("+mtp")),
    Together("qwen3+eagle", method="eagle3"),
    Together("qwen3+eagle", method="eagle"),
    Together("qwen3", method="draft_model"),
    Together("qwen3", method="ngram", slots=2),
    Together("qwen3", options={"enable_lora": True, "max_lora_rank": 8}),
    Together("qwen3_moe", options={"enable_lora": True, "max_lora_rank": 8}),
    Together("qwen3", options={"enable_cache_blend": True, "blend_ratio": 1.0}),
    Together("qwen3", options={"batch_invariant": True}),
    Together("qwen3", options={"async_depth": 2, "kv_offload_gb": 0.01, "num_blocks": 10}),
]
Written = Callable[[Together], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function that writes a checkpoint; it returns the folder, and the drafters by method."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def write(row: Together) -> tuple[Path, dict[str, Any]]:
        if row.model == BUNDLED:
            return bundled_model(), {}
        if row.model not in made:
            folder = tmp_path_factory.mktemp("model") / "model"
            made[row.model] = folder, {"ngram": {}, **MODELS[row.model].write(folder)}
        folder, methods = made[row.model]
        if row.form:
            quantize_checkpoint(folder, quantized := tmp_path_factory.mktemp(row.form), FORMS[row.form])
            folder = quantized
        return folder, methods

    return write


def answers(folder: Path, row: Together, methods: dict[str, Any], **more: Any) -> list[Any]:
    """Return tokens and log-probabilities of an engine."""
    options = BASE | {"skip_tokenizer_init": True, "enforce_eager": True, "block_size": 16} | row.options | more
    if row.method:
        options["speculative_config"] = {"method": row.method, "num_speculative_tokens": 2} | methods[row.method]
    adapted = None
    if row.options.get("enable_lora"):
        adapter = folder.parent / "adapter"
        adapted = named(adapter if adapter.exists() else write_adapter(folder, adapter, rank=4, size=0.06))
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1, detokenize=False)
    with LLM(str(folder), **options) as llm:
        found = [llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapted) for _ in range(2)]
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for outputs in found for one in outputs]


@pytest.mark.parametrize("row", [*ROWS, *full_rows(MORE)], ids=str)
def test_answers_are_those_of_weights_on_the_device(
    row: Together, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, methods = written(row)
    expected = answers(folder, row, methods)
    made = apart(monkeypatch, row.slots)
    assert answers(folder, row, methods, cpu_offload_gb=ALL) == expected
    assert made[0].copied > 20, "each layer comes in each step"


def test_the_layers_that_were_chosen_are_streamed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, 2)
    with LLM(**BASE, enforce_eager=True, cpu_offload_gb=0.01) as llm:
        model, told = llm.engine.worker.model, llm.engine.core.facts.plans["host weights"]
        assert model.streamed is not None and list(model.streamed._layers) == [1, 3, 5, 7]
        assert told == "4 of 8 layers, 0.01 GiB, through 0.01 GiB of the device"
        tensor = next(leaves(model.owner("layers.1.mlp.down").packed))
        own = tensor.clone()
        model.owner("layers.5.mlp.down")  # lies in the same slot
        assert not torch.equal(tensor, own)
        model.owner("layers.1.mlp.down")
        assert torch.equal(tensor, own)


def test_a_cpu_has_no_other_memory() -> None:
    with pytest.raises(ConfigError, match="the memory of a CPU is host memory, so no weights can leave it: leave out"):
        LLM(device="cpu", cpu_offload_gb=1.0, max_model_len=CONTEXT)
