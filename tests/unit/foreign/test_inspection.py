"""The inspection of transformers' modules: equal operations are found, and others are not taken for equal."""

import importlib.metadata
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from quire.args.foreign import ForeignLinear, ForeignTensor
from quire.args.layers import ForeignArgs
from quire.contracts.errors import UnsupportedModel
from quire.foreign import skeleton as skeletons
from quire.foreign.arguments import model_args
from quire.foreign.capture import OWN_MASK, Calls, _call, mask_window
from quire.foreign.heads import ProvenHeads
from quire.foreign.inspect import Inspected, inspect, traced_layer
from quire.foreign.leaves import NormForm, is_linear, norm_form
from quire.foreign.names import stored_names
from quire.foreign.numbers import inputs_of
from quire.foreign.rewrite import _is_free
from quire.foreign.skeleton import Skeleton, read_skeleton
from quire.foreign.trace import aten

from ...support.foreign_models import foreign_config

Inspect = Callable[..., Inspected]


@pytest.fixture
def inspected(tmp_path: Path) -> Inspect:
    """Inspects a tiny model; `change` is called with its modules before."""

    def run(model_type: str, change: Callable[[Skeleton], None] | None = None, **keys: Any) -> Inspected:
        foreign_config(model_type, **keys).save_pretrained(tmp_path)
        raw = json.loads((tmp_path / "config.json").read_text())
        skeleton = read_skeleton(tmp_path, raw, "float32")
        if change is not None:
            change(skeleton)
        return inspect(raw, skeleton)

    return run


def own_layers(found: Inspected) -> list[ForeignArgs]:
    args = model_args({"model_type": "x"}, found, lambda name: name, "float32")
    return [one.mixer for one in args.layers if isinstance(one.mixer, ForeignArgs)]


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replaces a function of transformers' file of StableLM."""
    from transformers.models.stablelm import modeling_stablelm

    yield lambda name, new: monkeypatch.setattr(modeling_stablelm, name, new(getattr(modeling_stablelm, name)))


def test_a_layer_of_the_usual_kind_keeps_no_operation(inspected: Inspect) -> None:
    (first, *others) = own_layers(inspected("stablelm"))
    assert first.prepared and not first.operations and set(others) == {first}
    assert [gate.act for gate in first.gates] == ["silu"]
    names = [leaf.name for leaf in first.leaves if isinstance(leaf, ForeignLinear)]
    assert names[:2] == ["attention.qkv", "mlp.gate_up"]


def test_fused_and_repeated_heads_are_rows_of_one_matrix(inspected: Inspect) -> None:
    """GPT-NeoX stores q, k and v of each head together; Falcon repeats its only KV head for all query heads."""
    neox = inspected("gpt_neox").kinds[0].heads
    assert isinstance(neox, ProvenHeads)
    assert neox.q.starts == (0, 48, 96, 144) and neox.k.starts == (16, 64, 112, 160) and neox.v.starts[0] == 32
    assert neox.order == (0, 1, 4, 5, 6, 7, 8, 9, 2, 3, 10, 11, 12, 13, 14, 15)  # pairs (0, 2) and (1, 3) are rotated
    falcon = inspected("falcon").kinds[0].heads
    assert isinstance(falcon, ProvenHeads) and len(falcon.q.starts) == 4 and falcon.k.starts == (64,)


def test_heads_that_are_changed_after_the_rotation_stay_the_modules(inspected: Inspect, changed: Any) -> None:
    def bent(own: Any) -> Any:
        def rotate(q: torch.Tensor, k: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = own(q, k, *more)
            return torch.where(q > 1.5, 1.5, q), k

        return rotate

    changed("apply_rotary_pos_emb", bent)
    kind = inspected("stablelm").kinds[0]
    assert isinstance(kind.heads, str), "the reason"


def test_rotation_by_the_length_of_a_step_is_no_rotation_of_ours(inspected: Inspect, changed: Any) -> None:
    """Positions that the module counts by itself are those of a row of several texts."""

    def counting(own: Any) -> Any:
        def rotate(q: torch.Tensor, k: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = own(q, k, *more)
            return q * (1 + torch.arange(q.shape[2])[None, None, :, None]), k

        return rotate

    changed("apply_rotary_pos_emb", counting)
    with pytest.raises(UnsupportedModel, match="positions from the length of a cache"):
        inspected("stablelm")


def test_a_way_that_depends_on_the_number_of_tokens_is_refused(inspected: Inspect, changed: Any) -> None:
    def by_length(own: Any) -> Any:
        def rotate(q: torch.Tensor, k: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = own(q, k, *more)
            return (q * 2 if q.shape[2] > 4000 else q), k

        return rotate

    changed("apply_rotary_pos_emb", by_length)
    with pytest.raises(UnsupportedModel, match="decides by the number of tokens"):
        inspected("stablelm")


def test_ranks_do_not_share_heads_that_are_normed_together_behind_attention(inspected: Inspect) -> None:
    def change(skeleton: Skeleton) -> None:
        for layer in skeleton.layers:
            layer.self_attn.o_proj = nn.Sequential(nn.RMSNorm(64), layer.self_attn.o_proj)

    plain, normed = inspected("stablelm"), inspected("stablelm", change)
    words = [model_args({"model_type": "x"}, one, lambda name: name, "float32").foreign for one in (plain, normed)]
    assert words[0] is not None and words[0].divides == ""
    assert words[1] is not None and "between attention and the projection behind it" in words[1].divides


def test_layers_with_other_numbers_in_a_buffer_are_other_layers(inspected: Inspect) -> None:
    def change(skeleton: Skeleton) -> None:
        for number, layer in enumerate(skeleton.layers):
            layer.register_buffer("steps", torch.arange(20) + number * (torch.arange(20) > 10), persistent=False)

    assert [kind.layers for kind in inspected("stablelm", change).kinds] == [[0], [1], [2]]


def test_parameters_are_traced_in_the_dtypes_in_which_they_are_loaded(inspected: Inspect) -> None:
    """The choice of experts is computed in float32, from weights of the model's dtype or of float32."""
    found = inspected("ernie4_5_moe", moe_layer_start_index=0)
    traced = traced_layer(found, 0, torch.bfloat16)
    tensors = [leaf for leaf in own_layers(found)[0].leaves if isinstance(leaf, ForeignTensor)]
    assert all(leaf.dtype == "float32" for leaf in tensors) and len(tensors) == 2
    given = {name: node.meta["val"].dtype for name, node in inputs_of(traced).items()}
    assert all(given[leaf.name] == torch.float32 for leaf in tensors) and given["hidden"] == torch.bfloat16
    olmoe = inspected("olmoe")
    name = next(leaf.name for leaf in own_layers(olmoe)[0].leaves if isinstance(leaf, ForeignTensor))
    assert inputs_of(traced_layer(olmoe, 0, torch.bfloat16))[name].meta["val"].dtype == torch.bfloat16


def test_memory_is_not_reused_while_a_view_of_it_is_read() -> None:
    graph = fx.Graph()
    hidden, extra = graph.placeholder("hidden"), graph.placeholder("extra")
    view = graph.call_function(aten.view.default, (hidden, [-1, 4]))
    total = graph.call_function(aten.add.Tensor, (view, view))
    assert _is_free(graph, view, total) and not _is_free(graph, extra, total)
    graph.call_function(aten.neg.default, (hidden,))
    assert not _is_free(graph, view, total)


def test_a_layer_that_reads_its_neighbours_is_refused(inspected: Inspect) -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    def change(skeleton: Skeleton) -> None:
        for layer in skeleton.layers:
            layer.mlp = nn.Sequential(Shifted(), layer.mlp)

    with pytest.raises(UnsupportedModel, match="reads other tokens outside of attention"):
        inspected("stablelm", change)


def test_masks_are_told_by_their_function() -> None:
    causal = lambda b, h, q, k: k <= q  # noqa: E731
    assert mask_window(causal, None) is None
    assert mask_window(lambda b, h, q, k: (k <= q) & (k > q - 9), 9) == 9
    assert mask_window(lambda b, h, q, k: (k <= q) & (k > q - 10), 9) == OWN_MASK
    assert mask_window(lambda b, h, q, k: (k <= q) & (q // 8 == k // 8), 8) == -8
    assert mask_window(lambda b, h, q, k: k <= q + 1, None) == OWN_MASK
    assert mask_window(lambda b, h, q, k: (k <= q) & (k > q - 4096), None) == OWN_MASK  # a window that nobody tells


def test_arguments_of_attention_that_nobody_knows_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    assert not _call(nn.Module(), q, None, {"dropout": 0.0, "sliding_window": None}, Calls()).refused
    assert "gain" in _call(nn.Module(), q, None, {"gain": 2.0}, Calls()).refused


def test_quantized_tensors_have_the_names_of_their_weights(tmp_path: Path) -> None:
    """A checkpoint of the base model alone leaves out its prefix; packed words have other last names than weights."""
    foreign_config("gpt_neox").save_pretrained(tmp_path)
    skeleton = read_skeleton(tmp_path, json.loads((tmp_path / "config.json").read_text()), "float32")
    name_of = stored_names(skeleton, ["layers.0.attention.dense.qweight", "layers.0.attention.dense.scales"])
    assert name_of("gpt_neox.layers.0.attention.dense.weight") == "layers.0.attention.dense.weight"


def test_norms_and_linear_layers_are_told_by_numbers() -> None:
    class OddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(12)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    class OddLinear(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 0.01

    assert norm_form(nn.LayerNorm(12, eps=1e-3)) == NormForm(1e-3, plus_one=False, centered=True)
    assert norm_form(nn.RMSNorm(12, eps=1e-4)) == NormForm(1e-4, plus_one=False, centered=False)
    assert norm_form(OddNorm()) is None
    assert is_linear(nn.Linear(3, 4)) and not is_linear(OddLinear(3, 4))


@pytest.mark.parametrize(
    ("version", "words"), [("5.17.0", "5.17.0 is older than 5.23"), ("5.23.0", ""), ("6.0.0rc1", "")]
)
def test_an_old_library_is_refused_with_the_command(version: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = skeletons.missing_library()
    assert (words in found and skeletons.INSTALL in found) if words else found == ""


def test_the_oldest_library_is_that_of_the_extra() -> None:
    extra = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extra["transformers"] == [f"transformers>={skeletons.OLDEST[0]}.{skeletons.OLDEST[1]},<6"]
