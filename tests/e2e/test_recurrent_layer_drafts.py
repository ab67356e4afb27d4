"""Drafts by layers behind recurrent layers: logits are those of the formulas, texts those of plain decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.errors import ConfigError

from ..support import qwen_prediction as qwen
from ..support.drafters import KnownAnswers
from ..support.features import drafter_of, set_drafter
from ..support.full import full_rows, only_full
from ..support.tiny_models import VOCAB, Oracle, Tiny

DRAFTS, EVERY, LONGEST = 3, 16, 120
MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}
# Decodes take checkpoints often, and engines have room for some, however few blocks they have.
STATES = {"state_checkpoint": f"prompt,branch,turn,every={EVERY}", "state_memory_fraction": 0.99}
BATCH: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4} | STATES
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", {}),
    ("qwen3_5_text", {"around": "qwen3_5", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}),
    ("qwen3_5_moe_text", {"stacked": True}),
    *full_rows(
        [("qwen3_next", {"stacked": True}), ("qwen3_5_text", {}), ("qwen3_5_moe_text", {"around": "qwen3_5_moe"})]
    ),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, qwen.Formula]]:
    """Writes a checkpoint with an MTP layer. Returns its folder and the formula."""

    def write(family: str, **form: Any) -> tuple[Path, qwen.Formula]:
        model = qwen.with_layer(family)
        own = qwen.own_tensors(model)
        return qwen.write(model, own, tmp_path_factory.mktemp(family), **form), qwen.Formula(model, own)

    return write


def first_drafts(llm: LLM) -> list[tuple[int, torch.Tensor]]:
    """Collect (position, logits) of the first draft of each run."""
    drafter, found, passes = drafter_of(llm.engine.worker), list[tuple[int, torch.Tensor]](), [0]
    draft = drafter.draft

    def drafted(*given: Any) -> None:
        passes[0] = 0
        draft(*given)

    def seen(slots: torch.Tensor, places: torch.Tensor, logits: torch.Tensor) -> None:
        passes[0] += 1
        found.extend(zip(places.tolist(), logits.clone(), strict=True) if passes[0] == 1 else ())

    drafter.draft, drafter.on_logits = drafted, seen
    return found


def params(count: int, seed: int = 0, **more: Any) -> SamplingParams:
    given = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | more
    return SamplingParams(max_tokens=count, seed=seed, **given)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_logits_of_drafts_are_those_of_the_formula(
    family: str, form: dict[str, Any], written: Callable[..., tuple[Path, qwen.Formula]], engine: Callable[..., LLM]
) -> None:
    """After chunks, after runs of which some or no drafts were accepted, and after steps without drafts."""
    folder, formula = written(family, **form)
    alone = {"num_speculative_tokens_per_batch_size": [[1, 1, DRAFTS], [2, 9, 0]]}
    options = BATCH | {"max_num_batched_tokens": 12, "enable_prefix_caching": False}
    llm = engine(folder, speculative_config=MTP | alone, **options)
    runs, drafter = list[list[tuple[int, torch.Tensor]]](), drafter_of(llm.engine.worker)
    draft, keep = drafter.draft, drafter.keep  # a step without drafts makes no pass
    drafter.draft = lambda *given: (runs.append([]), draft(*given))
    drafter.keep = lambda *given: (runs.append([]), keep(*given))
    drafter.on_logits = lambda slots, places, logits: runs[-1].extend(zip(places.tolist(), logits.clone(), strict=True))
    prompts = [[(7 * i * i + 3) % VOCAB for i in range(29)], [5, 9, 14]]
    output = llm.generate(prompts, [params(40), params(12)], use_tqdm=False)[0]
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    states, made = formula.states(text), [run for run in runs if run]
    assert text[len(prompts[0]) :] == formula.greedy(text, len(prompts[0])), "drafts change no answer"
    for run in made:
        first = run[0][0]
        expected = formula.drafts(text[:first], states[:first], len(run))
        torch.testing.assert_close(torch.stack([logits for _, logits in run]), expected, atol=1e-4, rtol=1e-4)
    assert len(made) > 5 and made[-1][-1][0] > 60 and len(runs) - len(made) > 8, "with and without drafts"


@dataclass(frozen=True)
class Drafted:
    """A model with recurrent layers and its drafter.

    expected   returns the logits of the first draft behind each prefix of a text
    lost       True: of a request that goes on behind a reused prefix, one entry of the drafter is unknown
    """

    folder: Path
    config: dict[str, Any]
    expected: Callable[[list[int]], torch.Tensor]
    lost: bool = False


@pytest.fixture(scope="module")
def drafted(
    written: Callable[..., tuple[Path, qwen.Formula]], oracle: Callable[..., Oracle], tiny: type[Tiny]
) -> Callable[[str], Drafted]:
    """Makes a model and its drafter: an MTP layer ("mtp"), n-grams ("ngram"), or a draft model of a family."""

    def make(drafter: str) -> Drafted:
        if drafter == "mtp":
            folder, formula = written("qwen3_5_text")
            return Drafted(folder, MTP, formula.first, lost=True)
        target = oracle(tiny(family="qwen3_5_text"))
        if drafter == "ngram":
            config = {"method": "ngram", "num_speculative_tokens": DRAFTS}
            return Drafted(target.folder, config, lambda text: torch.from_numpy(target.logits(text)))
        draft = oracle(tiny(family=drafter))
        config = {"method": "draft_model", "model": str(draft.folder), "num_speculative_tokens": DRAFTS}
        return Drafted(target.folder, config, lambda text: torch.from_numpy(draft.logits(text)))

    return make


DRAFTS_OF = ["qwen3_next", "qwen3_5_moe_text", "lfm2", "granite_mamba", "nemotron_h", "falcon_h1"]  # with --full
SHARES = {0.0: (0, 0), 0.53: (0.2, 0.45), 0.95: (0.8, 0.96), 1.0: (0.97, 1)}  # chance of a draft -> accepted drafts
ROWS = [  # drafter, chance that a draft is right, steps in flight, tokens of a step, blocks
    ("mtp", 0.0, 2, 16, None),
    ("mtp", 0.53, 1, 16, 26),
    ("mtp", 0.95, 2, 2048, 26),
    ("qwen3", 0.53, 2, 16, 26),
    ("qwen3", 1.0, 1, 16, None),
    ("qwen3_next", 0.53, 2, 16, 26),
    ("qwen3_next", 0.95, 1, 2048, None),
    ("qwen3_next", 1.0, 2, 16, 26),
    *full_rows([("mtp", 1.0, 2, 16, None), ("qwen3", 0.0, 2, 16, 26), ("qwen3", 0.95, 2, 2048, 26)]),
]


@pytest.mark.parametrize(("drafter", "right", "depth", "budget", "blocks"), ROWS)
def test_texts_at_shares_of_accepted_drafts(
    drafter: str,
    right: float,
    depth: int,
    budget: int,
    blocks: int | None,
    drafted: Callable[[str], Drafted],
    engine: Callable[..., LLM],
    prompts: list[list[int]],
) -> None:
    """Drafts are told, and the drafter beside keeps its cache. Turns go on at checkpoints that decodes made, and with
    few blocks requests are preempted. Texts are those of plain decoding, and the drafter's first drafts its own."""
    made = drafted(drafter)
    plain, known = engine(made.folder, enable_prefix_caching=False, **BATCH), dict[int, list[int]]()
    more: dict[str, Any] = {"num_gpu_blocks_override": blocks, "max_model_len": 104} if blocks else {}
    more |= {"async_depth": depth, "max_num_batched_tokens": budget}
    llm = engine(made.folder, speculative_config=made.config, **BATCH | more)
    runner, first = llm.engine.worker, first_drafts(llm)
    set_drafter(runner, KnownAnswers(known, runner.sampler.table.rows, right, VOCAB, drafter_of(runner)))
    texts = [[*prompts[i % len(prompts)][:30], i + 1] for i in range(6)]
    for turn in range(3):
        asked = [params(21, i) for i in range(len(texts))]
        wanted = [one.outputs[0].token_ids for one in plain.generate(texts, asked, use_tqdm=False)]
        known.update({i: [*text, *new] for i, (text, new) in enumerate(zip(texts, wanted, strict=True))})
        first.clear()
        found = llm.generate(texts, asked, use_tqdm=False)
        llm.engine.core.check()
        assert [one.outputs[0].token_ids for one in found] == wanted, f"turn {turn}"
        if not turn or not made.lost:
            compare_first(made, list(known.values()), first)
        texts = [[*known[i], 5 + i, 6 + turn] for i in range(len(texts))]
    scheduler, (least, most) = llm.engine.core.scheduler, SHARES[right]
    _, drafts, *accepted = scheduler.drafts.totals
    assert least <= sum(accepted) / drafts <= most
    assert (scheduler.num_preempted > 0) == (blocks is not None)
    assert scheduler.allocator.states.hits > 0, "a resumed request, or a turn, goes on at a checkpoint"


def compare_first(made: Drafted, texts: list[list[int]], found: list[tuple[int, torch.Tensor]]) -> None:
    """Each first draft is that of a text. Of requests that were resumed behind a cached prefix, an entry may differ."""
    expected = [made.expected(text) for text in texts]
    close = [
        any(end <= len(own) and torch.allclose(logits, own[end - 1], atol=1e-4, rtol=1e-4) for own in expected)
        for end, logits in found
    ]
    assert len(close) > 24 and sum(close) > (0.8 if made.lost else 0.999) * len(close), f"{sum(close)} of {len(close)}"


@pytest.mark.parametrize("family", ["qwen3_next", *full_rows(["qwen3_5_text", "qwen3_5_moe_text"])])
def test_a_layer_is_skipped_without_drafts(
    family: str, written: Callable[..., tuple[Path, qwen.Formula]], engine: Callable[..., LLM]
) -> None:
    folder, formula = written(family)
    llm = engine(folder, **BATCH)
    assert any("MTP) layers are skipped (mtp.* of the checkpoint)" in note for note in llm.engine.notes)
    text = [5, 9, 14, *llm.generate([[5, 9, 14]], params(20), use_tqdm=False)[0].outputs[0].token_ids]
    assert formula.greedy(text, 3) == text[3:]


def test_a_checkpoint_that_lost_the_layer_is_told(
    written: Callable[..., tuple[Path, qwen.Formula]], tmp_path: Path
) -> None:
    """As tools write it that leave out what they do not know."""
    model = qwen.with_layer("qwen3_5_text")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has none .*or no tensors mtp\.layers\.\* are stored"):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, speculative_config=MTP)
    folder, _ = written("qwen3_5_text", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ConfigError, match="has an embedding of its own"):
        LLM(str(folder), dtype="float32", skip_tokenizer_init=True, speculative_config=MTP)


@pytest.mark.parametrize("family", ["qwen3_5_text", *full_rows(DRAFTS_OF)])
def test_a_model_guesses_all_its_own_tokens(
    family: str, oracle: Callable[..., Oracle], tiny: type[Tiny], engine: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    """A draft model that is the model, after chunks, behind checkpoints of prompts and decodes, after steps without
    drafts and beside requests with fewer drafts; with noise, too."""
    folder, ranges = oracle(tiny(family=family)).folder, [[1, 2, DRAFTS], [3, 3, 1], [4, 9, 0]]
    given = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": DRAFTS}
    given |= {"num_speculative_tokens_per_batch_size": ranges}
    llm = engine(folder, speculative_config=given, max_num_batched_tokens=16, **BATCH)
    texts = [*prompts[3:], prompts[6][:40]]
    for turn in range(3):
        asked = [params(12 + 7 * i, i, temperature=float(i == 1), speculative_tokens=3 - i % 2) for i in range(5)]
        outputs = llm.generate(texts, asked, use_tqdm=False)
        texts = [[*one, *output.outputs[0].token_ids, 5 + turn] for one, output in zip(texts, outputs, strict=True)]
    runs, drafts, *accepted = llm.engine.core.scheduler.drafts.totals
    assert drafts == sum(accepted) > 100 and accepted[2] > 10 and runs > accepted[1]
    assert llm.engine.core.scheduler.allocator.states.hits > 100


NUMBER = 1000


def many_texts(known: dict[int, list[int]]) -> dict[int, list[int]]:
    """The prompts of the first half of NUMBER requests, which share beginnings, then those of the other half: turns of
    conversations whose first turns are `known`, and prompts with the same beginnings."""
    random = np.random.default_rng(len(known))
    starts = [[int(one) for one in np.random.default_rng(i).integers(1, VOCAB, 8 + i % 41)] for i in range(60)]
    found = dict[int, list[int]]()
    for i in range(len(known), len(known) + NUMBER // 2):
        tail = [int(one) for one in random.integers(1, VOCAB, 1 + i % 13)]
        found[i] = [*(known[i // 2] if known and i % 2 else starts[i // 6 % 60]), *tail]
    return found


@only_full
@pytest.mark.parametrize("right", [0.0, 0.53, 0.95])
@pytest.mark.parametrize("drafter", ["ngram", "mtp", "qwen3", "qwen3_next"])
def test_a_thousand_requests(
    drafter: str, right: float, drafted: Callable[[str], Drafted], engine: Callable[..., LLM]
) -> None:
    """With the prefix cache, chunks and preemption: texts at 0, 30 and 90% of accepted drafts are plain decoding's."""
    made, known = drafted(drafter), dict[int, list[int]]()
    plain = engine(made.folder, enable_prefix_caching=False, **BATCH)
    small = {"num_gpu_blocks_override": 36, "max_model_len": 128, "max_num_batched_tokens": 24, "async_depth": 2}
    llm = engine(made.folder, speculative_config=made.config, **BATCH | small | {"max_num_seqs": 6})
    runner = llm.engine.worker
    inner = None if drafter == "ngram" else drafter_of(runner)
    texts = dict[int, list[int]]()
    set_drafter(runner, KnownAnswers(texts, runner.sampler.table.rows, right, VOCAB, inner))
    for _ in range(2):
        prompts = many_texts(known)
        asked = [params(4 + i % 29, i) for i in prompts]
        wanted = [one.outputs[0].token_ids for one in plain.generate([*prompts.values()], asked, use_tqdm=False)]
        known |= {i: [*one, *new] for (i, one), new in zip(prompts.items(), wanted, strict=True)}
        texts |= known
        found = llm.generate([*prompts.values()], asked, use_tqdm=False)
        llm.engine.core.check()
        wrong = [i for i, one, new in zip(prompts, found, wanted, strict=True) if one.outputs[0].token_ids != new]
        assert not wrong, f"{len(wrong)} texts differ, first {wrong[:5]}"
    scheduler, (least, most) = llm.engine.core.scheduler, SHARES[right]
    _, drafts, *accepted = scheduler.drafts.totals
    hits = scheduler.allocator.states.hits
    print(f"{drafter} {right}: {sum(accepted)} of {drafts} drafts, {scheduler.num_preempted} preempted, {hits} hit")
    assert len(known) == NUMBER and least <= sum(accepted) / drafts <= most
    assert scheduler.num_preempted > 20 and hits > 1000
