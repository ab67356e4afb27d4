"""Every field of SamplingParams, end to end, on ids: its effect, and the same effect in a batch, preempted, at depth 2.

Expected tokens come from transformers' logits and the sampler's written specification, one token at a time, without a
cache. What fields do to text is in test_sampling_text.py; their bounds are tested with the contracts.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.sampling import SamplerSpec
from quire.contracts.seeds import child_seed
from quire.kernels.sampling.specification import sample

from ..support.full import full_rows

COUNT = 40
EOS = tuple(range(60, 75))
HERE = (
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop_token_ids "
    "ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids logit_bias allowed_token_ids "
    "skip_reading_prefix_cache"
)
ON_TEXT = (
    "stop detokenize skip_special_tokens shown_special_ids spaces_between_special_tokens include_stop_str_in_output "
    "output_kind stream_interval bad_words structured_outputs"
)
ON_OTHERS = "speculative_tokens kv_transfer_params kv_chunks blend_ratio logits_processors"  # in files of their own
COLD: dict[str, Any] = {"temperature": 0.0}
# name -> fields; `ignore_eos` is on unless a case is about ends, so that all run to COUNT
CASES: dict[str, dict[str, Any]] = {
    "greedy": COLD,
    "presence_penalty": COLD | {"presence_penalty": 2.0},
    "frequency_penalty": COLD | {"frequency_penalty": 1.5},
    "negative_frequency_penalty": COLD | {"frequency_penalty": -2.0},
    "repetition_penalty": COLD | {"repetition_penalty": 3.0},
    "logit_bias": COLD | {"logit_bias": {5: 12.0, 9: -100.0, 40: 1000.0, 41: 3.0}},
    "allowed_token_ids": COLD | {"allowed_token_ids": [3, 14, 15, 92, 65, 35]},
    "stop_token_ids": COLD | {"stop_token_ids": [*range(30, 40)]},
    "min_tokens": COLD | {"stop_token_ids": [*range(30, 40)], "min_tokens": 12},
    "eos": COLD | {"ignore_eos": False},
    "eos_and_min_tokens": COLD | {"ignore_eos": False, "min_tokens": 30},
    "max_tokens": COLD | {"max_tokens": 7},
    "temperature": {"temperature": 1.3, "seed": 1},
    "seed": {"temperature": 1.3, "seed": 2**64 - 3},
    "top_k": {"top_k": 4, "seed": 2},
    "top_p": {"temperature": 1.5, "top_p": 0.6, "seed": 3},
    "min_p": {"temperature": 1.5, "min_p": 0.2, "seed": 4},
    "everything": {
        "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.4,
        "repetition_penalty": 1.2, "logit_bias": {8: 2.0}, "allowed_token_ids": [*range(4, 90)], "ignore_eos": False,
        "stop_token_ids": [77], "min_tokens": 20, "seed": 5,
    },
}  # fmt: skip


def params_of(fields: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**({"ignore_eos": True, "max_tokens": COUNT} | fields | more))


def test_every_field_is_tested() -> None:
    assert set(SamplingParams.__struct_fields__) == set(HERE.split()) | set(ON_TEXT.split()) | set(ON_OTHERS.split())


def stops_of(params: SamplingParams) -> set[int]:
    return set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(EOS))


def expected_tokens(oracle: Any, prompt: Sequence[int], params: SamplingParams, child: int = 0) -> Iterator[int]:
    """The tokens one by one, from transformers' logits and the reference sampler."""
    stops = stops_of(params)
    bias = {i: max(-100.0, min(100.0, b)) for i, b in (params.logit_bias or {}).items()}
    spec = SamplerSpec(
        seed=child_seed(params.seed or 0, child),
        num_prompt=len(prompt),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_length=len(prompt) + params.min_tokens,
        stop_ids=tuple(stops),
        logit_bias=tuple(bias.items()),
        allowed_ids=tuple(params.allowed_token_ids or ()),
    )
    tokens = list(prompt)
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        tokens.append(sample(torch.from_numpy(oracle.logits(tokens)[-1]), spec, tokens))
        yield tokens[-1]
        if tokens[-1] in stops and len(tokens) > spec.min_length:
            return


def expected(oracle: Any, prompt: Sequence[int], params: SamplingParams, child: int = 0) -> tuple[list[int], str]:
    """The tokens and the reason they ended, from transformers' logits and the reference sampler."""
    tokens, stops = [*expected_tokens(oracle, prompt, params, child)], stops_of(params)
    return tokens, "stop" if tokens[-1] in stops and len(tokens) > params.min_tokens else "length"


@pytest.fixture(scope="module")
def checkpoint(oracle: Any, tiny: Any) -> Any:
    return oracle(tiny(eos=EOS, heads=(3, 1)))


@pytest.fixture(scope="module")
def answers(checkpoint: Any, prompts: list[list[int]]) -> dict[str, tuple[list[int], list[int], str]]:
    """name -> (prompt, expected tokens, reason); neighbouring cases have different prompts."""
    found = {}
    for i, (name, fields) in enumerate(CASES.items()):
        prompt = prompts[i % len(prompts)]
        found[name] = (prompt, *expected(checkpoint, prompt, params_of(fields)))
    return found


@pytest.fixture(
    params=[(2, "small"), (1, "normal"), *full_rows([(1, "small"), (2, "normal")])], ids=lambda p: f"depth{p[0]}-{p[1]}"
)
def make_engine(request: pytest.FixtureRequest, checkpoint: Any, engine: Any) -> Iterator[Callable[..., LLM]]:
    """Engines at each depth, with a pool that is big enough or that forces preemption (asserted at the end)."""
    depth, pool = request.param
    made: list[LLM] = []

    def build(**options: Any) -> LLM:
        if pool == "small":
            options["num_gpu_blocks_override"] = 30
        options = {"max_num_seqs": 20, "max_num_batched_tokens": 48, "block_size": 8, "max_logprobs": -1} | options
        made.append(engine(checkpoint.folder, async_depth=depth, **options))
        return made[-1]

    yield build
    assert [llm.engine.core.scheduler.num_preempted > 0 for llm in made] == [pool == "small"] * len(made)


def test_all_cases_in_one_batch(make_engine: Callable[..., LLM], answers: Any) -> None:
    llm = make_engine()
    prompts = [prompt for prompt, _, _ in answers.values()]
    outputs = llm.generate(prompts, [params_of(f) for f in CASES.values()], use_tqdm=False)
    got = {name: (o.outputs[0].token_ids, o.outputs[0].finish_reason) for name, o in zip(CASES, outputs, strict=True)}
    assert got == {name: (tokens, reason) for name, (_, tokens, reason) in answers.items()}


def test_each_case_alone(checkpoint: Any, engine: Any, answers: Any) -> None:
    llm = engine(checkpoint.folder)
    for name, (prompt, tokens, reason) in answers.items():
        out = llm.generate(prompt, params_of(CASES[name]), use_tqdm=False)[0].outputs[0]
        assert (name, out.token_ids, out.finish_reason) == (name, tokens, reason)


@pytest.mark.parametrize("name", [n for n in CASES if n != "greedy"])
def test_each_field_changes_something(name: str, checkpoint: Any, answers: Any) -> None:
    """The cases above would pass with a field ignored by both sides if it changed nothing here."""
    prompt, tokens, _ = answers[name]
    fields = dict(CASES[name])
    plain = params_of(COLD if fields.get("temperature") == 0.0 else {"temperature": 1.0, "seed": fields["seed"]})
    others = itertools.zip_longest(tokens, expected_tokens(checkpoint, prompt, plain))
    assert any(token != other for token, other in others)


def test_what_the_cases_mean(answers: Any) -> None:
    tokens = {name: found[1] for name, found in answers.items()}
    reason = {name: found[2] for name, found in answers.items()}
    counts = {name: Counter(t) for name, t in tokens.items()}
    assert max(counts["frequency_penalty"].values()) < max(counts["negative_frequency_penalty"].values())
    assert len(counts["presence_penalty"]) > 20 and len(counts["repetition_penalty"]) > 20
    assert 9 not in tokens["logit_bias"] and 40 in tokens["logit_bias"]
    assert set(tokens["allowed_token_ids"]) <= {3, 14, 15, 92, 65, 35}
    assert reason["stop_token_ids"] == "stop" and 30 <= tokens["stop_token_ids"][-1] < 40
    assert not set(tokens["min_tokens"][:12]) & set(range(30, 40)) and len(tokens["min_tokens"]) > 12
    assert reason["eos"] == "stop" and tokens["eos"][-1] in EOS
    assert not set(tokens["eos_and_min_tokens"][:30]) & set(EOS)
    assert len(tokens["max_tokens"]) == 7 and reason["max_tokens"] == "length"


def test_an_end_of_sequence_has_no_stop_reason_and_a_stop_id_has(checkpoint: Any, engine: Any, answers: Any) -> None:
    llm = engine(checkpoint.folder)
    for name, shown in (("eos", False), ("stop_token_ids", True)):
        prompt, tokens, _ = answers[name]
        out = llm.generate(prompt, params_of(CASES[name]), use_tqdm=False)[0].outputs[0]
        assert out.stop_reason == (tokens[-1] if shown else None)


def test_min_tokens_is_exact(checkpoint: Any, engine: Any, prompts: list[list[int]]) -> None:
    llm = engine(checkpoint.folder)
    plain = checkpoint.greedy(prompts, 64)[6]
    at = next(i for i in range(10, 40) if plain.index(plain[i]) == i)

    def run(min_tokens: int) -> list[int]:
        params = params_of(COLD, stop_token_ids=[plain[at]], min_tokens=min_tokens)
        tokens: list[int] = llm.generate(prompts[6], params, use_tqdm=False)[0].outputs[0].token_ids
        return tokens

    assert run(at) == run(0) == plain[: at + 1]
    later = run(at + 1)
    assert later[:at] == plain[:at] and later[at] != plain[at]


# --- distributions ----------------------------------------------------------------------------------------------------


def filtered(logits: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """The probabilities the fields ask for: temperature, min-p of the largest, top-k, then top-p of what is left."""
    scaled = logits.astype(np.float64) / fields.get("temperature", 1.0)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < fields.get("min_p", 0.0) * p.max()] = 0.0
    if k := fields.get("top_k"):
        p[p < np.sort(p)[-k]] = 0.0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= fields.get("top_p", 1.0)]] = 0.0
    return p / p.sum()


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic exceeds its mean; rare ids share one bin."""
    want = p * counts.sum()
    common = want >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(want[common], want[~common].sum())
    seen = wanted > 0
    if observed[~seen].sum():
        return np.inf
    freedom = max(1, seen.sum() - 1)
    statistic = ((observed[seen] - wanted[seen]) ** 2 / wanted[seen]).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


DISTRIBUTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", [*DISTRIBUTIONS[2:4], DISTRIBUTIONS[-1], *full_rows(DISTRIBUTIONS)], ids=str)
def test_the_distribution_is_the_one_asked_for(
    fields: dict[str, Any], checkpoint: Any, engine: Any, prompts: list[list[int]]
) -> None:
    prompt, draws = prompts[1], 4000
    llm = engine(checkpoint.folder, max_num_seqs=256)
    params = SamplingParams(n=draws, max_tokens=1, ignore_eos=True, seed=11, **fields)
    out = llm.generate(prompt, params, use_tqdm=False)[0]
    counts = np.bincount([c.token_ids[0] for c in out.outputs], minlength=96)
    assert counts.sum() == draws
    logits = checkpoint.logits(prompt)[-1]
    p = filtered(logits, fields)
    assert not counts[p == 0].any()
    assert chi_square(counts, p) < 4
    for other in DISTRIBUTIONS:
        if other != fields:
            assert chi_square(counts, filtered(logits, other)) > 8


# --- n ----------------------------------------------------------------------------------------------------------------


def test_completions_are_those_of_their_own_seeds(
    make_engine: Callable[..., LLM], checkpoint: Any, prompts: list[list[int]]
) -> None:
    llm = make_engine()
    params = [SamplingParams(n=n, temperature=1.2, seed=40 + n, max_tokens=24, ignore_eos=True) for n in (3, 1, 4)]
    outputs = llm.generate(prompts[4:7], params, use_tqdm=False)
    for prompt, p, out in zip(prompts[4:7], params, outputs, strict=True):
        assert [c.index for c in out.outputs] == list(range(p.n))
        assert [c.token_ids for c in out.outputs] == [expected(checkpoint, prompt, p, child=i)[0] for i in range(p.n)]
        assert len({tuple(c.token_ids) for c in out.outputs}) == p.n


def test_without_a_seed_runs_differ_and_the_engine_seed_repeats_them(checkpoint: Any, engine: Any) -> None:
    def draw(llm: LLM) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        return [llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2)]

    first, second, other = (
        draw(engine(checkpoint.folder)),
        draw(engine(checkpoint.folder)),
        engine(checkpoint.folder, seed=1),
    )
    assert first == second and first[0] != first[1] and draw(other) != first


# --- log-probabilities ------------------------------------------------------------------------------------------------

SCORED: list[dict[str, Any]] = [
    {"logprobs": 0}, {"logprobs": 1}, {"logprobs": 5, "prompt_logprobs": 2}, {"logprobs": -1}, {"prompt_logprobs": 0},
    {"logprob_token_ids": [4, 90, 33]}, {"logprobs": 3, "temperature": 1.4, "seed": 8, "repetition_penalty": 1.3},
]  # fmt: skip


def check_row(row: dict[int, Any], token: int, truth: np.ndarray, k: int) -> None:
    """The token's own entry, then the k best (k = -1: all), with their ranks."""
    best = np.argsort(-truth)[: k if k >= 0 else len(truth)].tolist()
    assert list(row) == [token] + [i for i in best if i != token]
    for i, entry in row.items():
        assert entry.logprob == pytest.approx(float(truth[i]), abs=1e-4)
        assert entry.rank == 1 + int((truth > truth[i]).sum())


def test_logprobs_are_those_of_the_raw_logits(
    make_engine: Callable[..., LLM], checkpoint: Any, prompts: list[list[int]]
) -> None:
    llm = make_engine()
    params = [params_of({"temperature": 0.0} | fields) for fields in SCORED]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, p, out in zip(prompts, params, outputs, strict=True):
        completion = out.outputs[0]
        truth = checkpoint.logprobs([*prompt, *completion.token_ids])
        if p.prompt_logprobs is None:
            assert out.prompt_logprobs is None
        else:
            assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(prompt)
            assert out.prompt_logprobs[0] is None
            for i, row in enumerate(out.prompt_logprobs[1:]):
                assert row is not None
                check_row(row, prompt[i + 1], truth[i], p.prompt_logprobs)
        if p.logprobs is None and p.logprob_token_ids is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
            continue
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) == COUNT
        own = 0.0
        for i, (token, row) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            line = truth[len(prompt) - 1 + i]
            own += float(line[token])
            if p.logprob_token_ids is None:
                check_row(row, token, line, p.logprobs or 0)
                continue
            assert set(row) == {token, *p.logprob_token_ids}
            assert all(e.logprob == pytest.approx(float(line[j]), abs=1e-4) for j, e in row.items())
            assert row[token].rank == 1 + int((line > line[token]).sum())
        assert completion.cumulative_logprob == pytest.approx(own, abs=1e-3)


def test_prompt_logprobs_do_not_depend_on_what_is_cached(
    checkpoint: Any, engine: Any, prompts: list[list[int]]
) -> None:
    llm = engine(checkpoint.folder, max_num_batched_tokens=7, block_size=8)
    llm.generate(prompts[6], params_of(COLD), use_tqdm=False)
    runs = [llm.generate(prompts[6], params_of(COLD, prompt_logprobs=3), use_tqdm=False)[0] for _ in range(2)]
    truth = checkpoint.logprobs(prompts[6])
    for out in runs:
        assert out.num_cached_tokens == 0 and len(out.prompt_logprobs) == 61
        for i, row in enumerate(out.prompt_logprobs[1:]):
            check_row(row, prompts[6][i + 1], truth[i], 3)


def test_a_request_may_leave_the_prefix_cache_unread(
    checkpoint: Any, engine: Any, record: Any, prompts: list[list[int]]
) -> None:
    llm = engine(checkpoint.folder, block_size=8)
    first = llm.generate(prompts[5], params_of(COLD), use_tqdm=False)[0]
    seen = record(llm)
    again = llm.generate(prompts[5], params_of(COLD, skip_reading_prefix_cache=True), use_tqdm=False)[0]
    assert again.num_cached_tokens == 0 and seen.num_computed == 45 + COUNT - 1
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_the_whole_vocabulary_needs_the_engines_leave(checkpoint: Any, engine: Any) -> None:
    from quire.contracts.errors import InvalidParameter

    llm = engine(checkpoint.folder, max_logprobs=4)
    for fields in ({"logprobs": 5}, {"logprobs": -1}, {"prompt_logprobs": 5}):
        with pytest.raises(InvalidParameter, match="max_logprobs=4"):
            llm.generate([1], params_of(COLD, **fields), use_tqdm=False)
