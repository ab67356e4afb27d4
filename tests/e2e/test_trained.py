"""The bundled, really trained model: its answers to held-out questions and its loss are those of transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams

from ..support.full import FULL

WINDOW = 1024
LENGTHS = {"chat": 24, "lines": 12}  # tokens, as the model's card was measured


@pytest.fixture(scope="module")
def evaluation(shared: Path) -> dict[str, Any]:
    """Held-out notes with questions, and held-out text."""
    path = shared / "models" / "eval.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"num_threads": 1, "use_tqdm_on_load": False}
    with LLM(dtype="float32", max_num_seqs=32, kv_cache_memory_bytes=300 << 20, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Any:
    """The same weights in transformers, float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(llm.engine.folder, dtype=torch.float32).eval()


def question(item: dict[str, Any], form: str) -> str:
    notes = "\n".join(item["notes"])
    if form == "lines":
        return f"{notes}\n\nQuestion: {item['question']}\nAnswer:"
    return f"<|im_start|>user\n{notes}\n\n{item['question']}<|im_end|>\n<|im_start|>assistant\n"


def is_right(item: dict[str, Any], form: str, output: RequestOutput) -> bool:
    text = output.outputs[0].text
    if form == "lines":
        return text.split("\n")[0].strip() == item["answer"]
    return text.strip() in (item["answer_sentence"], item["answer"], item["answer"] + ".")


@torch.inference_mode()
def transformers_answers(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens, the end of sequence included, in batches of prompts of like length."""
    ends = set(model.generation_config.eos_token_id)
    found: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), 10):
        batch = order[start : start + 10]
        width = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[3] * (width - len(prompts[i])) + prompts[i] for i in batch])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count)
        for i, row in zip(batch, out[:, width:].tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(row) if token in ends), count)
            found[i] = row[:end]
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize("form", LENGTHS)
def test_every_question_is_answered_as_transformers_does(
    llm: LLM, reference: Any, evaluation: dict[str, Any], form: str
) -> None:
    """Every fourth one is answered right, and some token by token as there; with --full all."""
    assert len(evaluation["recall"]) == 200
    items = evaluation["recall"][:: 1 if FULL else 4]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTHS[form])
    outputs = llm.generate([question(item, form) for item in items], params, use_tqdm=False)
    wrong = [i for i, (item, out) in enumerate(zip(items, outputs, strict=True)) if not is_right(item, form, out)]
    assert wrong == []
    some = outputs[:: 1 if FULL else 3]
    expected = transformers_answers(reference, [o.prompt_token_ids for o in some], LENGTHS[form])
    assert [o.outputs[0].token_ids for o in some] == expected


def test_the_model_with_experts_answers_as_transformers_does(shared: Path, evaluation: dict[str, Any]) -> None:
    import transformers

    folder = shared / "models" / "quire-tiny-moe"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    items, options = evaluation["recall"][::16], {"num_threads": 1, "use_tqdm_on_load": False}
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes=100 << 20, **options) as llm:
        outputs = llm.generate(
            [question(item, "chat") for item in items],
            SamplingParams(temperature=0.0, max_tokens=LENGTHS["chat"]),
            use_tqdm=False,
        )
    assert all(is_right(item, "chat", out) for item, out in zip(items, outputs, strict=True))
    expected = transformers_answers(model, [o.prompt_token_ids for o in outputs], LENGTHS["chat"])
    assert [o.outputs[0].token_ids for o in outputs] == expected


def loss(llm: LLM, ids: list[int]) -> float:
    """Mean negative log-likelihood per token in windows, from prompt logprobs."""
    windows = [ids[at : at + WINDOW + 1] for at in range(0, len(ids) - 1, WINDOW)]
    outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    rows = [(t, row) for o in outputs for t, row in zip(o.prompt_token_ids, o.prompt_logprobs or (), strict=True)]
    scored = [row[token].logprob for token, row in rows if row is not None]
    assert len(scored) == len(ids) - 1
    return -sum(scored) / len(scored)


@pytest.fixture(scope="module")
def reference_loss(llm: LLM, reference: Any, evaluation: dict[str, Any]) -> Callable[[], tuple[list[int], float]]:
    """The held-out text as ids, and transformers' loss on it in float32, worked out once."""
    ids = llm.get_tokenizer().encode(evaluation["perplexity_text"], add_special_tokens=False)
    known: list[float] = []

    def measure() -> tuple[list[int], float]:
        if not known:
            total = 0.0
            with torch.inference_mode():
                for at in range(0, len(ids) - 1, WINDOW):
                    piece = torch.tensor([ids[at : at + WINDOW + 1]])
                    logits = reference(piece[:, :-1]).logits[0]
                    total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            known.append(total / (len(ids) - 1))
        return ids, known[0]

    return measure


def test_the_loss_on_held_out_text_in_float32(llm: LLM, reference_loss: Any) -> None:
    ids, expected = reference_loss()
    assert loss(llm, ids) == pytest.approx(expected, abs=5e-5)


def test_the_loss_on_held_out_text_in_bfloat16(llm: LLM, reference_loss: Any) -> None:
    ids, expected = reference_loss()
    options = {"num_threads": 1, "use_tqdm_on_load": False}
    with LLM(dtype="bfloat16", max_num_seqs=4, kv_cache_memory_bytes=64 << 20, **options) as half:
        assert half.engine.dtype.dtype == "bfloat16"
        found = loss(half, ids)
    assert found != pytest.approx(expected, abs=1e-7)  # it did compute in another type
    assert found == pytest.approx(expected, abs=5e-3)
