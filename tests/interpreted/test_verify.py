"""`quire verify` over the kernels of a GPU, interpreted: steps are those of transformers. The full run alone has it."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace
from pathlib import Path

import pytest

from quire.assemble.engine import Engine
from quire.config.engine import EngineConfig
from quire.explain.verify import request
from quire.explain.verify.parity import verify
from quire.kernels import triton_runtime
from quire.kernels.select import Choice
from quire.kernels.supports import SUPPORTS

from ..support.full import only_full
from ..support.tiny_models import Tiny, random_model, write_model

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

FAMILIES = (
    *("qwen3", "gpt_oss", "gemma4_moe", "llama4_text", "qwen2_moe", "cohere2", "deepseek_v3", "deepseek_v32"),
    *("qwen3_5_text", "kimi_linear", "nemotron_moe", "lfm2"),
)
KERNELS = {"triton", "cuda"}
HOST = {"step", "sampling"}  # operations of a CPU's model runner


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Let a CPU's model runner choose the kernels of a GPU, for a few tokens. What it chooses comes into the list."""
    found, assemble = list[Choice](), request.assemble

    def assembled(config: EngineConfig) -> Engine:
        engine = assemble(config)
        found.extend(engine.kernels.choices)
        return engine

    for operation in SUPPORTS.keys() - HOST:
        wider = {
            name: replace(one, devices=one.devices | {"cpu"}) if name in KERNELS else one
            for name, one in SUPPORTS[operation].items()
        }
        monkeypatch.setitem(SUPPORTS, operation, wider)
    monkeypatch.setattr(request, "NUM_TOKENS", 3)
    monkeypatch.setattr(request, "NUM_PROMPT", 9)
    monkeypatch.setattr(request, "assemble", assembled)
    return found


@only_full
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_gpu_kernels(family: str, chosen: list[Choice], tmp_path: Path) -> None:
    write_model(random_model(Tiny(family=family, bias=True), 0), tmp_path, family)
    config = EngineConfig.from_flat(
        num_threads=1,
        use_tqdm_on_load=False,
        kv_cache_memory_bytes=1 << 22,
        max_num_seqs=2,
        max_model_len=64,
        enforce_eager=True,
    )
    peer = tmp_path / "peer"
    report = verify(str(tmp_path), config, reference=peer if peer.is_dir() else None)
    assert report.ok, report.render()
    assert {choice.name for choice in chosen if choice.op not in HOST} <= KERNELS
