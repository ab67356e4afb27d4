"""Prompts as embeddings: the embeddings of a prompt's tokens are answered as the tokens are."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.errors import InvalidParameter

from ..support.full import full_rows
from .serving import running_server

PROMPTS = [list(range(5, 45)), list(range(50, 60)), [*range(5, 37), 99, 98, 97]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE: dict[str, Any] = {"device": "cpu", "enable_prompt_embeds": True, "max_num_batched_tokens": 16, "block_size": 16}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**ENGINE) as one:
        yield one


def embedded(llm: LLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return llm.engine.runner.model.embed(torch.tensor(ids)).clone()


def tokens(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    return [[c.token_ids for c in out.outputs] for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[list[list[int]]]:
    return tokens(llm, PROMPTS)


def test_embeddings_are_answered_as_the_tokens_in_chunks_and_beside_texts(llm: LLM, answers: Any) -> None:
    given: list[Any] = [{"prompt_embeds": embedded(llm, ids)} for ids in PROMPTS]
    mixed = [one for pair in zip(given, PROMPTS, strict=True) for one in pair]
    assert tokens(llm, mixed) == [answer for answer in answers for _ in range(2)]
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    assert tokens(llm, given[:1], sampled) == tokens(llm, PROMPTS[:1], sampled)


def test_prompts_share_blocks_only_with_the_same_embeddings(llm: LLM, answers: Any) -> None:
    llm.reset_prefix_cache()
    zeros = tokens(llm, [[0] * 40])
    given = embedded(llm, PROMPTS[0])
    other = given.clone()
    other[0] *= 2

    def cached(prompt: torch.Tensor) -> tuple[int, list[int]]:
        (out,) = llm.generate([{"prompt_embeds": prompt}], GREEDY, use_tqdm=False)
        return out.num_cached_tokens or 0, out.outputs[0].token_ids

    assert cached(given) == (0, answers[0][0]) and cached(other)[0] == 0
    assert cached(given) == (32, answers[0][0])
    assert tokens(llm, [[0] * 40]) == zeros


def test_preempted_requests_are_computed_again_from_their_embeddings(answers: Any) -> None:
    with LLM(**ENGINE, num_gpu_blocks_override=6) as llm:
        given = [{"prompt_embeds": embedded(llm, ids)} for ids in PROMPTS]
        outs = llm.generate(given, GREEDY.clone(max_tokens=40), use_tqdm=False)
        assert llm.engine.core.scheduler.num_preempted > 0
        assert [[c.token_ids[:12] for c in out.outputs] for out in outs] == answers


MTP = {"method": "mtp", "num_speculative_tokens": 2}
RANKS: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "speculative_config": MTP},
    {"data_parallel_size": 2, "enable_expert_parallel": True, "speculative_config": MTP},
    {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
]


@pytest.mark.parametrize("options", [{"speculative_config": MTP}, *full_rows(RANKS)], ids=str)
def test_drafts_and_ranks_answer_embeddings_as_tokens(options: dict[str, Any], shared: Path) -> None:
    """The layer that drafts reads the given embeddings, too, so that as many drafts are right."""
    model, given = str(shared / "models" / "quire-tiny-moe"), GREEDY.clone(max_tokens=24)
    with LLM(model, **ENGINE) as plain:
        embeddings: list[Any] = [{"prompt_embeds": embedded(plain, ids)} for ids in PROMPTS]
        expected = tokens(plain, PROMPTS, given)
    with LLM(model, **ENGINE, **options) as llm:
        drafted = list[list[int]]()
        for prompts in (PROMPTS, embeddings):
            llm.reset_prefix_cache()
            before = [] if "data_parallel_size" in options else list(llm.engine.core.scheduler.drafts.totals)
            assert tokens(llm, prompts, given) == expected
            after = llm.engine.core.scheduler.drafts.totals if before else []
            drafted.append([new - old for new, old in zip(after, before or [0] * len(after), strict=True)])
        assert drafted[0] == drafted[1]
        assert sum(drafted[0]) > 40 or options.keys() != {"speculative_config"}


def test_what_cannot_be_served_is_refused(llm: LLM) -> None:
    given = embedded(llm, PROMPTS[0])
    for prompt, params, words in (
        ({"prompt_embeds": given[:, :-1]}, GREEDY, "numbers for each token"),
        ({"prompt_embeds": given[0]}, GREEDY, "tensor .tokens, hidden"),
        ({"prompt_embeds": given, "prompt": "x"}, GREEDY, "by itself"),
        ({"prompt_embeds": given}, GREEDY.clone(prompt_logprobs=1), "prompt_logprobs"),
        ({"prompt_embeds": given}, GREEDY.clone(repetition_penalty=1.5), "repetition_penalty"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            llm.generate([prompt], params, use_tqdm=False)


def test_a_server_reads_tensors_in_base64(llm: LLM, answers: Any) -> None:
    def encoded(ids: list[int]) -> str:
        file = io.BytesIO()
        torch.save(embedded(llm, ids), file)
        return base64.b64encode(file.getvalue()).decode()

    body = {"prompt": None, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    with running_server("--device", "cpu", "--enable-prompt-embeds") as server:
        reply = server.ask("/v1/completions", body | {"prompt": "", "prompt_embeds": [*map(encoded, PROMPTS)]})
        assert [choice["token_ids"] for choice in reply.json()["choices"]] == [one[0] for one in answers]
        for more, words in (
            ({"prompt_embeds": "AAAA"}, "torch.save"),
            ({"prompt_embeds": encoded([1]), "echo": True}, "echo"),
            ({"prompt_embeds": encoded([1]), "truncate_prompt_tokens": 1}, "truncate"),
            ({"prompt_embeds": encoded([1]), "prompt": "x"}, "excludes prompt"),
            ({}, "prompt is null"),
        ):
            answer = server.ask("/v1/completions", body | more)
            assert answer.status == 400 and words in answer.json()["error"]["message"], answer.json()
