"""Drafts by a prediction layer (MTP) or a draft model: logits are transformers', answers plain decoding's."""

import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.assemble.quantize_checkpoint import Recipe, quantize_checkpoint
from quire.config.bundled import bundled_model
from quire.contracts.errors import ConfigError, UnsupportedModel, WeightsError
from quire.engine.drafts import MeasuredGain
from quire.spec.draft_passes import PredictionPass
from quire.spec.layers import LayerDrafter

from ..support.features import drafter_of as runner_drafter
from ..support.full import full_rows
from ..support.pairwise import label
from ..support.prediction_layers import predicting
from .plain_decoding import (
    COLD,
    LONG,
    OPTIONS,
    PROSE,
    REQUESTS,
    SYNTHETIC,
    WARM,
    answers,
    check,
    params,
    structured,
    undrafted,
)

GLM: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(shared: Path) -> str:
    return str(shared / "models" / "quire-tiny-moe")


def glm(folder: Path) -> str:
    """A random GLM-4.5 of two layers and a prediction layer, with the names of the real ones."""
    torch.manual_seed(0)
    transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**GLM)).float().save_pretrained(folder)
    config, hidden = json.loads((folder / "config.json").read_text()), GLM["hidden_size"]
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    own = {name: torch.rand(hidden) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {
        "eh_proj": torch.randn(hidden, 2 * hidden) / 8,
        "shared_head.head": tensors["lm_head.weight"].clone(),
        "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(
        tensors | {f"model.layers.2.{name}.weight": value for name, value in own.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return str(folder)


class Oracle:
    """The formula of DeepSeek-V3 with the layers of transformers: the draft layer is one layer more of the model."""

    def __init__(self, folder: str) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self.layer = config.num_hidden_layers
        config.num_hidden_layers += 1
        if config.model_type == "deepseek_v32":
            config.mlp_layer_types, config.layer_types = (
                [*one, one[-1]] for one in (config.mlp_layer_types, config.layer_types)
            )
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        self.model = made.eval()
        tensors: dict[str, Tensor] = {}
        for file in Path(folder).glob("*.safetensors"):
            tensors |= load_file(file)
        at = f"model.layers.{self.layer}."
        self.own = {name.removeprefix(at): value.float() for name, value in tensors.items() if name.startswith(at)}

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.own[f"{name}.weight"]

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> Tensor:
        """The state before each token; that before the first is unknown."""
        inner = self.model.model
        states = inner.norm(inner(torch.tensor([tokens]), output_hidden_states=True).hidden_states[self.layer])[0]
        return torch.cat((torch.zeros_like(states[:1]), states[:-1]))

    @torch.inference_mode()
    def drafts(self, tokens: list[int], states: Tensor, count: int) -> Tensor:
        """The logits [count, V] of the likeliest drafts behind some tokens, with the `states` of these."""
        inner, ids, found = self.model.model, torch.tensor(tokens), []
        for _ in range(count):
            x = torch.cat((self.norm(inner.embed_tokens(ids), "enorm"), self.norm(states, "hnorm")), -1)
            x, places = (x @ self.own["eh_proj.weight"].T)[None], torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            out = inner.layers[self.layer](
                x, attention_mask=mask, position_ids=places, position_embeddings=inner.rotary_emb(x, places)
            )
            state = self.norm(out[0, -1:], "shared_head.norm")
            found.append(self.model.lm_head(state)[0])
            ids, states = torch.cat((ids, found[-1].argmax()[None])), torch.cat((states, state))
        return torch.stack(found)


@pytest.fixture
def drafting() -> Iterator[Callable[..., LLM]]:
    """Makes engines that draft with the prediction layer."""
    made: list[LLM] = []

    def make(model: str, k: Any = 3, more: Any = None, **options: Any) -> LLM:
        given = {"method": "mtp", "num_speculative_tokens": k} | (more or {})
        made.append(LLM(model, **OPTIONS | options, speculative_config=given))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def drafter_of(llm: LLM) -> LayerDrafter:
    drafter = runner_drafter(llm.engine.worker)
    assert isinstance(drafter, LayerDrafter)
    return drafter


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm4_moe"])
def test_logits_of_drafts_are_those_of_the_formula(
    family: str, trained: str, shared: Path, tmp_path: Path, drafting: Callable[..., LLM]
) -> None:
    """After chunks, after runs of which all, some or no drafts were accepted, and after steps without drafts."""
    folder = trained
    if family == "glm4_moe":
        folder = glm(tmp_path)
    if family == "deepseek_v32":
        folder = str(predicting(tmp_path / "sparse", family, shared / "models" / "quire-tiny", 0.3))
    alone = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}
    llm = drafting(folder, 3, alone, max_num_batched_tokens=12, enable_prefix_caching=False, skip_tokenizer_init=True)
    runs, drafter = list[list[tuple[int, Tensor]]](), drafter_of(llm)
    draft, calls = drafter.draft, Counter[str]()
    drafter_of(llm).draft = lambda *given: (runs.append([]), draft(*given))  # type: ignore
    for name in ("keep", "catch_up"):
        setattr(drafter, name, _counted(getattr(drafter, name), name, calls))
    drafter.on_logits = lambda slots, places, logits: runs[-1].extend(zip(places.tolist(), logits.clone(), strict=True))
    prompts = [[(7 * i * i + 3) % 300 for i in range(29)], [5, 9, 14]]
    asked = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False) for count in (40, 12)]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    text = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
    oracle = Oracle(folder)
    states, made = oracle.states(text), [run for run in runs if run]
    for run in made:
        first = run[0][0]
        assert [place for place, _ in run] == list(range(first, first + len(run)))
        expected = oracle.drafts(text[:first], states[:first], len(run))
        torch.testing.assert_close(torch.stack([logits for _, logits in run]), expected, atol=1e-4, rtol=1e-4)
    assert len(made) > 5 and made[-1][-1][0] > 60 and calls["keep"] > 8, "with and without drafts"
    assert 1 <= calls["catch_up"] <= calls["keep"] // 3


def _counted(work: Callable[..., None], name: str, calls: Counter[str]) -> Callable[..., None]:
    """A function that counts its calls."""
    return lambda *given: (calls.update((name,)), work(*given))[1]


def test_the_layer_guesses_as_its_card_says(trained: str, shared: Path, drafting: Callable[..., LLM]) -> None:
    """The share of held-out positions where its likeliest token is the model's own, given true tokens: 58.7%."""
    text = json.loads((shared / "models" / "eval.json").read_text())["perplexity_text"]
    llm = drafting(trained, 1, max_model_len=1040, max_num_batched_tokens=2048, enable_prefix_caching=False)
    ids, right, total = llm.get_tokenizer().encode(text, add_special_tokens=False), 0, 0
    model = llm.engine.worker.model
    drafter, outs, hiddens = drafter_of(llm), list[Tensor](), list[Tensor]()
    passes, norm = drafter._pass, model.norm
    assert isinstance(passes, PredictionPass)
    layer = passes._layer
    passes._layer = lambda *given: outs.append(layer(*given)) or outs[-1]  # type: ignore
    follow = drafter.follow
    drafter.follow = lambda step, buffers, hidden, ctx, *, decode: (
        hiddens.append(hidden.clone()),
        follow(step, buffers, hidden, ctx, decode=decode),
    )
    for at in range(0, len(ids), 1024):
        window = ids[at : at + 1024]
        llm.generate([window], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        drafts = model.head(layer.norm(outs.pop())).argmax(-1)  # row i: of token i + 1
        likeliest = model.head(norm(hiddens.pop())).argmax(-1)
        right += int((drafts[1:] == likeliest[1:]).sum())
        total += len(window) - 1
    assert total > 5300 and right / total == pytest.approx(0.587, abs=0.02)


FACTORS: dict[str, tuple[Any, Any]] = {
    "drafter": ("mtp", "draft_model"), "async_depth": (2, 1), "k": (3, 1), "max_num_batched_tokens": (24, 2048),
    "num_gpu_blocks_override": (24, None), "cache": ({"kv_offload_gb": 0.02}, {"enable_prefix_caching": False}),
    "kv_cache_dtype": ("auto", "fp8"), "scheduling_policy": ("fcfs", "priority"), "part": ((0, 2), (1, 2)),
}  # fmt: skip
# Both drafters, and a cache of 8 bits, each for every fourth request.
CHOSEN = [
    dict(zip(FACTORS, values, strict=True))
    for values in (
        ("mtp", 2, 3, 24, 24, {"kv_offload_gb": 0.02}, "auto", "fcfs", (0, 4)),
        ("draft_model", 2, 1, 2048, 24, {"enable_prefix_caching": False}, "auto", "priority", (2, 4)),
        ("mtp", 1, 3, 24, None, {"kv_offload_gb": 0.02}, "fp8", "priority", (2, 4)),
    )
]
Plain = Callable[[str, str, tuple[int, int]], list[Any]]


def rows() -> list[Any]:
    """CHOSEN; with --full also a cover of the pairs of FACTORS and many more rows.

    In the cover, each factor has its second value in other three of five rows: two of these sets have a row in common,
    and each has one that the other lacks.
    """
    second = dict(zip(FACTORS, itertools.combinations(range(1, 6), 3), strict=False))
    cover = [{name: values[row in second[name]] for name, values in FACTORS.items()} for row in range(6)]
    chance = random.Random(0)
    whole = FACTORS | {"k": (1, 2, 3, 7, "auto")}
    more = [{name: chance.choice(values) for name, values in whole.items()} for _ in range(30)]
    return [pytest.param(row, id=label(row)) for row in [*CHOSEN, *full_rows(cover + more)]]


@pytest.fixture(scope="module")
def targets(trained: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The model that each drafter drafts for: quire-tiny does so for itself with weights of 4 bits."""
    folder = tmp_path_factory.mktemp("targets") / "w4a16"
    quantize_checkpoint(bundled_model(), folder, Recipe(scheme="w4a16"))
    return {"mtp": trained, "draft_model": str(folder)}


@pytest.fixture(scope="module")
def plain(targets: dict[str, str]) -> Plain:
    """The answers of plain decoding of a drafter's target, by type of the KV cache and part of the requests."""

    @cache
    def decoded(drafter: str, kv_cache_dtype: str, part: tuple[int, int]) -> list[Any]:
        first, every = part
        with LLM(targets[drafter], **OPTIONS, kv_cache_dtype=kv_cache_dtype) as llm:
            return answers(llm, undrafted(), slice(first, None, every))

    return decoded


@pytest.mark.parametrize("row", rows())
def test_answers_are_those_of_plain_decoding(
    row: dict[str, Any], plain: Plain, targets: dict[str, str], drafting: Callable[..., LLM]
) -> None:
    """A part of the requests in a row. An 8-bit cache makes steps of last bits: there one text may be another, which is
    the answer of several requests."""
    drafter, place = row["drafter"], slice(row["part"][0], None, row["part"][1])
    given = {"method": drafter} | ({"model": "quire-tiny"} if drafter == "draft_model" else {})
    options = {name: value for name, value in row.items() if name not in ("drafter", "part", "cache")} | row["cache"]
    llm = drafting(targets[drafter], more=given, **options)
    found, expected = answers(llm, REQUESTS, place), plain(drafter, row["kv_cache_dtype"], row["part"])
    if row["kv_cache_dtype"] == "fp8":
        assert sum(one[:2] != other[:2] for one, other in zip(found, expected, strict=True)) <= 3
    else:
        check(found, expected, place)
    core = llm.engine.core
    core.check()
    runs, drafts, *accepted = core.scheduler.drafts.totals
    most = 7 if row["k"] == "auto" else row["k"]
    assert runs and accepted == sorted(accepted, reverse=True) and len(accepted) == most
    assert (core.scheduler.num_preempted > 0) == (row["num_gpu_blocks_override"] is not None)
    if most <= 3:
        assert 0.3 * drafts <= sum(accepted) <= 0.9 * drafts, "a run of a drafter that guesses right and wrong"


def record(llm: LLM) -> list[dict[int, list[tuple[int, Tensor]]]]:
    """Note the drafts of every step that has some: (position, logits) of each, by slot."""
    drafter, runs = drafter_of(llm), list[dict[int, list[tuple[int, Tensor]]]]()
    draft = drafter.draft

    def made(*given: Any) -> None:
        runs.append({})
        draft(*given)
        if not runs[-1]:
            runs.pop()

    def seen(slots: Tensor, places: Tensor, logits: Tensor) -> None:
        for slot, place, one in zip(slots.tolist(), places.tolist(), logits.clone(), strict=True):
            runs[-1].setdefault(slot, []).append((place, one))

    drafter_of(llm).draft = made
    drafter.on_logits = seen
    return runs


def compare_drafts(oracle: Oracle, text: list[int], states: Tensor, drafts: list[tuple[int, Tensor]]) -> None:
    """The logits of consecutive drafts are those of the formula, with these states of a text."""
    first = drafts[0][0]
    assert [place for place, _ in drafts] == list(range(first, first + len(drafts)))
    expected = oracle.drafts(text[:first], states[:first], len(drafts))
    torch.testing.assert_close(torch.stack([logits for _, logits in drafts]), expected, atol=1e-4, rtol=1e-4)


def test_requests_of_a_step_may_have_other_numbers_of_drafts(trained: str, drafting: Callable[..., LLM]) -> None:
    """Each gets its own from the passes of the step with the most, after runs of all lengths."""
    llm = drafting(trained, 3, enable_prefix_caching=False, skip_tokenizer_init=True)
    runs, lengths = record(llm), (1, 3, 2, 0)
    prompts = [[(7 * i * i + 3 + count) % 300 for i in range(9 + count)] for count in lengths]
    asked = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False, speculative_tokens=count)
        for count in lengths
    ]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    oracle, owner, seen = Oracle(trained), dict[int, int](), set[tuple[int, ...]]()
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    states = [oracle.states(text) for text in texts]
    for run in runs:
        for slot, drafts in run.items():
            if slot not in owner:  # the first draft is behind a prompt of 9 + k tokens and one more
                owner[slot] = lengths.index(drafts[0][0] - 10)
            number = owner[slot]
            assert len(drafts) <= lengths[number]
            compare_drafts(oracle, texts[number], states[number], drafts)
        seen.add(tuple(sorted(map(len, run.values()))))
    assert len(owner) == 3 and (1, 2, 3) in seen


def test_a_slot_behind_a_reused_prefix_lacks_one_draft_entry(trained: str, drafting: Callable[..., LLM]) -> None:
    """The layer's cache has nothing of the request that had the slot before, and of each prefix all but the entry
    behind it, also in blocks that a request behind a prefix has added."""
    llm = drafting(trained, 3, max_num_seqs=1, skip_tokenizer_init=True)
    runs, oracle, lost = record(llm), Oracle(trained), list[int]()
    asked = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    other, text = [(11 * i + 5) % 290 for i in range(50)], [(7 * i * i + 3) % 300 for i in range(37)]
    for turn in range(3):
        llm.generate([other], asked, use_tqdm=False)  # leaves its states in the only slot
        runs.clear()
        output = llm.generate([text], asked, use_tqdm=False)[0]
        assert (output.num_cached_tokens > 32 * turn) if turn else output.num_cached_tokens == 0
        lost += [output.num_cached_tokens] * (turn > 0)
        text = [*text, *output.outputs[0].token_ids]
        states = oracle.states(text).clone()
        states[lost] = 0.0
        assert len(runs) > 5
        for run in runs:
            ((_, drafts),) = run.items()
            compare_drafts(oracle, text, states, drafts)
        text = [*text, 7 + turn, 9]
        other = other[::-1]
    assert len(set(lost)) == 2


def test_the_served_model_may_be_named_as_its_own_drafter(trained: str, drafting: Callable[..., LLM]) -> None:
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp"):
        llm = drafting(trained, 1, {"method": method, "model": trained, "draft_tensor_parallel_size": 1})
        assert llm.engine.core.facts.num_drafts == 1 and drafter_of(llm)
        llm.close()
    link = drafting(trained, 1, {"model": f"{trained}/../{Path(trained).name}"})
    assert drafter_of(link)


@pytest.mark.parametrize(("k", "least"), [(3, 2.2), *full_rows([(1, 1.5), (2, 1.9)])])
def test_steps_have_more_tokens_with_more_drafts(
    k: int, least: float, trained: str, drafting: Callable[..., LLM]
) -> None:
    """Greedy, of the model's own text; the second prompt reuses blocks of the first."""
    llm = drafting(trained, k)
    prompts = [LONG, f"{LONG} The", "Return the"]
    tokens = [
        llm.generate(prompt, params(COLD | {"max_tokens": 64}), use_tqdm=False)[0].outputs[0].token_ids
        for prompt in prompts
    ]
    assert sum(map(len, tokens)) / llm.engine.core._step > least


def test_the_number_falls_to_none_and_recovers(trained: str, drafting: Callable[..., LLM]) -> None:
    """All steps take a second, so only acceptance counts: of the layer, then of the token after its likeliest in the
    vocabulary, which is never right, then of the layer again."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 9, 3]]}
    llm = drafting(trained, "auto", table, max_model_len=512, async_depth=2)
    core, passes = llm.engine.core, drafter_of(llm)._pass
    logits, submit, trace = passes.logits, core.executor.submit, list[int]()
    core.scheduler.drafts._gain = MeasuredGain((1, 3, 7), clock=itertools.count(0.0).__next__)
    core.executor.submit = (
        lambda plan: (  # type: ignore[method-assign]
            trace.extend((plan.num_tokens[: plan.num_decodes] - 1).tolist()),
            submit(plan),
        )[1]
    )
    passes.logits = lambda state: logits(state).roll(  # type: ignore[method-assign]
        int(wrong.start <= len(trace) < wrong.stop), -1
    )
    wrong = range(20, 80)
    llm.generate(LONG, params(COLD | {"max_tokens": 270}), use_tqdm=False)
    fallen = trace.index(0, wrong.start)
    assert min(trace[5:20]) >= 1 and fallen <= 36, trace
    assert sum(trace[fallen:80]) <= 2 and max(trace[fallen:80]) == 1, "it tries with the shortest"
    assert len(trace) > 100 and trace[-20:].count(3) > 10, trace


def test_a_model_guesses_all_its_own_tokens(drafting: Callable[..., LLM]) -> None:
    """A draft model that is the model, after chunks, behind reused prefixes and after steps without drafts: of a
    request with noise, too, because drafts are drawn with the noise of their positions."""
    ranges = [[1, 1, 3], [2, 2, 1], [3, 9, 0]]
    given = {"method": "draft_model", "model": "quire-tiny", "num_speculative_tokens_per_batch_size": ranges}
    llm = drafting("", 3, given, max_num_batched_tokens=24)
    asked = [params(COLD | {"max_tokens": count}) for count in (10, 60, 30)]
    llm.generate([LONG, LONG + " The", "Return the"], asked, use_tqdm=False)
    llm.generate([LONG + " The", "Return"], [asked[0], params(WARM | {"max_tokens": 20})], use_tqdm=False)
    runs, drafts, *accepted = llm.engine.core.scheduler.drafts.totals
    assert drafts == sum(accepted) > 40 and accepted[2] > 8 and runs > accepted[1]


def test_drafts_under_a_grammar_are_the_host_s_and_the_cache_stays_whole(drafting: Callable[..., LLM]) -> None:
    """A draft model that is the model: the tokens that a grammar forces are all right, which its own guesses are not.
    Behind the blocks of that answer, which another request reuses, it guesses all its own tokens."""
    llm = drafting("", 3, {"method": "draft_model", "model": "quire-tiny"})
    forced = structured(regex="( The module provides a class, or a function){5}[a-z ]{9}")
    first = llm.generate(LONG, params(COLD | forced | {"max_tokens": 90}), use_tqdm=False)[0]
    made, *right = first.outputs[0].drafts
    assert made == sum(right) > 25 and first.outputs[0].finish_reason == "stop"
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    again = llm.generate(ids + [5], params(COLD | {"max_tokens": 40}), use_tqdm=False)[0]
    made, *right = again.outputs[0].drafts
    assert again.num_cached_tokens > len(first.prompt_token_ids) + 16 and made == sum(right) > 20


def test_a_draft_model_computes_texts_whose_kv_is_moved(drafting: Callable[..., LLM]) -> None:
    """With all tokens computed again the model's KV is that of the whole prompt, and so is the draft model's own."""
    llm = drafting("", 3, {"method": "draft_model", "model": "quire-tiny"}, enable_cache_blend=True, blend_ratio=1.0)
    llm.generate(LONG, params(COLD | {"max_tokens": 1}), use_tqdm=False)
    output = llm.generate(f"{PROSE} # # {LONG} # # Return", params(COLD | {"max_tokens": 40}), use_tqdm=False)[0]
    made, *right = output.outputs[0].drafts
    assert output.num_cached_tokens > 48 and made == sum(right) > 20


def test_synthetic_acceptance_is_what_was_asked_for(trained: str, drafting: Callable[..., LLM]) -> None:
    """Of drafts by a layer, whose entries are then made of other tokens' states."""
    llm = drafting(trained, 3, SYNTHETIC | {"synthetic_acceptance_length": 2.6})
    llm.generate([PROSE, LONG], params(COLD | {"max_tokens": 60}), use_tqdm=False)
    runs, made, *accepted = llm.engine.core.scheduler.drafts.totals
    assert runs > 30 and made >= 3 * runs - 6
    assert [share / runs for share in accepted] == pytest.approx([1, 0.6, 0], abs=0.06)


@pytest.mark.parametrize("depth", [2, *full_rows([1])])
def test_answers_with_a_draft_model_are_those_of_plain_decoding(
    depth: int, plain: Plain, trained: str, drafting: Callable[..., LLM]
) -> None:
    """A model of grouped-query attention drafts for one of latent attention: layers of two kinds in a page."""
    given = {"method": "draft_model", "model": "quire-tiny"}
    llm = drafting(trained, 2, given, async_depth=depth)
    place = slice(0, None, 4)
    check(answers(llm, REQUESTS, place), plain("mtp", "auto", (0, 4)), place)
    llm.engine.core.check()
    runs, drafts, *accepted = llm.engine.core.scheduler.drafts.totals
    assert 0.3 * drafts < sum(accepted) < 0.9 * drafts


def test_a_draft_model_that_cannot_draft_is_refused_in_a_line(tmp_path: Path) -> None:
    config = json.loads((Path(glm(tmp_path)) / "config.json").read_text())
    given = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="has 300 token ids and the model has 8192: use a draft model with") as caught:
        LLM(**OPTIONS, speculative_config=given)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8192, "max_position_embeddings": 300}))
    for asked, length in ((None, 4096), (384, 384)):
        words = f"draft model .* has a context of 300 tokens and the engine of {length}: lower max_model_len to 300"
        with pytest.raises(ConfigError, match=words):
            LLM(**OPTIONS | {"max_model_len": asked}, speculative_config=given)


REFUSED: list[tuple[str, Any, str]] = [
    ("moe", {"num_speculative_tokens": 16}, "=16 is out of range: give a whole number from 1 to 15"),
    ("moe", {"model": "a/draft"}, "method mtp drafts with the served model's own layers, and 'a/draft' is given"),
    ("moe", {"prompt_lookup_max": 3}, "prompt_lookup_max=3: method mtp looks no n-grams up"),
    ("dense", {}, "drafts with the multi-token-prediction (MTP) layer of the checkpoint, which has none"),
    ("lacking", {}, "layers.6.mlp.gate.weight: the checkpoint is incomplete, or not of this config.json; download it "
     "again. Without --speculative-config the layer that drafts is not needed."),
]  # fmt: skip


@pytest.mark.parametrize(("model", "given", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(
    model: str, given: dict[str, Any], words: str, trained: str, tmp_path: Path
) -> None:
    if model == "lacking":
        shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors.index.json").unlink()
        for file in tmp_path.glob("*.safetensors"):
            kept = {name: one for name, one in load_file(file).items() if name != "model.layers.6.mlp.gate.weight"}
            save_file(kept, file, {"format": "pt"})
    folder = {"moe": {"model": trained}, "lacking": {"model": str(tmp_path)}}.get(model, {})
    with pytest.raises((ConfigError, UnsupportedModel, WeightsError)) as caught:
        LLM(**OPTIONS, **folder, speculative_config={"method": "mtp", **given})
    assert words in str(caught.value) and "\n" not in str(caught.value)
