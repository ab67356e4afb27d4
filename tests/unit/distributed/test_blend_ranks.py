"""Texts reused at any position on several ranks: the same rows are kept, and tokens are those of one rank."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.worker.blending import Blending, StepRows

from ...support.full import full_rows
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
}


class Asked:
    """An engine of simulated ranks, and what it answers.

    tokens    handle -> tokens
    blended   handles of requests with notes in their prompts
    moved     tokens that these reused
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.core, self.parts = simulated(folder, **OPTIONS | options)
        self.tokens: dict[int, list[int]] = {}
        self.moved, self.blended = 0, set[int]()

    def add(self, prompt: list[int], max_tokens: int, **more: Any) -> None:
        handle = len(self.tokens)
        self.tokens[handle] = []
        self.blended |= {handle} if "chunks" in more else set()
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
) -> tuple[list[list[int]], set[Any], int]:
    """Return the answers to prompts of notes, the rows that were kept and the number of tokens that were reused."""
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
                asked.add(prompt, 8, chunks=chunks, blend_ratio=ratio)
                asked.drain()
        finally:
            asked.core.shutdown()
    return [asked.tokens[handle] for handle in range(first, len(asked.tokens))], kept, asked.moved


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
    folder, (expected, rows, moved) = one_rank[model]
    found, own_rows, own_moved = answers(folder, monkeypatch, **sizes)
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
    expected, none, prefixes = answers(folder, monkeypatch, enable_cache_blend=False)
    found, rows, moved = answers(folder, monkeypatch, 1.0)
    assert found == expected and not none and len(rows) == 2
    assert moved - prefixes == 2 * (40 + 32 + 48 - 8 * (family == "gemma4_inputs")), "some of its blocks are larger"
