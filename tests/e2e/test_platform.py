"""A platform that Quire does not have runs on the references alone, and without rows it is refused kernel by kernel."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import ConfigError

from ..support import fake_platform
from ..support.named_code import missing

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-platform.md").read_text()
OPTIONS = {"dtype": "float32", "num_threads": 1, "num_blocks": 8, "max_num_seqs": 1, "max_model_len": 64}


def test_a_platform_of_references_gives_the_tokens_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, greedy: Callable[..., SamplingParams]
) -> None:
    found = []
    for device in ("cpu", fake_platform.NAME):
        with monkeypatch.context() as patch:
            brought = fake_platform.bring(patch) if device == fake_platform.NAME else fake_platform.FakeDevice()
            with brought as placed, LLM(device="cpu", load_device="cpu", **OPTIONS) as llm:
                found.append(llm.generate([[5, 6, 7]], greedy(3), use_tqdm=False)[0].outputs[0].token_ids)
                kernels = {choice.name for choice in llm.engine.kernels.choices}
                assert llm.engine.device.device == device
                assert (kernels == {"ref"}) == (placed.placed > 0) == (device == fake_platform.NAME)
    assert found[0] == found[1]


def test_a_platform_without_kernels_is_refused_with_a_reason_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_platform.bring(monkeypatch, kernels=False)
    with pytest.raises(ConfigError, match=r"of norm serves float32 on fake \(.*ref: runs on cpu, cuda"):
        LLM(**OPTIONS)


def test_the_page_names_what_exists() -> None:
    assert missing(PAGE) == []
    for name in ("fake_platform.py", "SUPPORTS", "resolve_device", "PHASES"):
        assert name in PAGE
