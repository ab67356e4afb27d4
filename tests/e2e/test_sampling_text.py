"""Fields of SamplingParams that are about text, end to end on the bundled model."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM, CompletionOutput, OutputKind, RequestOutput, SamplingParams

QUESTION = [{"role": "user", "content": "The code of Tomas is 6423.\nLakral likes tea.\n\nWhat is the code of Tomas?"}]
ANSWER = "The code of Tomas is 6423."
PROSE = "To create a new"
COUNT = 48
Greedy = Callable[..., SamplingParams]


def only(outputs: list[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


@pytest.fixture
def unstopped(talker: LLM, greedy: Greedy) -> CompletionOutput:
    """The completion of PROSE when nothing stops it."""
    out = only(talker.generate(PROSE, greedy(COUNT), use_tqdm=False))
    assert len(out.token_ids) == COUNT and len(out.text) > 100
    return out


def stops_of(text: str) -> list[str]:
    """Four characters of the text at many places, each where the text has them for the first time."""
    return [text[i : i + 4] for i in range(0, len(text) - 4, 7) if text.find(text[i : i + 4]) == i]


def check_stopped(talker: LLM, unstopped: CompletionOutput, stop: str, out: CompletionOutput, include: bool) -> None:
    end = unstopped.text.index(stop) + (len(stop) if include else 0)
    assert (out.text, out.finish_reason, out.stop_reason) == (unstopped.text[:end], "stop", stop)
    decode = talker.get_tokenizer().decode
    assert out.token_ids == unstopped.token_ids[: len(out.token_ids)]
    assert stop in decode(out.token_ids) and stop not in decode(out.token_ids[:-1])


def test_stop_strings_at_every_place(talker: LLM, unstopped: CompletionOutput, greedy: Greedy) -> None:
    stops = stops_of(unstopped.text)
    assert len(stops) >= 10
    for include in (False, True):
        params = [greedy(COUNT, stop=[s, "never"], include_stop_str_in_output=include) for s in stops]
        outputs = talker.generate([PROSE] * len(stops), params, use_tqdm=False)
        for stop, out in zip(stops, outputs, strict=True):
            check_stopped(talker, unstopped, stop, out.outputs[0], include)
    unstopped = only(talker.generate(PROSE, greedy(COUNT, stop="never"), use_tqdm=False))
    assert unstopped.text == unstopped.text and unstopped.finish_reason == "length"


def test_a_stop_string_counts_from_min_tokens_on(talker: LLM, unstopped: CompletionOutput, greedy: Greedy) -> None:
    early = only(talker.generate(PROSE, greedy(COUNT, stop=" "), use_tqdm=False))
    late = only(talker.generate(PROSE, greedy(COUNT, stop=" ", min_tokens=20), use_tqdm=False))
    assert len(early.token_ids) < 20 < len(late.token_ids) and late.finish_reason == "stop"
    assert late.token_ids == unstopped.token_ids[: len(late.token_ids)] and unstopped.text.startswith(late.text)


def test_the_end_of_a_turn_waits_for_min_tokens_and_is_ignored_on_demand(talker: LLM) -> None:
    def ask(**fields: Any) -> CompletionOutput:
        return only(talker.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=30, **fields), use_tqdm=False))

    usual = ask()
    assert (usual.text, usual.finish_reason, usual.token_ids[-1]) == (ANSWER, "stop", 2)
    longer = ask(min_tokens=20)
    assert longer.token_ids[:13] == usual.token_ids[:13] and 2 not in longer.token_ids[:20]
    ignored = ask(ignore_eos=True)
    assert ignored.token_ids[:14] == usual.token_ids and len(ignored.token_ids) == 30


def test_special_tokens_are_shown_on_demand(talker: LLM) -> None:
    def ask(**fields: Any) -> str:
        return only(
            talker.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=14, **fields), use_tqdm=False)
        ).text

    shown = ANSWER + "<|im_end|>"
    assert ask(ignore_eos=True) == ANSWER
    assert ask(ignore_eos=True, skip_special_tokens=False) == ask(ignore_eos=True, shown_special_ids=[2]) == shown
    assert ask(ignore_eos=True, shown_special_ids=[0, 1]) == ANSWER
    assert ask(skip_special_tokens=False) == ANSWER  # the token that ended it is no part of the text ...
    assert ask(skip_special_tokens=False, include_stop_str_in_output=True) == shown  # ... unless asked for
    assert ask(ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=False) == shown  # byte level


def test_a_stop_id_ends_the_text_before_it(talker: LLM, unstopped: CompletionOutput, greedy: Greedy) -> None:
    at = next(i for i in range(10, COUNT) if unstopped.token_ids.index(unstopped.token_ids[i]) == i)
    stop, decode = unstopped.token_ids[at], talker.get_tokenizer().decode
    for include in (False, True):
        fields = {"stop_token_ids": [stop], "include_stop_str_in_output": include}
        out = only(talker.generate(PROSE, greedy(COUNT, **fields), use_tqdm=False))
        assert out.token_ids == unstopped.token_ids[: at + 1]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert out.text == decode(unstopped.token_ids[: at + include])


def test_bad_words_do_not_come(talker: LLM, greedy: Greedy) -> None:
    def ask(**fields: Any) -> CompletionOutput:
        return only(talker.chat(QUESTION, greedy(14, **fields), use_tqdm=False))

    usual, without = ask(), ask(bad_words=["Tomas", " 6"])
    assert "Tomas" in usual.text and "Tomas" not in without.text and "6" not in without.text
    assert without.text.startswith("The code of")


def test_without_detokenization_there_are_only_ids(talker: LLM, unstopped: CompletionOutput, greedy: Greedy) -> None:
    out = only(talker.generate(PROSE, greedy(COUNT, detokenize=False, logprobs=1), use_tqdm=False))
    assert out.text == "" and out.token_ids == unstopped.token_ids
    assert out.logprobs is not None and all(e.decoded_token is None for row in out.logprobs for e in row.values())


def test_logprobs_name_their_tokens(talker: LLM, greedy: Greedy) -> None:
    out = only(talker.generate(PROSE, greedy(8, logprobs=2), use_tqdm=False))
    assert out.logprobs is not None
    names = [row[token].decoded_token for token, row in zip(out.token_ids, out.logprobs, strict=True)]
    assert "".join(n or "" for n in names) == out.text


# --- streams ----------------------------------------------------------------------------------------------------------

STREAMED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "stopped": {"temperature": 0.0, "logprobs": 1},
    "several": {"n": 3, "seed": 4, "temperature": 1.5, "logprobs": 0},
}


@pytest.mark.parametrize("name", STREAMED)
def test_deltas_joined_are_the_cumulative_and_the_final(talker: LLM, unstopped: CompletionOutput, name: str) -> None:
    fields = STREAMED[name] | {"max_tokens": 30, "ignore_eos": True}
    if name == "stopped":
        fields["stop"] = stops_of(unstopped.text)[8]

    def run(kind: OutputKind) -> list[RequestOutput]:
        return list(talker.stream(PROSE, SamplingParams(output_kind=kind, **fields)))

    (final,), whole, deltas = run(OutputKind.FINAL_ONLY), run(OutputKind.CUMULATIVE), run(OutputKind.DELTA)
    assert [o.finished for o in whole] == [o.finished for o in deltas] == [False] * (len(whole) - 1) + [True]
    for i, last in enumerate(final.outputs):
        assert whole[-1].outputs[i] == last
        pieces = [o.outputs[i] for o in deltas]
        assert "".join(p.text for p in pieces) == last.text
        assert sum((p.token_ids for p in pieces), []) == last.token_ids
        if last.logprobs is not None:
            assert sum((p.logprobs or [] for p in pieces), []) == last.logprobs
        assert pieces[-1].finish_reason == last.finish_reason and pieces[-1].stop_reason == last.stop_reason
        assert all(len(o.outputs[i].logprobs or ()) in (0, len(o.outputs[i].token_ids)) for o in whole)
        grown = [o.outputs[i].text for o in whole]
        assert all(b.startswith(a) for a, b in itertools.pairwise(grown))
    assert len(whole) > 5


def test_stream_interval_thins_out_a_stream(talker: LLM, greedy: Greedy) -> None:
    lengths = [len(o.outputs[0].token_ids) for o in talker.stream(PROSE, greedy(12, stream_interval=5))]
    assert lengths == [1, 5, 10, 12]
    pieces = [
        o.outputs[0].token_ids
        for o in talker.stream(PROSE, greedy(12, stream_interval=5, output_kind=OutputKind.DELTA))
    ]
    assert [len(p) for p in pieces] == [1, 4, 5, 2]


# --- together, at depth 2, preempted ----------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2], ids=lambda depth: f"depth{depth}")
def crowded_engine(request: pytest.FixtureRequest, talker_options: dict[str, Any]) -> Iterator[LLM]:
    """An engine that has to preempt: 16 requests of up to 4 blocks each in 20 blocks."""
    options = talker_options | {
        "max_model_len": 256,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": 20,
        "block_size": 16,
        "max_num_seqs": 16,
        "async_depth": request.param,
    }
    with LLM(**options) as llm:
        yield llm
        assert llm.engine.core.scheduler.num_preempted > 0
        llm.engine.core.check()


def test_text_fields_hold_in_a_preempted_batch(
    crowded_engine: LLM, talker: LLM, unstopped: CompletionOutput, greedy: Greedy
) -> None:
    stops = stops_of(unstopped.text)[:8]
    params = [greedy(COUNT, stop=s) for s in stops]
    params += [
        greedy(COUNT),
        greedy(COUNT, stop=" ", min_tokens=20),
        greedy(COUNT, bad_words=["object", "module"]),
        greedy(COUNT, skip_special_tokens=False),
        SamplingParams(seed=1, n=3, max_tokens=COUNT, ignore_eos=True),
        SamplingParams(seed=2, temperature=1.4, top_p=0.9, frequency_penalty=0.5, max_tokens=COUNT, stop=["."]),
    ]
    alone = [talker.generate(PROSE, p, use_tqdm=False)[0].outputs for p in params]
    together = [o.outputs for o in crowded_engine.generate([PROSE] * len(params), params, use_tqdm=False)]
    assert together == alone
    for stop, (out,) in zip(stops, together, strict=False):
        check_stopped(talker, unstopped, stop, out, include=False)
