"""Texts reused at any position on several ranks: the same rows are kept, and tokens are those of one rank."""

import functools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire.config.bundled import bundled_model
from quire.contracts.request import NewRequest, ReusedParts
from quire.contracts.sampling import SamplerSpec
from quire.worker.blending import Blending, StepRows

from ...support import eagle
from ...support.full import full_rows
from ...support.prediction_layers import noisy, predicting
from ...support.simulated_engine import simulated
from ...support.tiny_models import VOCAB, Tiny, make_oracle, mixed_prompts

RANDOM = np.random.default_rng(3)
NOTES = [RANDOM.integers(0, VOCAB, count, dtype=np.uint32).tolist() for count in (40, 35, 50)]
BESIDE = [5, 7, 9] * 6  # a prompt without notes, whose answer is decoded beside the others
KINDS = [*("sliding_attention", "full_attention") * 2, "sliding_attention"]
LAYERS = (("num_hidden_layers", 4),)
MODELS = {
    "dense": Tiny(heads=(8, 4), changes=LAYERS),
    "one KV head": Tiny(heads=(8, 1), changes=LAYERS),
    "experts": Tiny(family="qwen3_moe", changes=LAYERS),
    "latents": Tiny(family="deepseek_v3", changes=LAYERS),
    "windows": Tiny(family="gpt_oss", changes=(("num_hidden_layers", 5), ("layer_types", KINDS))),
}
OPTIONS: dict[str, Any] = {
    "enable_cache_blend": True,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}


class Asked:
    """An engine of simulated ranks, and what it answers.

    tokens    handle -> tokens
    blended   handles of requests with notes in their prompts
    moved     tokens that these reused
    accepted  drafts that were right, of these
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.core, self.parts = simulated(folder, **OPTIONS | options)
        self.tokens: dict[int, list[int]] = {}
        self.moved, self.blended, self.accepted = 0, set[int](), 0

    def add(self, prompt: list[int], max_tokens: int, **more: Any) -> None:
        handle = len(self.tokens)
        self.tokens[handle] = []
        self.blended |= {handle} if "reused" in more else set()
        self.core.add(
            NewRequest(
                handle=handle,
                request_id=str(handle),
                token_ids=array("I", prompt).tobytes(),
                max_tokens=max_tokens,
                sampler=SamplerSpec(seed=0, num_prompt=len(prompt), temperature=0.0),
                **more,
            )
        )

    def step(self) -> None:
        outputs = self.core.step()
        assert all(one.error is None for one in outputs.finished), outputs.finished
        self.accepted += sum(sum(one.drafts[1:]) for one in outputs.finished if one.handle in self.blended)
        self.moved += sum(count for handle, count in outputs.cached.items() if handle in self.blended)
        for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
            self.tokens[handle].append(token)

    def drain(self) -> None:
        while self.core.has_work:
            self.step()
        self.core.check()


def prompt_of(*order: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    tokens, chunks = [9, 8, 7], []
    for note in order:
        chunks.append((len(tokens), len(tokens) + len(NOTES[note])))
        tokens = tokens + NOTES[note]
    return [*tokens, 1, 2, 3], tuple(chunks)


def answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ratio: float = 0.3, **options: Any
) -> tuple[list[list[int]], set[Any], int, int]:
    """Return the answers to prompts of notes, rows that were kept, the numbers of reused tokens and of right drafts."""
    kept, choose = set[Any](), Blending.choose

    def noted(self: Blending, rows: StepRows, deviations: Tensor, positions: Tensor) -> Tensor:
        found = choose(self, rows, deviations, positions)
        own = found[np.isin(found, rows.moved)]
        kept.add((tuple(positions[rows.moved].tolist()), tuple(positions[own].tolist())))
        return found

    replicas = options.get("dp", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Blending, "choose", noted)
        asked = Asked(folder, **options)
        try:
            for _ in range(replicas):  # the same notes for each: requests take turns
                for note in NOTES:
                    asked.add(note, 1)
                asked.drain()
            first = len(asked.tokens)
            for order in ((1, 2, 0), (2, 0, 1)) * replicas:
                prompt, chunks = prompt_of(*order)
                asked.add(BESIDE, 12)
                asked.step()
                asked.add(prompt, 8, reused=ReusedParts(chunks, ratio))
                asked.drain()
        finally:
            asked.core.shutdown()
    return [asked.tokens[handle] for handle in range(first, len(asked.tokens))], kept, asked.moved, asked.accepted


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    """Model -> its folder and the answers of one rank."""
    return {}


CASES = [
    ("dense", {"tp": 2}),
    ("latents", {"pp": 4}),
    ("dense", {"tp": 2, "pp": 2}),
    ("windows", {"tp": 2}),
    ("experts", {"dp": 2}),
    ("experts", {"dp": 2, "tp": 2, "experts": True}),
]
MORE = [
    ("one KV head", {"tp": 4}),
    ("latents", {"tp": 2}),
    ("dense", {"pp": 2}),
    ("experts", {"dp": 2, "experts": True}),
    ("experts", {"tp": 2, "experts": True}),
]


@pytest.mark.parametrize(("model", "sizes"), [*CASES, *full_rows(MORE)], ids=str)
def test_ranks_keep_the_rows_of_one_rank(
    model: str,
    sizes: dict[str, Any],
    one_rank: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if model not in one_rank:
        folder = make_oracle(MODELS[model], mixed_prompts()[:1], tmp_path_factory.mktemp, steps=1).folder
        one_rank[model] = folder, answers(folder, monkeypatch)
    folder, (expected, rows, moved, _) = one_rank[model]
    found, own_rows, own_moved, _ = answers(folder, monkeypatch, **sizes)
    replicas = sizes.get("dp", 1)
    assert (found, own_rows, own_moved) == (expected * replicas, rows, moved * replicas)
    assert moved == 2 * (40 + 32 + 48) and len(rows) == 2


FAMILIES = ["gemma3_text"]
MORE_FAMILIES = ["llama4_text", "gemma4_text", "gemma4_inputs", "cohere2", "exaone4", "ministral", "gpt_oss"]


@pytest.mark.parametrize("family", [*FAMILIES, *full_rows(MORE_FAMILIES)])
def test_families_with_windows_and_several_rotations(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all moved tokens computed again, answers are those of an engine that reuses prefixes alone."""
    folder = make_oracle(Tiny(family=family), mixed_prompts()[:1], tmp_path_factory.mktemp, steps=1).folder
    expected, none, prefixes, _ = answers(folder, monkeypatch, enable_cache_blend=False)
    found, rows, moved, _ = answers(folder, monkeypatch, 1.0)
    assert found == expected and not none and len(rows) == 2
    assert moved - prefixes == 2 * (40 + 32 + 48 - 8 * (family == "gemma4_inputs")), "some of its blocks are larger"


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Makes a model that drafts. Returns its folder and the options of drafts. A random EAGLE head is always wrong."""

    @functools.cache
    def make(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(kind)
        if not kind.startswith("eagle"):
            exact = predicting(folder, kind, bundled_model(), 0.04)
            noisily = noisy(exact, folder / "noisy")  # else entries depend on tokens alone
            return noisily, {"method": "mtp", "num_speculative_tokens": 2}
        target = eagle.model(folder, bundled_model(), 0.04)
        head = eagle.write(tmp_path_factory.mktemp("head"), kind, eagle.tensors(kind, eagle.VOCAB, 0))
        return target, {"method": kind, "model": str(head), "num_speculative_tokens": 2}

    return make


DRAFTS: list[tuple[str, dict[str, Any]]] = [("glm4_moe", {}), ("eagle3", {})]
MORE_DRAFTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("glm4_moe", {"tp": 2}),
    ("glm4_moe", {"pp": 2}),
    ("deepseek_v3", {}),
    ("glm4_moe", {"dp": 2, "experts": True}),
]


@pytest.mark.parametrize(("kind", "sizes"), [*DRAFTS, *full_rows(MORE_DRAFTS)], ids=str)
def test_layers_draft_beside_moved_tokens(
    kind: str,
    sizes: dict[str, Any],
    drafting: Callable[[str], tuple[Path, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are those of one rank without drafts. As many drafts are right as when all tokens are computed.

    Of tokens without a state before them the drafter's values are those of the text, of all others they are its own.
    """
    done, seen = Blending.layers_done, list[bool]()

    def noted(self: Blending, *args: Any) -> None:
        moved = self._moved
        done(self, *args)
        if moved is None or not self._drafts:
            return
        values = self._sides[-1].v
        source, target = moved.rows.sources[-1], moved.targets[-1]
        old, new = (values[slots // 8, :, slots % 8] for slots in (source, target))
        own = np.isin(moved.rows.moved - 1, moved.kept)
        seen.extend((old == new).flatten(1).all(1).numpy() != own)
        assert own.any() and not own.all()

    folder, drafts = drafting(kind)
    expected, rows, moved, _ = answers(folder, monkeypatch)
    monkeypatch.setattr(Blending, "layers_done", noted)
    found, own_rows, own_moved, right = answers(folder, monkeypatch, speculative_config=drafts, **sizes)
    monkeypatch.setattr(Blending, "layers_done", done)
    replicas = sizes.get("dp", 1)
    assert (found, own_rows, own_moved) == (expected * replicas, rows, moved * replicas)
    assert len(seen) == moved * replicas * sizes.get("tp", 1) and all(seen)
    *_, most = answers(folder, monkeypatch, 1.0, speculative_config=drafts)
    assert right == most * replicas and bool(most) == (drafts["method"] == "mtp")
