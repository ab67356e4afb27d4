"""The offline class: what goes in, what comes out, what is refused, and that nothing is left behind."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, OutputKind, RequestOutput, SamplingParams
from quire.contracts.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    InvalidParameter,
    ModelNotFound,
    PromptTooLong,
)

QUESTION = [{"role": "user", "content": "The code of Tomas is 6423.\nLakral likes tea.\n\nWhat is the code of Tomas?"}]
ANSWER = "The code of Tomas is 6423."
COLD = SamplingParams(temperature=0.0)
Greedy = Callable[..., SamplingParams]
Engine = Callable[..., LLM]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


# --- prompts and parameters -----------------------------------------------------------------------------------------


def test_every_prompt_spelling_gives_the_same_tokens(talker: LLM, greedy: Greedy) -> None:
    prompt = "The module provides"
    ids = talker.get_tokenizer().encode(prompt)
    spellings: list[Any] = [
        prompt,
        ids,
        tuple(ids),
        {"prompt": prompt},
        {"prompt_token_ids": ids},
        {"prompt": "only shown", "prompt_token_ids": ids},
    ]
    single = [talker.generate(s, greedy(6), use_tqdm=False) for s in spellings]
    together = talker.generate(spellings, greedy(6), use_tqdm=False)
    assert all(len(one) == 1 for one in single)
    expected = tokens(single[0])[0]
    assert len(expected) == 6
    assert tokens([one[0] for one in single]) == tokens(together) == [expected] * len(spellings)
    assert all(o.prompt_token_ids == ids for o in together)
    assert [o.prompt for o in together] == [prompt, None, None, prompt, None, "only shown"]
    assert [o.finished for o in together] == [True] * len(spellings)


def test_outputs_come_in_the_order_of_the_prompts(talker: LLM, greedy: Greedy) -> None:
    prompts = [[i + 10, i + 11] for i in range(20)]
    lengths = [1 + i * 7 % 5 for i in range(20)]
    outputs = talker.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(t) for t in tokens(outputs)] == lengths
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 20


def test_no_params_means_the_models_own(talker: LLM) -> None:
    said = json.loads((talker.engine.folder / "generation_config.json").read_text())
    mine = talker.get_default_sampling_params()
    assert (mine.temperature, mine.top_p) == (said["temperature"], said["top_p"])
    mine.temperature = 2.0
    assert talker.get_default_sampling_params().temperature == said["temperature"]
    drawn = tokens([talker.generate([5] * 1000, use_tqdm=False)[0] for _ in range(2)])
    assert drawn[0] != drawn[1]


def test_counts_that_do_not_match_are_refused(talker: LLM, greedy: Greedy) -> None:
    with pytest.raises(InvalidParameter, match="2 prompts and 3 sampling params"):
        talker.generate([[5], [6]], [greedy(1)] * 3, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="2 prompts and 1 priorities"):
        talker.generate([[5], [6]], greedy(1), priority=[1], use_tqdm=False)
    with pytest.raises(InvalidParameter, match="SamplingParams.*dict"):
        talker.generate([[5]], {"temperature": 0.0}, use_tqdm=False)  # type: ignore[arg-type]


BAD = [
    ({"prompt": "x", "images": []}, {}, "images", InvalidParameter),
    ({}, {}, "needs 'prompt'", InvalidParameter),
    ({"prompt_token_ids": []}, {}, "non-empty", InvalidParameter),
    (7, {}, "int", InvalidParameter),
    ("", {}, "empty", InvalidParameter),
    ([5, 8192], {}, "8192.*outside the vocabulary", InvalidParameter),
    ([5, -1], {}, "-1.*outside the vocabulary", InvalidParameter),
    ([5] * 1024, {}, "1024 tokens and the context 1024", PromptTooLong),
    ([5], {"stop_token_ids": [8192]}, "stop_token_ids.*8192", InvalidParameter),
    ([5], {"allowed_token_ids": [9000]}, "allowed_token_ids.*9000", InvalidParameter),
    ([5], {"logit_bias": {8192: 1.0}}, "logit_bias.*8192", InvalidParameter),
]


@pytest.mark.parametrize(("prompt", "fields", "message", "kind"), BAD)
def test_a_bad_request_is_refused_and_nothing_of_its_batch_stays(
    talker: LLM, prompt: Any, fields: dict[str, Any], message: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=message):
        talker.generate([[5, 6], prompt], SamplingParams(max_tokens=4, **fields), use_tqdm=False)
    assert not talker.engine.core.has_work
    assert talker.engine.core.scheduler.allocator.pool.num_free == talker.engine.core.facts.num_blocks


def test_a_prompt_that_fills_the_context_can_still_be_scored(talker: LLM) -> None:
    out = talker.generate([5] * 1024, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)[0]
    assert out.outputs[0].token_ids == [] and out.outputs[0].finish_reason == "length"
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 1024


def test_max_tokens_defaults_to_the_end_of_the_context(talker: LLM) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    out = talker.generate([5] * 1000, params, use_tqdm=False)[0]
    assert len(out.outputs[0].token_ids) == 24 and out.outputs[0].finish_reason == "length"


def test_arguments_of_vllm_are_answered_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="prefill_context_parallel_size 2: a prompt is not divided"):
        LLM("no/such-model", prefill_context_parallel_size=2, gpu_memory_utilization=0.9)


def test_a_batch_may_be_larger_than_the_queue(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder, max_waiting=2, max_num_seqs=1)
    prompts = [[1], [2], [3], [4]]
    assert tokens(llm.generate(prompts, greedy(2), use_tqdm=False)) == oracle().greedy(prompts, 2)
    several = llm.generate([1], SamplingParams(n=5, max_tokens=2, temperature=1.0), use_tqdm=False)[0]
    assert [c.finish_reason for c in several.outputs] == ["length"] * 5


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_closed_early_frees_everything(talker: LLM, greedy: Greedy) -> None:
    stream = talker.stream("The module provides", greedy(200))
    got = [next(stream) for _ in range(3)]
    assert [len(o.outputs[0].token_ids) for o in got] == [1, 2, 3]
    stream.close()
    assert not talker.engine.core.has_work
    talker.engine.core.check()
    pool = talker.engine.core.scheduler.allocator.pool
    assert pool.num_free == talker.engine.core.facts.num_blocks


def test_streams_can_be_read_in_turns_and_beside_generate(talker: LLM, greedy: Greedy) -> None:
    prompts = ["The module provides", "To create a new"]
    alone = tokens([talker.generate(p, greedy(12), use_tqdm=False)[0] for p in prompts])
    delta = greedy(12, output_kind=OutputKind.DELTA)
    streams = [talker.stream(p, delta) for p in prompts]
    got: list[list[int]] = [[], []]
    got[0] += next(streams[0]).outputs[0].token_ids
    got[1] += next(streams[1]).outputs[0].token_ids
    assert tokens(talker.generate(prompts, greedy(12), use_tqdm=False)) == alone
    for i, stream in enumerate(streams):
        for output in stream:
            got[i] += output.outputs[0].token_ids
    assert got == alone


def test_closing_one_of_two_streams_leaves_the_other(talker: LLM, greedy: Greedy) -> None:
    expected = tokens(talker.generate("To create a new", greedy(12), use_tqdm=False))[0]
    first, second = talker.stream("The module provides", greedy(50)), talker.stream("To create a new", greedy(12))
    next(first)
    next(second)
    first.close()
    assert list(second)[-1].outputs[0].token_ids == expected


def test_chat_and_its_stream_agree(talker: LLM) -> None:
    whole = talker.chat(QUESTION, COLD, use_tqdm=False)[0]
    pieces = list(talker.stream_chat(QUESTION, SamplingParams(temperature=0.0, output_kind=OutputKind.DELTA)))
    assert text(whole) == "".join(map(text, pieces)) == ANSWER
    assert whole.prompt is not None and whole.prompt.endswith("<|im_start|>assistant\n")
    assert whole.prompt_token_ids == talker.get_tokenizer().encode(whole.prompt)
    assert whole.outputs[0].finish_reason == "stop" and whole.outputs[0].token_ids[-1] == 2


def test_chat_takes_several_conversations_and_a_started_answer(talker: LLM, greedy: Greedy) -> None:
    other = [{"role": "user", "content": "Tomas likes tea.\n\nWhat does Tomas like?"}]
    outputs = talker.chat([QUESTION, other], COLD, use_tqdm=False)
    assert [text(o) for o in outputs] == [ANSWER, "Tomas likes tea."]
    started = [*QUESTION, {"role": "assistant", "content": "The code of"}]
    out = talker.chat(started, COLD, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)[0]
    assert text(out) == " Tomas is 6423."
    bare = talker.chat(QUESTION, greedy(1), chat_template="{{ messages[0]['content'] }}", use_tqdm=False)[0]
    assert bare.prompt == QUESTION[0]["content"]


@pytest.mark.parametrize(
    "given",
    [{"tools": []}, {"messages": []}, {"add_generation_prompt": True}, {"adapt_turns": False}, {5: 1}, ["a"]],
)
def test_variables_that_are_arguments_are_refused(talker: LLM, given: Any) -> None:
    with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
        talker.chat(QUESTION, COLD, chat_template_kwargs=given, use_tqdm=False)


def test_a_variable_may_have_any_other_name(talker: LLM, greedy: Greedy) -> None:
    given: Any = {"chat_template": "{{ engine }}", "chat_template_kwargs": {"engine": "x"}}
    assert talker.chat(QUESTION, greedy(1), **given, use_tqdm=False)[0].prompt == "x"
    assert [o.prompt for o in talker.stream_chat(QUESTION, greedy(1), **given)] == ["x"]


# --- beam search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (4, 2.0), (3, -1.0)])
def test_beam_search_is_the_one_of_transformers(
    oracle: Any, tiny: Any, engine: Engine, prompts: list[list[int]], width: int, length_penalty: float
) -> None:
    eos = tuple(range(0, 96, 12))  # many, so that hypotheses end in every round
    spec = oracle(tiny(eos=eos))
    llm = engine(spec.folder, block_size=8)
    beams = llm.beam_search(
        prompts[2:5], BeamSearchParams(beam_width=width, max_tokens=8, length_penalty=length_penalty)
    )
    num_ended = 0
    for prompt, found in zip(prompts[2:5], beams, strict=True):
        expected = spec.model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=8,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping="never",
            eos_token_id=list(eos),
            pad_token_id=95,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for i, sequence in enumerate(found.sequences):
            row = expected.sequences[i].tolist()
            assert sequence.tokens == row[: len(sequence.tokens)] and set(row[len(sequence.tokens) :]) <= {95}
            ended = sequence.tokens[-1] in eos
            num_ended += ended
            assert sequence.finish_reason == ("stop" if ended else "length")
            if width > 1:
                score = sequence.cum_logprob / (len(sequence.tokens) - len(prompt)) ** length_penalty
                assert score == pytest.approx(float(expected.sequences_scores[i]), abs=1e-4)
    assert num_ended > 0


def test_beam_search_text_and_end(talker: LLM) -> None:
    prompt = talker.chat(QUESTION, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    best = talker.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=20))[0].sequences
    assert len(best) == 2 and best[0].text == ANSWER and best[0].finish_reason == "stop"
    long = talker.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=16, ignore_eos=True))[0].sequences
    assert {len(s.tokens) for s in long} == {len(prompt) + 16} and {s.finish_reason for s in long} == {"length"}


# --- the engine's life ------------------------------------------------------------------------------------------------


def test_reset_prefix_cache_makes_the_next_request_compute_everything(talker: LLM, greedy: Greedy) -> None:
    prompt = list(range(100, 200))

    def cached() -> int | None:
        return talker.generate(prompt, greedy(1), use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 96]
    assert talker.reset_prefix_cache()
    assert cached() == 0


def test_an_output_says_why_its_prompt_was_not_reused(talker: LLM, greedy: Greedy) -> None:
    size = talker.engine.core.facts.block_size
    prompt = [10 + i for i in range(4 * size)]
    edited = [*prompt[: 2 * size + 3], 9, *prompt[2 * size + 4 :]]
    asked = [prompt, edited, {"prompt_token_ids": prompt, "cache_salt": "mine"}, [*prompt, 5]]
    outputs = [talker.generate(one, greedy(1), use_tqdm=False)[0] for one in asked]
    reports = [output.metrics.prefix for output in outputs]
    assert [report and report.why.value for report in reports] == ["new", "tokens", "extras", None]
    assert (reports[1].block, reports[1].position, reports[1].differs_at) == (2, 2 * size, 2 * size + 3)
    assert reports[1].nearest == outputs[0].request_id and outputs[1].num_cached_tokens == 2 * size
    assert reports[2].detail == "salt" and outputs[3].num_cached_tokens == 4 * size


def test_closing_frees_and_refuses_further_use(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    with engine(oracle().folder) as llm:
        stream = llm.stream([5], greedy(8))
        next(stream)
    llm.close()  # again: no error
    for use in (
        lambda: llm.generate([5], greedy(1)),
        lambda: llm.chat(QUESTION),
        lambda: next(stream),
        lambda: next(llm.stream([5])),
        llm.reset_prefix_cache,
        llm.get_default_sampling_params,
    ):
        with pytest.raises(EngineClosed, match="make a new one"):
            use()
    unread = engine(oracle().folder)
    stream = unread.stream([5], greedy(8))
    next(stream)
    unread.close()
    stream.close()  # nothing to abort any more


def test_works_inside_a_running_event_loop(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    async def notebook_cell() -> list[list[int]]:
        return tokens(engine(oracle().folder, async_depth=2).generate([[1, 2, 3]], greedy(4), use_tqdm=False))

    assert asyncio.run(notebook_cell()) == oracle().greedy([[1, 2, 3]], 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fault_of_the_engine_is_told_to_everyone_and_final(
    oracle: Any, engine: Engine, greedy: Greedy, depth: int
) -> None:
    llm = engine(oracle().folder, async_depth=depth)
    stream = llm.stream([5], greedy(8))
    next(stream)

    def broken(*_: object) -> Iterator[None]:
        raise RuntimeError("device lost")

    llm.engine.worker.programs.compute = broken  # type: ignore[assignment, method-assign]
    for use in (
        lambda: llm.generate([[6], [7]], greedy(4), use_tqdm=False),
        lambda: list(stream),
        lambda: llm.generate([8], greedy(1), use_tqdm=False),
    ):
        with pytest.raises(EngineDead, match="device lost"):
            use()
    llm.close()


def test_a_context_that_does_not_fit_is_refused_or_shortened(oracle: Any, engine: Engine) -> None:
    folder = oracle().folder
    with pytest.raises(ConfigError, match="max_model_len=300 exceeds the model's context of 256"):
        engine(folder, max_model_len=300)
    with pytest.raises(ConfigError, match=r"max_model_len=200 needs .* lower max_model_len to 128"):
        engine(folder, max_model_len=200, num_gpu_blocks_override=16, block_size=8)
    llm = engine(folder, num_gpu_blocks_override=16, block_size=8)
    assert llm.engine.core.facts.max_model_len == 128
    assert any("shortened from 256 to 128 tokens" in note for note in llm.engine.notes)
    with pytest.raises(PromptTooLong, match="128"):
        llm.generate([1] * 129, use_tqdm=False)


def test_without_a_tokenizer_only_ids_work(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder)
    out = llm.generate([1, 2], greedy(3), use_tqdm=False)[0]
    assert tokens([out]) == oracle().greedy([[1, 2]], 3) and text(out) == "" and out.prompt is None
    for use in (
        lambda: llm.generate("text", greedy(1)),
        lambda: llm.chat(QUESTION),
        llm.get_tokenizer,
        lambda: llm.generate([1], greedy(1, stop="x")),
        lambda: llm.generate([1], greedy(1, bad_words=["x"])),
    ):
        with pytest.raises(InvalidParameter, match="skip_tokenizer_init"):
            use()


def test_options_and_models_that_do_not_exist_name_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        LLM(max_model_length=5)
    with pytest.raises(ModelNotFound, match="does not exist"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFound, match="config.json"):
        LLM(str(tmp_path))


def test_priority_decides_who_runs_first(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder, max_num_seqs=1, scheduling_policy="priority")
    outputs = llm.generate([[1], [2], [3]], greedy(3), priority=[2, 1, 0], use_tqdm=False)
    done = [o.metrics.finished_time for o in outputs]  # type: ignore[union-attr]
    assert done == sorted(done, reverse=True)
    assert tokens(outputs) == oracle().greedy([[1], [2], [3]], 3)
