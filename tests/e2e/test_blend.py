"""CacheBlend with trained models: recall by ratio; over HTTP: chunks, counts and refusals."""

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.contracts.step import Tier

from ..support.full import only_full
from .in_process import running_inside

EXAMPLE = Path(__file__).parents[2] / "examples" / "cache_blend.py"
OPTIONS: dict[str, Any] = {
    "enable_cache_blend": True,
    "block_size": 8,
    "max_model_len": 1024,
    "num_threads": 1,
    "use_tqdm_on_load": False,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("cache_blend", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


def test_a_few_computed_tokens_join_texts_that_reuse_alone_does_not(example: Any, llm: LLM) -> None:
    """The example's second case. Where a note is cut, neither text has the answer."""
    cases = [example.make_case(llm, True, seed) for seed in range(3)]
    found = {}
    for ratio in (None, 0.0, 0.15):
        answers = [example.ask(llm, texts, question, ratio) for texts, question, _ in cases]
        found[ratio] = sum(code in text for (text, _, _), (_, _, code) in zip(answers, cases, strict=True))
        assert ratio is None or min(reused for _, _, reused in answers) > 400
    assert found[None] == found[0.15] == 3 and found[0.0] <= 1


def answer(llm: LLM, prompt: str) -> RequestOutput:
    return llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)[0]


def test_texts_between_separators_are_reused_in_any_order(llm: LLM) -> None:
    llm.reset_prefix_cache()
    notes = [
        "The code of Tomas is 6423.\nTomas lives in Mumbai.\n",
        "Lakral likes tea.\nThe code of Lakral is 5411.\n",
        "The code of Nils is 9034.\nNils lives in Vakton.\n",
    ]
    for note in notes:
        answer(llm, note)
    question = "<|im_end|>\n<|im_start|>assistant\n"
    for order in ((2, 0, 1), (1, 2, 0)):
        parts = ["<|im_start|>user\n", *(notes[i] for i in order), "\nWhat is the code of Lakral?" + question]
        output = answer(llm, " # # ".join(parts))
        assert "5411" in output.outputs[0].text and (output.num_cached_tokens or 0) >= 3 * 16
        assert output.metrics is not None
        assert {one.tier for one in output.metrics.origins.values()} == {Tier.BLENDED}


def test_over_http() -> None:
    note, prompt = [*range(10, 80)], [5, 6, 7, *range(10, 80), 8, 9]
    with running_inside(enable_cache_blend=True) as inside:
        server = inside.server

        def complete(ids: list[int], **fields: Any) -> Any:
            return server.ask("/v1/completions", {"prompt": ids, "max_tokens": 2, "temperature": 0, **fields})

        assert complete(note).status == 200
        given = complete(prompt, kv_chunks=[[3, 73]], blend_ratio=0.5).json()
        assert given["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        (record, *_) = [one for one in server.ask("/debug/requests").json()["requests"] if one["num_prompt"] == 75]
        assert {one["tier"] for one in record["fetched"].values()} == {"blended"}
        scored = [complete(prompt, prompt_logprobs=0, **chunks).json() for chunks in ({}, {"kv_chunks": [[3, 73]]})]
        first, second = (one["choices"][0]["prompt_logprobs"] for one in scored)
        assert first == second and len(second) == 75, "the whole prompt is computed"
        assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in scored] == [0, 0]
        for fields in ({"kv_chunks": [[3, 99]]}, {"kv_chunks": [[3, 2]]}, {"blend_ratio": 2}):
            refused = complete(prompt, **fields)
            assert refused.status == 400 and refused.json()["error"]["param"] in fields
        inside.check()
    with running_inside() as inside:
        refused = inside.server.ask("/v1/completions", {"prompt": prompt, "kv_chunks": [[3, 73]]})
        assert refused.status == 400 and "--enable-cache-blend" in refused.json()["error"]["message"]


NOTES = [
    "The code of Tomas is 6423.\nTomas lives in Mumbai",
    "The code of Lakral is 5411.\nLakral likes tea",
    "The code of Nils is 9034.\nNils lives in Vakton",
]


def asked(order: tuple[int, ...], **mark: bool) -> list[dict[str, Any]]:
    """A chat over notes in this order."""
    texts = [{"type": "text", "text": NOTES[at], **mark} for at in order]
    question = {"type": "text", "text": "What is the code of Lakral?"}
    return [{"role": "system", "content": "Read."}, {"role": "user", "content": [*texts, question]}]


def test_marked_parts_of_chats_are_reused_at_any_place(llm: LLM) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for note in NOTES:
        answer(llm, note)
    for order in ((2, 0, 1), (1, 2, 0)):
        (output,) = llm.chat(asked(order, kv_chunk=True), params, use_tqdm=False)
        assert "5411" in output.outputs[0].text and (output.num_cached_tokens or 0) >= 3 * 16
        llm.reset_prefix_cache()
        (unmarked,) = llm.chat(asked(order), params, use_tqdm=False)
        assert unmarked.prompt_token_ids == output.prompt_token_ids, "the borders of these notes are borders of tokens"
        for note in NOTES:
            answer(llm, note)
        (output,) = llm.chat(asked(order, kv_chunk=True), params.clone(blend_ratio=1.0), use_tqdm=False)
        assert (output.num_cached_tokens or 0) >= 3 * 16, "each note, at another place"
        assert output.outputs[0].token_ids == unmarked.outputs[0].token_ids


def test_marked_parts_over_http() -> None:
    fields = {"max_tokens": 2, "temperature": 0}
    alone = {"prompt": NOTES[1] * 2, "add_special_tokens": False, **fields}
    note = {"type": "text", "text": NOTES[1] * 2, "kv_chunk": True}
    chats = [
        [{"role": "user", "content": [{"type": "text", "text": before}, note]}]
        for before in ("Read.", "Here is a note. Read it all!")
    ]
    with running_inside(enable_cache_blend=True, block_size=8) as inside:
        ask = inside.server.ask
        tokens = ask("/tokenize", {"prompt": alone["prompt"], "add_special_tokens": False}).json()["tokens"]
        whole = len(tokens) // 8 * 8
        assert ask("/v1/completions", alone).status == 200 and whole >= 32
        for messages in chats:
            given = ask("/v1/chat/completions", {"messages": messages, **fields}).json()
            assert given["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole
            prompt = ask("/tokenize", {"messages": messages}).json()["tokens"]
            assert any(prompt[at : at + len(tokens)] == tokens for at in range(len(prompt)))
            items = [{"role": "user", "content": [{**part, "type": "input_text"} for part in messages[0]["content"]]}]
            told = ask("/v1/responses", {"input": items, "max_output_tokens": 2, "temperature": 0, "store": False})
            assert told.json()["usage"]["input_tokens_details"]["cached_tokens"] >= whole
        cut = {"messages": chats[1], "truncate_prompt_tokens": len(tokens) + 8, **fields}
        given = ask("/v1/chat/completions", cut).json()
        assert given["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole, "the part stands elsewhere now"
        for more, param in (
            ({"kv_chunks": [[0, 9]]}, "kv_chunks"),
            ({"kv_chunk": True}, "kv_chunk"),
            ({"blend_separator": "#"}, "blend_separator"),
            ({"kv_chunks": [[0, 9]], "truncate_prompt_tokens": 9}, "kv_chunks"),
        ):
            refused = ask("/v1/chat/completions", {"messages": chats[0], **fields, **more})
            assert refused.status == 400 and refused.json()["error"]["param"] == param, refused.text
        inside.check()
    with running_inside() as inside:
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = inside.server.ask(path, {"messages": chats[0]})
            assert refused.status == 400 and refused.json()["error"]["param"] == "messages"
            assert "--enable-cache-blend" in refused.json()["error"]["message"]


@only_full
@pytest.mark.parametrize("name", ["quire-tiny", "quire-tiny-moe"])
def test_recall_by_ratio(name: str, shared: Path, example: Any) -> None:
    """Held-out notes in random order, in eight texts, a border of which cuts the note of the question."""
    items = json.loads((shared / "models" / "eval.json").read_text())["recall"]
    items = [item for item in items if item["n_notes"] == 40]
    with LLM(shared / "models" / name, **OPTIONS) as llm:
        tokenizer, rng = llm.engine.tokenizer, random.Random(1)
        assert tokenizer is not None
        cases = []
        for item in items:
            lines = [tokenizer.encode(note + "\n") for note in rng.sample(item["notes"], len(item["notes"]))]
            at = lines.index(tokenizer.encode(item["answer_sentence"] + "\n"))
            tokens = [token for line in lines for token in line]
            middle = sum(map(len, lines[:at])) + len(lines[at]) // 2
            borders = [len(tokens) * i // 8 for i in range(1, 8)]
            borders[min(range(7), key=lambda i: abs(borders[i] - middle))] = middle
            texts = [tokens[a:b] for a, b in zip([0, *borders], [*borders, len(tokens)], strict=True)]
            end = f"\n{item['question']}<|im_end|>\n<|im_start|>assistant\n"
            cases.append((texts, tokenizer.encode(end), item["answer"]))
        found = {}
        for ratio in (None, 0.0, 0.05, 0.1, 0.15, 0.3, 1.0):
            found[ratio] = sum(code in example.ask(llm, texts, end, ratio)[0] for texts, end, code in cases)
        print(name, found)
        full = found[None]
        assert full and found[1.0] == full and found[0.15] >= 0.95 * full and found[0.0] <= 0.8 * full
