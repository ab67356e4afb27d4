"""An engine that gets new weights, or sleeps, answers as an engine that starts with these weights."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.contracts.errors import ConfigError, EngineAsleep, UserError
from quire.distributed.transfer_group import TransferGroup

from ..support.addresses import free_port
from ..support.full import full_rows
from ..support.quantized_checkpoints import two_checkpoints

SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "max_model_len": 128, "max_num_seqs": 4,
    "block_size": 16, "dtype": "float32", "num_threads": 1, "use_tqdm_on_load": False,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [(7 * i + s) % 90 + 1 for i in range(40)]} for s in range(2)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LIFE = {"weight_transfer_config": {"backend": "files"}, "enable_sleep_mode": True}
Make = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture
def two(tmp_path: Path) -> Make:
    """Two checkpoints of a family and a format of weights, which differ in all numbers."""

    def make(family: str, form: str = "") -> tuple[Path, Path]:
        return two_checkpoints(family, form, 32, tmp_path)

    return make


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def of_fresh(folder: Path) -> list[list[int]]:
    with LLM(str(folder), **SMALL) as llm:
        return tokens(llm)


def update(llm: LLM, info: Any) -> None:
    llm.start_weight_update()
    llm.update_weights(info)
    llm.finish_weight_update()


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", "ct-w4-order"),
        *full_rows([("qwen3_moe", ""), ("deepseek_v3", ""), ("gpt_oss", ""), ("qwen3_next", "")]),
    ],
)
def test_tokens_of_an_engine_that_starts_with_these_weights(family: str, form: str, two: Make) -> None:
    first, second = two(family, form)
    expected = of_fresh(second)
    with LLM(str(first), **SMALL, **LIFE) as llm:
        old = tokens(llm)
        assert old != expected
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        llm.sleep(2, mode="keep")
        with pytest.raises(EngineAsleep, match="the engine sleeps"):
            tokens(llm)
        llm.wake_up()
        assert list(stream)[-1].outputs[0].token_ids == old[0]
        update(llm, {"update_info": {"path": str(second)}})
        assert tokens(llm) == expected, "nothing of the old prefix cache is left"
        llm.sleep(1)
        llm.wake_up()
        assert tokens(llm) == expected
        sent = load_file(first / "model.safetensors")
        lost = sent.popitem()
        with pytest.raises(UserError, match="lacks"):
            update(llm, sent.items())
        with pytest.raises(UserError, match=r"has the shape|shape"):
            update(llm, [*sent.items(), (lost[0], torch.zeros(3, 5))])
        assert tokens(llm) == expected, "an update that cannot end changes nothing"
        update(llm, [*sent.items(), lost])
        assert tokens(llm) == old


def test_a_file_that_breaks_off_leaves_no_mixed_weights(two: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two("qwen3", "")
    from quire.weights import unpacked

    with LLM(str(first), **SMALL, **LIFE) as llm:
        retake, count = unpacked.retake, 0

        def fail(*given: Any) -> None:
            nonlocal count
            count += 1
            if count > 3:
                raise OSError("the disk is gone")
            retake(*given)

        with monkeypatch.context() as broken:
            broken.setattr(unpacked, "retake", fail)
            with pytest.raises(OSError, match="gone"):
                update(llm, {"update_info": {"path": str(second)}})
        with pytest.raises(EngineAsleep, match=r"not whole.*the disk is gone.*send a whole update"):
            tokens(llm)
        update(llm, {"update_info": {"path": str(second)}})
        assert tokens(llm) == of_fresh(second)


def test_weights_of_another_model_and_options_that_are_off(two: Make, tmp_path: Path) -> None:
    first, _ = two("qwen3", "")
    other = shutil.copytree(first, tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    with LLM(str(first), **SMALL, **LIFE) as llm, pytest.raises(UserError, match="describes another model"):
        update(llm, {"update_info": {"path": str(other)}})
    with LLM(str(first), **SMALL) as llm:
        for call in (llm.sleep, llm.start_weight_update):
            with pytest.raises(ConfigError, match="make (it|the engine) with"):
                call()


def test_tensors_that_a_trainer_sends(two: Make) -> None:
    first, second = two("qwen3", "")
    port = free_port()
    sent = load_file(second / "model.safetensors")

    def train() -> None:
        group = TransferGroup("127.0.0.1", port, rank=0, size=2, seconds=20.0)
        for tensor in sent.values():
            group.send(tensor)

    with LLM(str(first), **SMALL, weight_transfer_config={"backend": "gloo"}) as llm:
        with pytest.raises(UserError, match="call /init_weight_transfer_engine first"):
            llm.start_weight_update()
        trainer = threading.Thread(target=train, daemon=True)
        trainer.start()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        llm.init_weight_transfer_engine({"init_info": place})
        llm.start_weight_update()
        every = list(sent.items())
        for some in (every[:5], every[5:]):
            names = {"names": [name for name, _ in some], "dtype_names": [str(one.dtype) for _, one in some]}
            llm.update_weights({"update_info": names | {"shapes": [list(one.shape) for _, one in some]}})
        llm.finish_weight_update()
        trainer.join()
        assert tokens(llm) == of_fresh(second)
