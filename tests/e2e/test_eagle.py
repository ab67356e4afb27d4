"""Drafts by EAGLE heads: logits are those of the formulas, answers plain decoding's, for both published forms."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.errors import ConfigError, UserError, WeightsError

from ..support import eagle
from ..support.full import full_rows, only_full
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from .plain_decoding import (
    COLD,
    LONG,
    OPTIONS,
    REQUESTS,
    WARM,
    Truth,
    answers,
    bundled_truth,
    check,
    params,
    undrafted,
)
from .test_prediction import drafter_of

HEADS = [
    ("eagle", {}),
    ("eagle3", {}),
    ("eagle3", {"library": True}),
    ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}, "norm_before_residual": True}),
    ("eagle3", {"norm_before_residual": False, "known": eagle.VOCAB}),
    ("eagle3", {"norms": "joined", "norm_output": True, "library": True, "family": "gpt_oss"}),
    ("eagle", {"family": "qwen3_5_text"}),
    ("eagle3", {"family": "qwen3_5_text"}),
    ("eagle3", {"norms": "each", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [6, 1, 4]}, "family": "mistral"}),
    *full_rows(
        (kind, {"family": family})
        for family in ("lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1")
        for kind in ("eagle", "eagle3")
    ),
]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model of a family whose next token most often depends on its last token alone."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = eagle.model(tmp_path_factory.mktemp(family), bundled_model(), 0.04, family)
        return made[family]

    return make


@pytest.fixture
def target(targets: Callable[[str], Path]) -> Path:
    """Such a model of Llama's family."""
    return targets("llama")


@pytest.fixture
def drafting(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines that draft with a head of these tensors."""
    made: list[LLM] = []

    def make(
        target: Path, kind: str, own: dict[str, Tensor], keys: Any = None, more: Any = None, **options: Any
    ) -> LLM:
        head = eagle.write(tmp_path / f"head{len(made)}", kind, own, **(keys or {}))
        given = {"method": kind, "model": str(head), "num_speculative_tokens": 3} | (more or {})
        made.append(LLM(str(target), **OPTIONS | options, speculative_config=given))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize(("kind", "keys"), HEADS)
def test_logits_of_drafts_are_those_of_the_formula(
    kind: str, keys: dict[str, Any], targets: Callable[[str], Path], drafting: Callable[..., LLM]
) -> None:
    """After chunks, after runs of which all, some or no drafts were accepted, and after steps without drafts."""
    keys = dict(keys)
    target, norms = targets(keys.pop("family", "llama")), keys.pop("norms", "")
    own = eagle.tensors(kind, keys.pop("known", eagle.KNOWN), 1, norms)
    keys |= {"joined": {"norm_before_fc": True}, "each": {"fc_norm": True}}.get(norms, {})
    alone = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}
    llm = drafting(target, kind, own, keys, alone, max_num_batched_tokens=12, enable_prefix_caching=False)
    runs, drafter = list[list[tuple[int, Tensor]]](), drafter_of(llm)
    draft, keep = drafter.draft, drafter.keep  # a step without drafts makes no pass
    drafter_of(llm).draft = lambda *given: (runs.append([]), draft(*given))  # type: ignore
    drafter_of(llm).keep = lambda *given: (runs.append([]), keep(*given))  # type: ignore
    drafter.on_logits = lambda slots, places, logits: runs[-1].extend(zip(places.tolist(), logits.clone(), strict=True))
    prompts = [[(7 * i * i + 3) % 300 for i in range(29)], [5, 9, 14]]
    asked = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False) for count in (30, 12)]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    text = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
    layers = tuple(keys.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", (2, 3, 3)))
    residual = keys.get("norm_before_residual", "library" in keys)
    oracle = eagle.Oracle(target, kind, own, layers, residual, keys.get("norm_output", False))
    greedy = oracle.model(torch.tensor([text])).logits[0].argmax(-1)[28:-1].tolist()
    assert text[29:] == greedy, "drafts change no answer"
    states, made = oracle.states(text), [run for run in runs if run]
    for run in made:
        first = run[0][0]
        expected = oracle.drafts(text[:first], states[:first], len(run))
        torch.testing.assert_close(torch.stack([logits for _, logits in run]), expected, atol=1e-4, rtol=1e-4)
    assert len(made) > 5 and made[-1][-1][0] > 50 and len(runs) - len(made) > 8, "with and without drafts"


@pytest.mark.parametrize(
    ("kind", "family"),
    [("eagle", "llama"), ("eagle3", "llama"), ("eagle", "gpt_oss"), ("eagle3", "mistral"), ("eagle3", "qwen3_5_text")],
)
def test_a_head_that_knows_the_model_is_always_right(kind: str, family: str, tmp_path: Path) -> None:
    """After chunks, behind reused prefixes and after steps without drafts; EAGLE-3 with noise, too."""
    target = eagle.model(tmp_path / "target", bundled_model(), 0.0, family)
    head = eagle.write(tmp_path / "head", kind, eagle.knowing(kind, target))
    ranges = [[1, 1, 3], [2, 2, 1], [3, 9, 0]]
    given = {
        "method": kind,
        "model": str(head),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": ranges,
    }
    with LLM(str(target), **OPTIONS, max_num_batched_tokens=24, speculative_config=given) as llm:
        drafter_of(llm).states.fill_(float("nan"))  # a former request may leave such states
        asked = [params(COLD | {"max_tokens": count}) for count in (10, 60, 30)]
        llm.generate([LONG, LONG + " The", "Return the"], asked, use_tqdm=False)
        warm = params((WARM if kind == "eagle3" else COLD) | {"max_tokens": 20})
        outputs = llm.generate([LONG + " The", "Return"], [asked[0], warm], use_tqdm=False)
        runs, drafts, *accepted = llm.engine.core.scheduler.drafts.totals
    assert drafts == sum(accepted) > 40 and accepted[2] > 8 and runs > accepted[1] and outputs[0].num_cached_tokens > 30


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Plain decoding of the bundled model."""
    return bundled_truth()


@pytest.mark.parametrize(
    ("kind", "depth", "every", "stages"),
    [
        ("eagle3", 2, 3, 1),
        *full_rows([("eagle3", 2, 1, 1), ("eagle", 1, 1, 1), ("eagle", 2, 1, 1), ("eagle3", 1, 1, 1)]),
        *full_rows([("eagle", 2, 3, 2), ("eagle3", 2, 3, 2), ("eagle3", 1, 3, 3)]),
    ],
)
def test_answers_are_those_of_plain_decoding(
    kind: str, depth: int, every: int, stages: int, truth: Truth, tmp_path: Path
) -> None:
    """In a pipeline the head on the last stage reads states that other stages keep and send on."""
    own, keys = eagle.fitted(kind, bundled_model(), [text for text in truth.texts.values() if len(text) > 8])
    given = {"method": kind, "model": str(eagle.write(tmp_path, kind, own, **keys)), "num_speculative_tokens": 2}
    llm = LLM(
        **OPTIONS,
        async_depth=depth,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=24,
        speculative_config=given,
        pipeline_parallel_size=stages,
    )
    place = slice(0, None, every)
    check(answers(llm, REQUESTS, place), truth.answers[place], place)
    core = llm.engine.core
    core.check()
    runs, drafts, *accepted = core.scheduler.drafts.totals
    llm.close()
    assert runs > 50 and accepted == sorted(accepted, reverse=True) and core.scheduler.num_preempted > 0
    assert 0.2 * drafts <= sum(accepted) <= 0.9 * drafts, "a run of a drafter that guesses right and wrong"


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("awq", "eagle"),
        *full_rows([("fp8-block", "eagle3"), ("fp8-tensor", "eagle"), ("awq", "eagle3"), ("gptq", "eagle3")]),
    ],
)
def test_a_head_drafts_for_a_quantized_model(form: str, kind: str, truth: Truth, tmp_path: Path) -> None:
    """Its states are those of the quantized layers; the head itself is not quantized."""
    folder, place = tmp_path / "target", slice(1, None, 3)
    quantize_checkpoint(bundled_model(), folder, FORMS[form])
    own, keys = eagle.fitted(kind, bundled_model(), [text for text in truth.texts.values() if len(text) > 8])
    given = {
        "method": kind,
        "model": str(eagle.write(tmp_path / "head", kind, own, **keys)),
        "num_speculative_tokens": 2,
    }
    options = OPTIONS | {"tokenizer": str(bundled_model())}
    with (
        LLM(str(folder), **options) as plain,
        LLM(str(folder), **options, async_depth=2, speculative_config=given) as llm,
    ):
        found, expected = answers(llm, REQUESTS, place), answers(plain, undrafted(), place)
        runs, drafts, *accepted = llm.engine.core.scheduler.drafts.totals
    assert runs > 50 and 0.1 * drafts <= sum(accepted) <= 0.9 * drafts
    if form == "awq" or form == "gptq":
        check(found, expected, place)
    else:  # activations of 8 bits make steps of last bits: there one text may be another
        assert sum(one[:2] != other[:2] for one, other in zip(found, expected, strict=True)) <= 1


def test_a_speculators_repository_is_served_with_its_model(tmp_path: Path) -> None:
    target = eagle.model(tmp_path / "target", bundled_model(), 0.0, "qwen3")
    own = eagle.knowing("eagle3", target, eagle.KNOWN)
    head = eagle.write(tmp_path / "head", "eagle3", own, library=True, verifier=str(target), norm_before_residual=False)
    with LLM(str(head), **OPTIONS | {"max_model_len": 2100}) as llm:
        assert any("trained for 2048 positions, and the engine has 2100" in note for note in llm.engine.notes)
        output = llm.generate(LONG, params(COLD), use_tqdm=False)[0].outputs[0]
        assert str(llm.engine.folder) == str(target) and llm.engine.core.facts.num_drafts == 3
        assert output.drafts[0] > 20
        plan = json.loads(llm.engine.core.facts.plans["engine"])
    assert plan["speculation"]["drafter"] == f"eagle3 {head}, 3 drafts per request"
    assert plan["speculation"]["weights"] > 900_000 and plan["speculation"]["cache"] == 512
    assert plan["memory"]["draft_layers"] == 1 and plan["memory"]["draft_components"][0][1:3] == [2, 32]
    (head / "config.json").write_text(
        json.dumps(
            json.loads((head / "config.json").read_text())
            | {"speculators_config": {"verifier": {"name_or_path": str(target)}}}
        )
    )
    with pytest.raises(ConfigError, match="names no verifier or no speculative_tokens: serve the model of the head"):
        LLM(str(head), **OPTIONS)


@only_full
@pytest.mark.parametrize(("kind", "known"), [("eagle", 0), ("eagle3", eagle.VOCAB), ("eagle3", eagle.KNOWN)])
def test_ranks_draft_alike(kind: str, known: int, tmp_path: Path) -> None:
    """Each rank has its heads of the head's attention, and its part of both vocabularies."""
    target = eagle.model(tmp_path / "target", bundled_model(), 0.0)
    head = eagle.write(tmp_path / "head", kind, eagle.knowing(kind, target, known))
    given, found = DRAFT | {"method": kind, "model": str(head)}, list[Any]()
    for size in (1, 2):
        with LLM(str(target), **OPTIONS, tensor_parallel_size=size, speculative_config=given) as llm:
            outputs = llm.generate([LONG, "Return"], [params(COLD), params(WARM)], use_tqdm=False)
            found.append([(output.outputs[0].token_ids, output.outputs[0].drafts) for output in outputs])
    assert found[0] == found[1] and sum(found[0][0][1][1:]) > 10


DRAFT = {"num_speculative_tokens": 2}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({}, {"method": "eagle"}, {}, "this is a head of method eagle3, which drafts for another model: serve that model"),
    ({}, {"method": "draft_model"}, {}, "this is a head of method eagle3"),
    ({}, {"method": "eagle3", "model": None}, {}, "method eagle3 needs a model: give the key model"),
    ({}, {}, {"max_model_len": 8192}, "max_model_len=8192 exceeds the model's context of 4096"),
    ({"vocab_size": 9000}, {}, {}, "has 9000 token ids and the model has 8192: use a draft model with the model's"),
    ({"hidden_size": 128, "head_dim": 64}, {}, {}, "reads states of 128 numbers and the model's have 64: use the head"),
    ({"target_hidden_size": 32}, {}, {}, "target_hidden_size=32 of an EAGLE head is not implemented: use one with 64"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, {}, {}, "reads the states before layer 7, and the model has the"),
    ({"eagle_aux_hidden_state_layer_ids": "all"}, {}, {}, "must be a list of at most 16 layer numbers"),
    ({"norm_before_fc": True, "fc_norm": True}, {}, {}, "norm_before_fc and fc_norm exclude each other"),
    ({"num_hidden_layers": 2}, {}, {}, "num_hidden_layers=2 of an EAGLE head is not implemented: use one with 1"),
    ({"model_type": "qwen3"}, {}, {}, "model_type='qwen3' of an EAGLE head is not implemented: use one with"),
    ({"norm_before_fc": True}, {}, {}, "lacks input_norm.weight"),
    ({"layernorms": True}, {}, {}, "layernorms=True of an EAGLE head is not implemented"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, {}, {}, "use_aux_hidden_state=False of an EAGLE head"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, {}, "head with rope type dynamic is not implemented"),
    ({"sliding_window": 4096}, {}, {}, "sliding_window=4096 is not implemented for this family"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "given", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(
    keys: dict[str, Any], given: dict[str, Any], options: dict[str, Any], words: str, target: Path, tmp_path: Path
) -> None:
    head = eagle.write(tmp_path, "eagle3", eagle.tensors("eagle3", eagle.KNOWN, 0), **keys)
    given = DRAFT | {"method": "eagle3", "model": str(head)} | given
    with pytest.raises(UserError) as caught:
        LLM(str(target), **OPTIONS | options, speculative_config=given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lost", "words"),
    [("d2t", "lacks d2t"), ("lm_head.weight", "lacks lm_head.weight"), ("fc.weight", "lacks fc.weight")],
)
def test_a_head_without_all_its_tensors_is_refused_in_a_line(
    lost: str, words: str, target: Path, tmp_path: Path
) -> None:
    own = eagle.tensors("eagle3", eagle.KNOWN, 0)
    del own[lost]
    given = DRAFT | {"method": "eagle3", "model": str(eagle.write(tmp_path, "eagle3", own))}
    with pytest.raises(WeightsError, match=words) as caught:
        LLM(str(target), **OPTIONS, speculative_config=given)
    assert "\n" not in str(caught.value)


def test_a_map_to_ids_that_the_model_lacks_and_pickles_are_refused(target: Path, tmp_path: Path) -> None:
    own = eagle.tensors("eagle3", eagle.KNOWN, 0)
    own["d2t"] += 9000
    given = DRAFT | {"method": "eagle3", "model": str(eagle.write(tmp_path, "eagle3", own))}
    with pytest.raises(WeightsError, match="d2t of the EAGLE head maps to ids outside of the 8192 of the model"):
        LLM(str(target), **OPTIONS, speculative_config=given)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="of an EAGLE head, safetensors.torch.save_file"):
        LLM(str(target), **OPTIONS, speculative_config=given)
