"""The engine on a GPU: transformers' tokens on the same device, and the same tokens however a run is scheduled.

Nothing here waits for the device but `collect`: calls that synchronize are counted while steps are launched.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.config.bundled import bundled_model
from quire.contracts.output import Logprob
from quire.contracts.step import I32
from quire.entry.prompts import PromptLike
from quire.text.tokenizer import Tokenizer
from quire.worker.graphs import Graphs
from quire.worker.runner import StepRunner

from ..support.engines import core_of
from ..support.tiny_models import (
    DENSE,
    EXPERTS,
    FAMILIES,
    VOCAB,
    Oracle,
    Recorder,
    Tiny,
    generate,
    make_oracle,
    mixed_prompts,
    quieten,
)

DEVICE = "cuda"
NUM_TOKENS = 64
TIE = 0.05  # in bfloat16 the order of logits of about 1 that are closer than this is a matter of rounding
ATOL = 2e-4
TEXTS = (
    "To create a new file you",
    "The module provides a",
    "def main(",
    "Once upon a time",
    "import os\n\n",
    "The quick brown fox",
    "A list is a",
    "In Python, a class",
    "Return the number of",
)
NOTES = "Tomas lives in Mumbai.\nThe code of Tomas is 6423.\nThe code of Lakral is 5411.\nLakral likes tea.\n\n"
SURE = (  # what the trained model knows well how to go on with
    *(
        f"{NOTES}Question: {asked}\nAnswer:"
        for asked in ("What is the code of Tomas?", "What is the code of Lakral?", "Where does Tomas live?")
    ),
    f"<|im_start|>user\n{NOTES}What does Lakral like?<|im_end|>\n<|im_start|>assistant\n",
    *(
        f"def {name}(a, b):\n    return a {sign} b\n\n\n" * 4
        for name, sign in zip(("add", "sub", "mul"), "+-*", strict=True)
    ),
    "1, 2, 3, 5, 8, 13, 21, 34; " * 4,
)
SHAPES: dict[str, dict[str, Any]] = {  # of families; others have those of `Tiny`
    "qwen3": {"heads": (6, 3)}, "llama": {"head_dim": 64, "tied": True}, "qwen2": {"heads": (4, 1), "head_dim": 128},
    "mistral": {"heads": (5, 5), "head_dim": 32},
}  # fmt: skip
# One of each kind of states, and of kinds beside each other.
RECURRENT = ("qwen3_next", "qwen3_5_text", "kimi_linear", "lfm2", "granite_mamba", "nemotron_h", "falcon_h1")
TINY = {family: Tiny(family=family, **SHAPES.get(family, {})) for family in DENSE}
# In bfloat16 the routers of random models choose other experts: there is no truth to compare with. transformers saves
# convolutions of OLMo-Hybrid in three equal parts.
COMPARED = ("quire-tiny", *(family for family in TINY if family != "olmo_hybrid"))
TINY |= {
    family: Tiny(family=family, rope="yarn" if "yarn" in FAMILIES[family].ropes else "default") for family in EXPERTS
}
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    del TINY["granite_moe"]  # its mixers of several groups are wrong there
Oracles = Callable[[str], Oracle]
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "n": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 0.9, "logit_bias": {300: 4.0, 301: -100.0}, "bad_words": [" the"], "min_tokens": 20},
    {"temperature": 1.0, "allowed_token_ids": list(range(500, 900))},
)


def make(folder: Path, **options: Any) -> LLM:
    """An engine that takes little of the GPU, so that several can be there at once."""
    defaults: dict[str, Any] = dict(
        device=DEVICE,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=512,
        use_tqdm_on_load=False,
        max_logprobs=-1,
    )
    if "num_gpu_blocks_override" not in options:
        defaults["kv_cache_memory_bytes"] = 128 << 20
    if folder != bundled_model():
        defaults["skip_tokenizer_init"] = True
    return LLM(str(folder), **(defaults | options))


def greedy(count: int = NUM_TOKENS, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": count, "ignore_eos": True} | fields))


def run(
    llm: LLM, prompts: Sequence[PromptLike], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(c.token_ids) for o in outputs for c in o.outputs]


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model.to(DEVICE).eval()


def table(rows: Sequence[dict[int, Logprob] | None] | None) -> np.ndarray:
    """[rows, V] of log-probabilities that were asked for with -1."""
    return np.array([[row[i].logprob for i in range(len(row))] for row in rows or () if row is not None])


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Checkpoints by name, with transformers' model in float32 on the GPU."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made and name in TINY:
            made[name] = make_oracle(TINY[name], mixed_prompts(), tmp_path_factory.mktemp, DEVICE)
        elif name not in made:
            made[name] = Oracle(bundled_model(), transformers_model(bundled_model(), torch.float32))
        return made[name]

    return get


@pytest.fixture(scope="module")
def bundled() -> Iterator[LLM]:
    """The trained model in float32, with captured graphs."""
    with make(bundled_model(), max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def qwen3(oracle: Oracles) -> Iterator[LLM]:
    """A random model in float32, with blocks of 16."""
    with make(oracle("qwen3").folder, block_size=16) as llm:
        yield llm


@pytest.fixture(autouse=True)
def empty_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with an empty prefix cache; afterwards no request may hold anything."""
    engines = [request.getfixturevalue(name) for name in ("bundled", "qwen3") if name in request.fixturenames]
    for llm in engines:
        llm.reset_prefix_cache()
    yield
    for llm in engines:
        assert not llm.engine.core.has_work
        llm.engine.core.check()
    gc.collect()


def prompts_of(name: str, tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS] if name == "quire-tiny" else mixed_prompts()


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("quire-tiny", *TINY))
def test_tokens_and_logprobs_in_float32(name: str, oracle: Oracles, bundled: LLM) -> None:
    """Of answers as they are sampled, and of every position of a prompt."""
    checkpoint, prompts = oracle(name), prompts_of(name, bundled.get_tokenizer())
    expected = checkpoint.greedy(prompts, NUM_TOKENS)
    whole = [p + e for p, e in zip(prompts, expected, strict=True)]
    truth = [checkpoint.logprobs(ids) for ids in whole]
    llm = bundled if name == "quire-tiny" else make(checkpoint.folder, block_size=32)
    outputs = run(llm, prompts, greedy(logprobs=-1 if name in TINY else 20))
    assert tokens(outputs) == expected
    for prompt, output, rows in zip(prompts, outputs, truth, strict=True):
        given = output.outputs[0].logprobs
        assert given is not None and len(given) == NUM_TOKENS
        for step, row in enumerate(given):
            values = rows[len(prompt) - 1 + step]
            assert all(abs(values[i] - one.logprob) < ATOL for i, one in row.items())
            assert row[output.outputs[0].token_ids[step]].rank == 1 and len(row) >= min(20, len(values))
    scored = run(llm, whole[: 3 if name in TINY else 1], SamplingParams(max_tokens=0, prompt_logprobs=-1))
    for out, rows in zip(scored, truth, strict=False):
        np.testing.assert_allclose(table(out.prompt_logprobs), rows[:-1], atol=ATOL, rtol=0)
    if llm is not bundled:
        llm.close()


@pytest.mark.parametrize("name", COMPARED)
def test_tokens_in_bfloat16_up_to_the_first_tie(name: str, oracle: Oracles, bundled: LLM, tmp_path: Path) -> None:
    """Logits are made about as large as 1: transformers rounds them to 8 bits, over 0.05 for those of 10."""
    model, tokenizer, draw = copy.deepcopy(oracle(name).model), bundled.get_tokenizer(), np.random.default_rng(5)
    if name == "quire-tiny":
        quieten(model, 3.0)
        prompts = [tokenizer.encode(text) for text in SURE]
    else:
        quieten(model, 3.0, layers=0.25)
        prompts = [draw.integers(1, VOCAB, n).tolist() for n in range(1, 60, 2)]
    model.save_pretrained(tmp_path)
    expected = generate(transformers_model(tmp_path, torch.bfloat16), prompts, NUM_TOKENS)
    with make(tmp_path, dtype="bfloat16", max_num_seqs=16) as llm:
        assert llm.engine.dtype.dtype == "bfloat16"
        found = tokens(run(llm, prompts, greedy()))
    until = [next((n for n, lead in enumerate(leads) if lead < TIE), NUM_TOKENS) for _, leads in expected]
    print(name, "tokens compared:", until)
    assert sum(until) > NUM_TOKENS, "nearly nothing would be compared"
    wrong = [i for i, n in enumerate(until) if found[i][:n] != expected[i][0][:n]]
    assert wrong == [], [(found[i], expected[i], until[i]) for i in wrong]


def test_a_long_prompt_in_chunks_and_its_long_context(oracle: Oracles, bundled: LLM) -> None:
    """1,500 tokens: several tiles of queries, blocks of 128, decodes whose context is cut into parts."""
    ids = bundled.get_tokenizer().encode(
        "".join(f"Note {n}: box {n * 37 % 91} holds {n * 53 % 97} nails.\n" for n in range(200))
    )[:1500]
    assert len(ids) == 1500
    ((expected, leads),) = generate(oracle("quire-tiny").model, [ids], 32)
    assert min(leads) > 1e-4, "the text is a matter of rounding: choose another"
    assert tokens(run(bundled, [ids], greedy(32))) == [expected]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"])
def test_a_cache_of_rows_holds_the_cpu_s_numbers(family: str, oracle: Oracles) -> None:
    """Log-probabilities near the CPU's with this cache, far nearer than those without; reused blocks, and graphs.

    A number that was rounded otherwise before it became a code moves by a sixteenth; that is rare in float32.
    """
    prompts, asked = mixed_prompts()[1:], SamplingParams(max_tokens=0, prompt_logprobs=-1)
    plain: dict[str, Any] = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    tables = {}
    for device, cache in (("cpu", "auto"), ("cpu", "fp8_ds_mla"), (DEVICE, "fp8_ds_mla")):
        with make(oracle(family).folder, **plain, device=device, kv_cache_dtype=cache) as llm:
            tables[device, cache] = np.concatenate([table(one.prompt_logprobs) for one in run(llm, prompts, asked)])
            if device == DEVICE:
                texts = [tokens(run(llm, prompts, greedy(24))) for _ in range(2)]
                assert texts[0] == texts[1] and llm.engine.worker.recorder.counts["replayed"]
    wanted = tables["cpu", "fp8_ds_mla"]
    error, rounding = (np.abs(tables[one] - wanted).mean() for one in ((DEVICE, "fp8_ds_mla"), ("cpu", "auto")))
    print(family, "mean difference", error, "of rounding", rounding)
    assert rounding > 1e-3 and error < 0.1 * rounding


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_short_prompts_beside_longer_ones(family: str, oracle: Oracles) -> None:
    """Prompts of a step, of which some are shorter than what layers choose: the CPU's tokens, from the cache, too."""
    prompts = [list(range(5, 5 + count)) for count in (3, 17, 40, 33, 8)]
    found = []
    for device in ("cpu", DEVICE):
        with make(
            oracle(family).folder, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, device=device
        ) as llm:
            found += [tokens(run(llm, prompts, greedy(24))) for _ in range(1 if device == "cpu" else 3)]
    assert all(one == found[0] for one in found)


# --- however it is scheduled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text"])
def test_graphs_give_what_the_same_sizes_give_launch_by_launch(name: str, oracle: Oracles) -> None:
    """Twenty requests that end one by one, so that many sizes of steps come: greedy and sampled ones, all with
    log-probabilities."""
    prompts = [*mixed_prompts(), *mixed_prompts(), *mixed_prompts()[1:]]
    params = [
        SamplingParams(
            temperature=0.9 * (i % 3 == 0), top_p=0.95, seed=i, max_tokens=5 + 4 * i, ignore_eos=True, logprobs=5
        )
        for i in range(len(prompts))
    ]
    with make(oracle(name).folder, max_num_seqs=32) as llm:
        worker, recorder = llm.engine.worker, llm.engine.worker.recorder
        assert isinstance(recorder, Graphs) and len(recorder) > 20
        replayed = run(llm, prompts, params)
        llm.reset_prefix_cache()
        assert recorder.counts["replayed"] > recorder.counts["run"]
        worker.recorder = Graphs(recorder.sizes, recorder.tokens, recorder.most_seqs)  # nothing is captured
        worker.programs.recorder = worker.recorder
        launched = run(llm, prompts, params)
    assert tokens(replayed) == tokens(launched)
    for one, other in zip(replayed, launched, strict=True):
        for a, b in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert a.keys() == b.keys() and all(abs(a[i].logprob - b[i].logprob) <= 1e-5 for i in a)


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"async_depth": 1},
        {"max_num_batched_tokens": 16, "block_size": 32},
        {"cudagraph_capture_sizes": (2, 8)},
    ],
    ids=str,
)
def test_without_graphs_or_ahead_of_time_or_whole_prompts(options: dict[str, Any], oracle: Oracles) -> None:
    checkpoint = oracle("qwen3")
    with make(checkpoint.folder, **options) as llm:
        assert tokens(run(llm, mixed_prompts(), greedy())) == checkpoint.greedy(mixed_prompts(), NUM_TOKENS)
        llm.engine.core.check()


def test_slots_are_used_again(oracle: Oracles, qwen3: LLM) -> None:
    """Forty requests of many lengths through eight slots give what each gives alone."""
    checkpoint = oracle("qwen3")
    expected = checkpoint.greedy(mixed_prompts(), NUM_TOKENS)
    cases = [(i % 7, 3 + i * 11 % 60) for i in range(40)]
    prompts = [mixed_prompts()[i] for i, _ in cases]
    outputs = run(qwen3, prompts, [greedy(count) for _, count in cases])
    assert tokens(outputs) == [expected[i][:count] for i, count in cases]
    qwen3.reset_prefix_cache()
    alone = [run(qwen3, [prompt], greedy()) for prompt in mixed_prompts()]
    assert [t for out in alone for t in tokens(out)] == expected


def test_preempted_requests_go_on_where_they_were(oracle: Oracles) -> None:
    """A cache that holds two of the seven, with chunks of prompts, with and without the prefix cache."""
    checkpoint = oracle("qwen3")
    expected = checkpoint.greedy(mixed_prompts(), NUM_TOKENS)
    for caching in (True, False):
        with make(
            checkpoint.folder,
            block_size=16,
            num_gpu_blocks_override=18,
            max_num_batched_tokens=16,
            enable_prefix_caching=caching,
        ) as llm:
            assert tokens(run(llm, mixed_prompts(), greedy())) == expected
            assert core_of(llm).scheduler.num_preempted > 0
            llm.engine.core.check()


@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_preempted_and_repeated_requests(name: str, oracle: Oracles) -> None:
    """Their states go on from checkpoints, or from zero; prompts come whole and in chunks of 16 tokens."""
    checkpoint = oracle(name)
    expected = checkpoint.greedy(mixed_prompts(), NUM_TOKENS)
    for options in ({}, {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 16}, {"enforce_eager": True}):
        with make(checkpoint.folder, block_size=16, **options) as llm:
            for _ in range(2):
                assert tokens(run(llm, mixed_prompts(), greedy())) == expected
            prompts = [p + e[:40] for p, e in zip(mixed_prompts(), expected, strict=True)]
            outputs = run(llm, prompts, greedy(NUM_TOKENS - 40))
            assert tokens(outputs) == [e[40:] for e in expected]
            assert bool(core_of(llm).scheduler.num_preempted) == ("num_gpu_blocks_override" in options)
            assert any(one.num_cached_tokens for one in outputs) or options
            llm.engine.core.check()


@pytest.mark.parametrize("name", ["qwen3_5_text", "granite_mamba"])
def test_matrices_of_states_in_bfloat16(name: str, oracle: Oracles) -> None:
    """Numbers are rounded, and near those of float32."""
    checkpoint, prompts = oracle(name), mixed_prompts()
    with make(checkpoint.folder, mamba_ssm_cache_dtype="bfloat16") as llm:
        outputs = run(llm, prompts, greedy(16, logprobs=-1))
    apart = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        truth = checkpoint.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 :]
        for row, values in zip(answer.logprobs, truth, strict=False):
            apart = max(apart, *(abs(values[i] - one.logprob) for i, one in row.items()))
    assert 1e-5 < apart < 0.3, apart


def test_a_cached_prefix_gives_the_same_tokens(oracle: Oracles, qwen3: LLM) -> None:
    prompts = mixed_prompts()
    expected = oracle("qwen3").greedy(prompts, NUM_TOKENS)
    for caches in (False, True):
        outputs = run(qwen3, prompts, greedy())
        assert tokens(outputs) == expected
        assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 16 * 16 * caches for p in prompts]
    answered = [*prompts[6], *expected[6], 7]
    (again,) = run(qwen3, [answered], greedy(8))
    assert again.num_cached_tokens == (len(answered) - 2) // 16 * 16
    assert tokens([again]) == oracle("qwen3").greedy([answered], 8)


def test_a_prefix_that_decodes_share_is_read_once_and_right(
    oracle: Oracles, bundled: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of six, with prefixes of 384 and 256 tokens, and a request that belongs to neither."""
    tokenizer, core = bundled.get_tokenizer(), core_of(bundled)
    first, second = (
        tokenizer.encode("".join(f"{word} {n} is at {n * n % 89}.\n" for n in range(60))) for word in ("Box", "Ship")
    )
    prompts = [first[:384] + tokenizer.encode(text) for text in TEXTS[:6]]
    prompts += [second[:256] + tokenizer.encode(text) for text in TEXTS[:6]]
    prompts.append(tokenizer.encode(TEXTS[0]))
    expected = generate(oracle("quire-tiny").model, prompts, 24)
    until = [next((n for n, lead in enumerate(leads) if lead < 1e-4), 24) for _, leads in expected]
    assert sum(until) > 200
    for prefix in (prompts[0], prompts[6]):
        run(bundled, [prefix], greedy(1))
    recorder = Recorder(core.executor)
    monkeypatch.setattr(core, "executor", recorder)
    outputs = run(bundled, prompts, greedy(24))
    blocks = core.facts.block_size
    assert [o.num_cached_tokens for o in outputs[:12]] == [384 // blocks * blocks] * 6 + [256 // blocks * blocks] * 6
    groups = [plan.shared for plan in recorder.plans if plan.num_decodes == len(plan.slots)]
    assert sum(len(shared) == 2 for shared in groups) > 10
    assert [t[:n] for t, n in zip(tokens(outputs), until, strict=True)] == [
        e[:n] for (e, _), n in zip(expected, until, strict=True)
    ]


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_seeded_tokens_are_the_cpu_s(bundled: LLM) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, **fields)
        for seed, fields in product((3, 2**40 + 1), SAMPLED)
    ]
    prompts = [TEXTS[i % len(TEXTS)] for i in range(len(params))]
    with LLM(
        device="cpu",
        dtype="float32",
        use_tqdm_on_load=False,
        max_num_seqs=16,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
    ) as cpu:
        expected = tokens(run(cpu, prompts, params))
    assert len(set(map(tuple, expected))) > len(SAMPLED)
    assert tokens(run(bundled, prompts, params)) == expected
    alone = [t for prompt, one in zip(prompts, params, strict=True) for t in tokens(run(bundled, [prompt], one))]
    assert alone == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"async_depth": 1}, {"num_gpu_blocks_override": 24, "block_size": 16}],
    ids=["graphs", "one at a time", "preempted"],
)
def test_structured_outputs_are_the_cpu_s_and_change_nobody_else(options: dict[str, Any], bundled: LLM) -> None:
    """Of every sampler, beside requests without one; a budget of reasoning forces its end."""
    constrained: list[dict[str, Any]] = [
        {"regex": "[a-c]{3}( [0-9]{2}){4}"},
        {"choice": ["red", "green", "a long blue thing"]},
        {"json": {"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 6, "maxItems": 6}},
        {"regex": "(yes|no)!", "after": "</think>", "budget": 9},
    ]
    params = [
        SamplingParams(
            seed=i,
            max_tokens=60,
            skip_special_tokens=False,
            structured_outputs=StructuredOutputsParams(**constrained[i % 4]) if i % 3 else None,
            **SAMPLED[i % 5],
        )
        for i in range(24)
    ]
    prompts = [TEXTS[i % len(TEXTS)] for i in range(len(params))]
    with LLM(
        device="cpu",
        dtype="float32",
        use_tqdm_on_load=False,
        max_num_seqs=16,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
    ) as cpu:
        expected = run(cpu, prompts, params)
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(make(bundled_model(), max_num_seqs=16, **options)) if options else bundled
        found = run(llm, prompts, params)
        assert tokens(found) == tokens(expected)
        assert "num_gpu_blocks_override" not in options or core_of(llm).scheduler.num_preempted > 0
    ended = [c.finish_reason for o, p in zip(found, params, strict=True) for c in o.outputs if p.structured_outputs]
    assert set(ended) == {"stop"} and len(ended) > 16
    assert all(
        "</think>" in c.text
        for o, p in zip(found, params, strict=True)
        for c in o.outputs
        if p.structured_outputs and p.structured_outputs.after
    )


def test_vectors_are_the_cpu_s(bundled: LLM) -> None:
    texts = [text * (1 + 40 * (i % 3)) for i, text in enumerate(TEXTS)]
    with LLM(
        device="cpu", dtype="float32", use_tqdm_on_load=False, max_model_len=1024, kv_cache_memory_bytes=64 << 20
    ) as cpu:
        expected = [o.outputs.embedding for o in cpu.embed(texts, use_tqdm=False)]
    for _ in range(2):  # cold, and with a warm prefix cache
        found = [o.outputs.embedding for o in bundled.embed(texts, use_tqdm=False)]
        np.testing.assert_allclose(found, expected, atol=1e-4)


# --- nothing waits ----------------------------------------------------------------------------------------------------


class Waits:
    """Launches steps, and their sampling when it needs masks, with every synchronizing call forbidden; `num_steps` and
    what was `found`."""

    def __init__(self, worker: "StepRunner | Calls", patch: pytest.MonkeyPatch) -> None:
        self.num_steps, self.found = 0, list[str]()
        self._submit: Callable[[Any], None] = worker.submit
        self._release: Callable[[I32], None] = worker.release
        self._launching = False
        patch.setattr(worker, "submit", self.submit)
        patch.setattr(worker, "release", self.release)
        for owner, name in (
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda, "synchronize"),
        ):
            patch.setattr(owner, name, self._watching(getattr(owner, name), f"{owner.__name__}.{name}"))

    def submit(self, plan: Any) -> None:
        """Run a step."""
        self.num_steps += 1
        self._watch(lambda: self._submit(plan))

    def release(self, masks: I32) -> None:
        """The sampling of the last one."""
        self._watch(lambda: self._release(masks))

    def _watch(self, launch: Callable[[], object]) -> None:
        self._launching = True
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch()
        except RuntimeError as error:
            self.found.append(str(error))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
            self._launching = False

    def _watching(self, wait: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A wait for an event that has come is none: staging buffers look whether they have been read."""

        def watched(*args: Any, **named: Any) -> Any:
            if self._launching and not (args and isinstance(args[0], torch.cuda.Event) and args[0].query()):
                self.found.append(name)
            return wait(*args, **named)

        return watched


class Calls:
    """Stands for a worker: a plan is a function to call."""

    def submit(self, plan: Callable[[], object]) -> None:
        """Call it."""
        plan()

    def release(self, masks: I32) -> None:
        """No plan has a grammar."""


@pytest.mark.skipif(DEVICE != "cuda", reason="counts CUDA calls")
@pytest.mark.parametrize(
    "wait",
    [
        lambda: torch.ones(1, device=DEVICE).item(),
        lambda: torch.ones(1, device=DEVICE).cpu(),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
    ],
    ids=["item", "cpu", "device", "stream"],
)
def test_the_watch_notices_a_wait(wait: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Calls()
    waits = Waits(worker, monkeypatch)
    worker.submit(lambda: torch.ones(1, device=DEVICE).add_(1))
    assert waits.found == []
    with contextlib.suppress(RuntimeError):
        worker.submit(wait)
    assert waits.found and waits.num_steps == 2


@pytest.mark.skipif(DEVICE != "cuda", reason="counts CUDA calls")
@pytest.mark.parametrize("mixed", [False, True], ids=["steady decode", "arrivals, every sampler and logprobs"])
def test_no_step_waits_for_the_device(mixed: bool, bundled: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [TEXTS[i % len(TEXTS)] for i in range(30 if mixed else 16)]
    params: SamplingParams | list[SamplingParams] = greedy(100)
    if mixed:
        structured = StructuredOutputsParams(regex="([a-z]+ )*")
        fields: tuple[dict[str, Any], ...] = (
            *SAMPLED,
            {"temperature": 0.0},
            {"temperature": 1.0, "logprobs": 5},
            {"structured_outputs": structured},
        )
        params = [
            SamplingParams(seed=i, max_tokens=20 + 7 * i % 50, ignore_eos=True, **fields[i % len(fields)])
            for i in range(len(prompts))
        ]
    expected = tokens(run(bundled, prompts, params))  # warms up
    bundled.reset_prefix_cache()
    waits = Waits(bundled.engine.worker, monkeypatch)
    assert tokens(run(bundled, prompts, params)) == expected
    assert waits.found == [] and waits.num_steps >= 50
