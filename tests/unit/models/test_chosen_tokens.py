"""Sparse latent attention of tiny random models beside transformers: tokens that each layer chooses, and logits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quire.layers.stack import Model

from .test_against_transformers import load, ragged, run_paged, write_checkpoint

CLOSE = 1e-6  # relative difference of scores below which either token may be chosen
TOP_K = 8
# By family: changes of the tiny model. GLM-5.2 shares indexers: all layers, by a schedule, by a pattern.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", {"indexer_types": ["full", "full", "full"]}),
    "glm-shared": ("glm_moe_dsa", {"num_hidden_layers": 5, "indexer_types": ["full", "shared"] * 2 + ["shared"]}),
    "glm-schedule": (
        "glm_moe_dsa",
        {"num_hidden_layers": 5, "indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ),
}


class Scored:
    """Scores [T, T] of the last call of each indexer of transformers, by layer."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scores: dict[int, Tensor] = {}
        self._layer = -1
        topk = torch.Tensor.topk

        def noted(scores: Tensor, *options: Any, **named: Any) -> Any:
            if self._layer >= 0:
                self.scores[self._layer] = scores[0]
            return topk(scores, *options, **named)

        monkeypatch.setattr(torch.Tensor, "topk", noted)
        for layer in model.model.layers:
            if (indexer := layer.self_attn.indexer) is not None:
                indexer.register_forward_pre_hook(self._enter(layer.self_attn.layer_idx))
                indexer.register_forward_hook(self._enter(-1))

    def _enter(self, layer: int) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            self._layer = layer

        return hook


def indexers(model: Model) -> Iterator[tuple[int, nn.Module]]:
    for number, layer in enumerate(model.layers):
        if (indexer := layer.attention.indexer) is not None:
            yield number, indexer


def note_chosen(model: Model) -> dict[int, dict[int, set[int]]]:
    """By layer and position, the tokens chosen in the steps of a single sequence that follow."""
    found: dict[int, dict[int, set[int]]] = {}

    def hook(number: int) -> Callable[..., None]:
        def noted(module: nn.Module, given: Any, chosen: Any) -> None:
            own = found.setdefault(number, {})
            for first, last, _, past in chosen.sequences:
                for i, positions in enumerate(chosen.positions.tolist()[: last - first]):
                    own[past + i] = {one for one in positions if one >= 0}

        return noted

    for number, indexer in indexers(model):
        indexer.register_forward_hook(hook(number))
    return found


@pytest.mark.parametrize("chunks", [[130], [7, 16, 41, 1, 1, 33, 31]], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES)
def test_every_layer_chooses_the_tokens_of_transformers(
    case: str, chunks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each position, across tiles, pages and chunks. Tokens whose scores are CLOSE may change places."""
    theirs = write_checkpoint(tmp_path, *CASES[case])
    prompt = torch.randint(0, 97, (130,), generator=torch.Generator().manual_seed(1)).tolist()
    scored = Scored(theirs, monkeypatch)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    ours = load(tmp_path)
    found = note_chosen(ours)
    (logits,) = run_paged(ours, [prompt], [chunks])
    assert found.keys() == scored.scores.keys() and len(found) == {"glm-shared": 2, "glm-schedule": 3}.get(case, 3)
    close = 0
    for layer, scores in scored.scores.items():
        for position in range(130):
            own = scores[position, : position + 1]
            order = torch.sort(own, descending=True, stable=True).indices[:TOP_K].tolist()
            chosen = found[layer].get(position, set(range(position + 1)))
            for one, other in zip(sorted(set(order) - chosen), sorted(chosen - set(order)), strict=True):
                assert abs(own[one] - own[other]) <= CLOSE * own.abs().max(), (layer, position)
                close += 1
    assert close <= 2, "more of them than random numbers have"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def coded(x: Tensor, scale: Tensor | float) -> Tensor:
    """The numbers x as e4m3 codes hold them."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


class Rounded(DynamicCache):
    """A cache of transformers that holds what an 8-bit cache of type `kind` holds."""

    kind = ""

    def update(self, latent: Tensor, rope: Tensor, *given: Any, **named: Any) -> Any:
        if self.kind == "fp8_ds_mla":  # tiles of 128 numbers: all of a latent here
            scale = latent.abs().amax(-1, keepdim=True) / 448
            return super().update(coded(latent, scale), rope.bfloat16().float(), *given, **named)
        return super().update(coded(latent, 1.0), coded(rope, 1.0), *given, **named)

    def update_indexer(self, key: Tensor, *given: Any, **named: Any) -> Any:
        scale = torch.exp2(torch.ceil(torch.log2(key.abs().amax(-1, keepdim=True) / 448)))
        return super().update_indexer(coded(key, scale), *given, **named)


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "float8_e4m3fn"])
@pytest.mark.parametrize("case", ["dense", "deepseek_v32", "glm-shared"])
def test_an_8_bit_cache_rounds_as_its_rule_says(case: str, kind: str, tmp_path: Path) -> None:
    """Transformers with its cache rounded by the rule gives the same logits, in chunks too."""
    theirs = write_checkpoint(tmp_path, *(CASES | {"dense": ("deepseek_v3", {})})[case])
    prompt = torch.randint(0, 97, (75,), generator=torch.Generator().manual_seed(4)).tolist()
    cache = Rounded(config=theirs.config)
    cache.kind = kind
    with torch.inference_mode():
        plain = theirs(torch.tensor([prompt])).logits[0]
        expected = theirs(torch.tensor([prompt]), cache=cache, use_cache=True).logits[0]
    assert (plain - expected).abs().max() > 0.05
    for chunks in ([75], [40, 1, 33, 1]):
        (logits,) = run_paged(load(tmp_path), [prompt], [chunks], cache=kind)
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4)


def test_steps_of_all_kinds(tmp_path: Path) -> None:
    """Short and long sequences in turns: dense ones beside others that choose, prompts and decodes."""
    theirs = write_checkpoint(tmp_path, *CASES["glm-shared"])
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (60, 6, 44, 8, 90, 9)]
    pieces = ([50], [], [40], [3], [36, 50], [])
    steps = [ragged(len(one), some, 11) for one, some in zip(prompts, pieces, strict=True)]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for got, want in zip(run_paged(load(tmp_path), prompts, steps), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["deepseek_v32", "glm"])
def test_the_indexer_turns_pairs_as_its_family_does(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other layout of rotated pairs chooses other tokens: no test of short prompts sees it."""
    theirs = write_checkpoint(tmp_path, *CASES[case])
    families = {"deepseek_v32": (64, True), "glm_moe_dsa": (32, False)}
    monkeypatch.setattr("quire.args.latent.INDEXERS", families)
    prompt = list(range(90))
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    (wrong,) = run_paged(load(tmp_path), [prompt], [[90]])
    torch.testing.assert_close(wrong[:TOP_K], expected[:TOP_K], rtol=0, atol=1e-4)
    assert (wrong - expected).abs().max() > 0.1
