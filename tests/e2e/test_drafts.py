"""Speculative decoding, end to end in float32: every answer is that of plain decoding, whatever is asked."""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel

from ..support.drafters import KnownAnswers
from ..support.features import set_drafter
from ..support.full import full_rows
from ..support.pairwise import label, pairwise
from .in_process import running_inside
from .plain_decoding import (
    CODE,
    COLD,
    LONG,
    OPTIONS,
    PROSE,
    REQUESTS,
    SYNTHETIC,
    WARM,
    Truth,
    answers,
    bundled_truth,
    check,
    params,
    structured,
)

FACTORS = {
    "async_depth": (1, 2), "k": (1, 3, 7), "max_num_batched_tokens": (24, 2048), "num_gpu_blocks_override": (None, 24),
    "enable_prefix_caching": (True, False), "shortest": (1, 3), "guesses": ("ngram", "right", "random"),
    "kv_offload_gb": (0.0, 0.02), "scheduling_policy": ("fcfs", "priority"),
}  # fmt: skip
WHOLE = FACTORS | {"guesses": ("ngram", "right", "random", "wrong")}
# Each value of each factor is in one of these rows. Pairs of them meet on the mock (tests/unit/engine).
CHOSEN = [
    dict(zip(FACTORS, values, strict=True))
    for values in (
        (2, 3, 24, 24, True, 3, "ngram", 0.02, "priority"),
        (1, 7, 2048, None, False, 1, "random", 0.0, "fcfs"),
        (2, 1, 2048, None, True, 1, "right", 0.0, "fcfs"),
    )
]


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Plain decoding of all requests."""
    return bundled_truth()


@pytest.fixture
def plain(truth: Truth) -> list[Any]:
    """The answers of plain decoding."""
    return truth.answers


@pytest.fixture
def drafting() -> Iterator[Callable[..., LLM]]:
    """Makes engines with n-gram drafts."""
    made: list[LLM] = []

    def make(k: int = 3, shortest: int = 1, more: Any = None, **options: Any) -> LLM:
        given = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": shortest, "prompt_lookup_max": 4}
        made.append(LLM(**OPTIONS | options, speculative_config=given | (more or {})))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def possible(row: dict[str, Any]) -> bool:
    """False with tiers and without the prefix cache, which finds their blocks."""
    return bool(row.get("enable_prefix_caching", True) or not row.get("kv_offload_gb"))


def rows() -> list[Any]:
    """CHOSEN; with --full also a cover of the pairs of FACTORS and the whole product of WHOLE, which has tiers and
    priorities at random."""
    chosen, chance = pairwise(FACTORS, possible), random.Random(0)
    varied = WHOLE | {name: (None,) for name in ("kv_offload_gb", "scheduling_policy")}
    long = [dict(zip(WHOLE, values, strict=True)) for values in itertools.product(*varied.values())]
    for row in long:
        row["kv_offload_gb"] = chance.choice((0.0, 0.02 * row["enable_prefix_caching"]))
        row["scheduling_policy"] = chance.choice(FACTORS["scheduling_policy"])
    more = [row for row in chosen if row not in CHOSEN]
    more += [row for row in long if row not in CHOSEN and row not in chosen]
    return [pytest.param(row, id=label(row)) for row in [*CHOSEN, *full_rows(more)]]


@pytest.mark.parametrize("row", rows())
def test_answers_are_those_of_plain_decoding(row: dict[str, Any], truth: Truth, drafting: Callable[..., LLM]) -> None:
    guesses = row["guesses"]
    llm = drafting(**{name: value for name, value in row.items() if name != "guesses"})
    core = llm.engine.core
    if guesses != "ngram":
        runner = llm.engine.worker
        vocab = core.facts.vocab_size
        known = KnownAnswers(truth.texts, runner.sampler.table.rows, guesses, vocab)
        set_drafter(runner, known)
        core.scheduler.guess = known.guess
    check(answers(llm, REQUESTS), truth.answers)
    core.check()
    runs, drafts, *accepted = core.scheduler.drafts.totals
    assert runs > 50 and accepted == sorted(accepted, reverse=True) and len(accepted) == row["k"]
    assert (core.scheduler.num_preempted > 0) == (row["num_gpu_blocks_override"] is not None)
    share = sum(accepted) / drafts
    assert guesses != "right" or share > 0.9, "but for those behind the end of an answer"
    assert guesses != "wrong" or share < 0.02
    assert guesses != "random" or 0.1 < share < 0.9
    if row["k"] <= 3 and row["shortest"] == 3 and guesses == "ngram":
        assert 0.3 <= share <= 0.9, "a run of a drafter that guesses right and wrong"


@pytest.mark.parametrize(("depth", "every"), [(2, 3), *full_rows([(1, 1), (2, 1)])])
def test_auto_gives_the_same_answers(depth: int, every: int, plain: list[Any], drafting: Callable[..., LLM]) -> None:
    llm, place = drafting(more={"num_speculative_tokens": "auto"}, async_depth=depth), slice(0, None, every)
    check(answers(llm, REQUESTS, place), plain[place], place)
    facts = llm.engine.core.facts
    assert (facts.num_drafts, facts.auto_drafts) == (7, (1, 3, 7)) and llm.engine.core.scheduler.drafts.totals[0] > 0


@pytest.mark.parametrize(
    ("asked", "shares"),
    [
        ({"synthetic_acceptance_rates": [0.75, 0.5, 0.25]}, [0.75, 0.5, 0.25]),
        *full_rows([({"synthetic_acceptance_length": 2.6}, [1, 0.6, 0])]),
    ],
)
def test_synthetic_acceptance_is_what_was_asked_for(
    asked: dict[str, Any], shares: list[float], drafting: Callable[..., LLM]
) -> None:
    """Whatever is drafted and sampled; a grammar's drafts are not touched."""
    llm = drafting(3, more=SYNTHETIC | asked, async_depth=2)
    assert any("for measurements only" in note for note in llm.engine.notes)
    llm.generate([PROSE, CODE, LONG], params(COLD | {"max_tokens": 120}), use_tqdm=False)
    runs, made, *accepted = llm.engine.core.scheduler.drafts.totals
    assert runs > 90 and made >= 3 * runs - 9
    np.testing.assert_allclose(np.array(accepted) / runs, shares, atol=0.04)
    words = "( (module|provides|class|function|a))*"
    held = llm.generate(LONG, params(WARM | {"temperature": 2.0, "n": 4} | structured(regex=words)), use_tqdm=False)[0]
    for output in held.outputs:
        assert output.finish_reason == "length" and re.match(words, output.text) and 0 < sum(output.drafts[1:])


def test_a_second_turn_finds_the_blocks_of_the_first(drafting: Callable[..., LLM]) -> None:
    llm = drafting()
    first = llm.generate(LONG, params(COLD), use_tqdm=False)[0]
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    again = llm.generate(ids + [5], params(COLD | {"max_tokens": 4}), use_tqdm=False)[0]
    assert again.num_cached_tokens == (len(ids) - 1) // 16 * 16


def test_fewer_steps_are_taken(drafting: Callable[..., LLM], plain: list[Any]) -> None:
    """Each of these answers repeats itself, so a step gives more than a token."""
    llm = drafting(3)
    requests = [(LONG, COLD)]
    assert answers(llm, requests)[0][0] == plain[2][0]
    assert llm.engine.core._step < 38


@pytest.mark.parametrize(("ranges", "rows"), [([[1, 2, 3], [3, 8, 1]], 2), ([[1, 1, 3], [2, 9, 0]], 1)])
def test_k_may_depend_on_the_number_of_requests(
    ranges: list[list[int]], rows: int, drafting: Callable[..., LLM]
) -> None:
    llm = drafting(3, more={"num_speculative_tokens_per_batch_size": ranges})
    seen: dict[int, int] = {}
    submit = llm.engine.core.executor.submit

    def submitted(plan: Any) -> None:
        if plan.num_decodes:
            most = int(plan.num_tokens[: plan.num_decodes].max())
            seen[plan.num_decodes] = max(seen.get(plan.num_decodes, 0), most)
        submit(plan)

    llm.engine.core.executor.submit = submitted  # type: ignore[method-assign]
    llm.generate([LONG, LONG + " ", CODE, PROSE], params(COLD | {"max_tokens": 20}), use_tqdm=False)
    assert seen[4] == rows
    llm.generate(LONG, params(COLD | {"max_tokens": 20}), use_tqdm=False)
    assert seen[1] == 4


def test_a_request_may_not_ask_for_more_drafts_than_the_engine_makes(drafting: Callable[..., LLM]) -> None:
    llm = drafting(2)
    with pytest.raises(InvalidParameter, match="speculative_tokens=3 exceeds this engine's 2 drafts"):
        llm.generate(PROSE, params({"speculative_tokens": 3}), use_tqdm=False)


REFUSED: list[tuple[Any, str]] = [
    ({"method": "ngram"}, "num_speculative_tokens is missing"),
    ({"num_speculative_tokens": 3}, "method is missing"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 is out of range"),
    ({"method": "ngram", "num_speculative_tokens": "some"}, "from 1 to 1023, or"),
    ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "is above"),
    ({"method": "ngram", "num_speculative_tokens": 3, "tensor_parallel_size": 1}, "does not exist"),
    ({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "block"}, "not implemented for"),
    *(
        ({"method": "ngram", "num_speculative_tokens": 3, **odd}, "synthetic_acceptance_length, a number from 1 to 4")
        for odd in (
            {"synthetic_acceptance_length": 2.0},
            {"synthetic_acceptance_rates": [0.5, 0.5, 0.5]},
            SYNTHETIC,
            SYNTHETIC | {"synthetic_acceptance_length": 4.1},
            SYNTHETIC | {"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 0.5, 0]},
            SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6, 0.1]},
            SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.4]},
        )
    ),
    ({"method": "ngram", "num_speculative_tokens": 3, "model": "x"}, "method ngram has no model"),
    ({"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 0}, "a whole number from 1 on"),
    (
        {"method": "ngram", "num_speculative_tokens": 3, "revision": "main"},
        "'main' is not implemented for",
    ),
    ({"method": "ngram", "num_speculative_tokens": 3, "kv_cache_dtype": "fp8"}, "not implemented for method ngram"),
    (
        {"method": "ngram", "num_speculative_tokens": 3, "index_share_for_mtp_iteration": True},
        '"index_share_for_mtp_iteration": True is not implemented for method ngram',
    ),
    ({"method": "mtp", "index_share_for_mtp_iteration": "yes"}, "'yes' has no meaning: give true or false"),
    (
        {"method": "draft_model", "model": "quire-tiny", "num_speculative_tokens": 3, "max_model_len": 383},
        '"max_model_len": 383 is below the 384 tokens of the engine',
    ),
    (
        {"method": "draft_model", "model": "quire-tiny", "num_speculative_tokens": 3, "quantization": 8},
        '"quantization": 8 has no meaning: give a name',
    ),
    ({"method": "nagram", "num_speculative_tokens": 3}, "'nagram' does not exist"),
    ({"method": "medusa", "model": "x", "num_speculative_tokens": 3}, "method medusa is not implemented yet"),
    ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "layer of the checkpoint, which has none"),
    ({"model": "a/dflash-head", "num_speculative_tokens": 1}, "method dflash is not implemented yet"),
    ({"method": "eagle"}, "method eagle needs a model"),
    ({"method": "draft_model", "num_speculative_tokens": 1}, "method draft_model needs a model"),
    ({"model": "quire-tiny"}, "num_speculative_tokens is missing"),
    ({"method": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[2, 3, 1]]}, "ranges"),
    ({"method": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 3, 4]]}, "ranges"),
    ({"method": "ngram", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": 3}, "=3 is wrong"),
    ({"method": "ngram", "num_speculative_tokens": 2, "model": {"name": "ngram"}}, "method ngram has no model"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError if "yet" not in words else UnsupportedModel) as caught:
        LLM(**OPTIONS, speculative_config=given)
    assert words in str(caught.value) and "speculative" in str(caught.value) and "\n" not in str(caught.value)


def test_vllm_s_spellings_mean_the_same(drafting: Callable[..., LLM]) -> None:
    for given in (
        {"method": "ngram_gpu"},
        {"model": "ngram"},
        {"model": "[ngram]", "method": "ngram"},
        {"method": "ngram", "rejection_sample_method": "standard", "quantization": None},
        {"method": "ngram", "index_share_for_mtp_iteration": False},
        {"method": "ngram", "draft_tensor_parallel_size": 1, "disable_eagle_block_drop": True, "enforce_eager": False},
    ):
        llm = LLM(**OPTIONS, speculative_config={"num_speculative_tokens": 2, **given})
        assert llm.engine.core.facts.num_drafts == 2 and not any("speculative" in note for note in llm.engine.notes)
        llm.close()


def test_keys_that_change_nothing_are_told(drafting: Callable[..., LLM]) -> None:
    asked = {"draft_tensor_parallel_size": 2, "enforce_eager": True, "moe_backend": "triton", "code_revision": "main"}
    notes = [note for note in drafting(more=asked).engine.notes if "speculative_config" in note]
    assert [note.split(": ")[1] for note in notes] == [
        "enforce_eager changes nothing",
        "code_revision changes nothing",
        "moe_backend changes nothing",
        "draft_tensor_parallel_size=2 changes nothing",
    ]


def test_a_server_streams_runs_and_counts_them() -> None:
    """On the mock: 0, 1, ... and all drafts of a decode are right in turn."""
    given = {"method": "ngram", "num_speculative_tokens": 3}
    with running_inside(speculative_config=given, mock_step_ms=5.0) as inside:
        server = inside.server
        asked: dict[str, Any] = {"max_tokens": 30, "logprobs": 1, "seed": 1}
        plain = server.complete(**asked, stream=False, speculative_tokens=0).json()
        drafted = server.complete(**asked, stream=False).json()
        streamed = server.complete(**asked, return_token_ids=True, stream_options={"include_usage": True})
        assert plain["choices"] == drafted["choices"]
        usages = [
            answer["usage"]["completion_tokens_details"]
            for answer in (
                plain,
                drafted,
                next(event for event in streamed.events() if event != "[DONE]" and event.get("usage")),
            )
        ]
        assert usages[0] == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "accepted_prediction_tokens_per_pos": [0, 0, 0],
        }
        pieces = [choice for event in streamed.events() if event != "[DONE]" for choice in event["choices"]]
        tokens = [len(choice["token_ids"]) for choice in pieces if choice.get("token_ids")]
        assert sum(tokens) == 30 and max(tokens) >= 4
        (whole,) = plain["choices"]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        scored = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for one in scored for value in one[name]] == whole["logprobs"][name]
        refused = server.complete(speculative_tokens=4)
        assert refused.status == 400 and b"speculative_tokens=4 exceeds this engine's 3 drafts" in refused.body
        counted = {
            name: sum(server.metric(f"quire:spec_decode_num_{name}_total").values())
            for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        }
        assert counted["accepted_tokens"] == counted["accepted_tokens_per_pos"] > 20
        right, wrong = (sum(each[f"{what}_prediction_tokens"] for each in usages) for what in ("accepted", "rejected"))
        assert (right, right + wrong) == (counted["accepted_tokens"], counted["draft_tokens"])
        places = zip(*(usage["accepted_prediction_tokens_per_pos"] for usage in usages), strict=True)
        assert [*map(sum, places)] == [*server.metric("quire:spec_decode_num_accepted_tokens_per_pos_total").values()]
        assert 20 < counted["drafts"] < counted["draft_tokens"] <= 3 * counted["drafts"]
        ended = server.ask("/debug/requests").json()
        drafts = [one["drafts"] for one in (ended["requests"] if isinstance(ended, dict) else ended)]
        assert [0, 0, 0, 0] in [each for some in drafts for each in some]
        assert sum(each[0] for some in drafts for each in some) == counted["draft_tokens"]
