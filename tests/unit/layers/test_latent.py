"""Latent attention as a layer against the modules of transformers, over a paged cache, in steps of every kind."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.params import Param
from quire.distributed.mesh import ALONE, RankGroups
from quire.kernels.attention import AttentionMeta
from quire.kernels.joined.choice import JoinedDecodes
from quire.kernels.joined.inputs import HeadInputs, LatentInputs
from quire.kernels.latent import LatentView, cpu, ref
from quire.kernels.latent.rows import row_view
from quire.kernels.latent_rows import latent_row
from quire.kernels.rope.rotary import Rotaries
from quire.kernels.select import Kernels, select_kernels
from quire.layers import divided, latent
from quire.layers.adapters import AdaptedExpansion
from quire.layers.branch import Branch
from quire.layers.context import Build, Loads, StepContext
from quire.layers.latent import LatentAttention, split
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.weights.units import load_units

from ...support.changed_args import latent_of
from ...support.filled_models import sliced
from ...support.simulated_groups import SimulatedRanks

HEADS, HIDDEN, BLOCK = 4, 40, 8
AT = "layers.0.attention."
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 256,
    "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "first_k_dense_replace": 1, "attn_implementation":
    "eager", "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.8,
    "mscale_all_dim": 1.3,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
# Rows of each sequence in every step: prompts in chunks beside decodes, a chunk above the break-even (34) and, behind
# it, one below; a sequence of one token.
STEPS: tuple[tuple[int, ...], ...] = ((9, 40, 0, 0), (1, 35, 3, 0), (1, 1, 50, 1), (1, 1, 1, 1), (36, 1, 7, 0))


class Case:
    """The same random layer twice: transformers' and ours, for a model type."""

    def __init__(
        self, model_type: str, form: str = "auto", kernel: Any = cpu, groups: RankGroups = ALONE, **options: Any
    ) -> None:
        torch.manual_seed(2)
        kind = DeepseekV2Config if model_type == "deepseek_v2" else DeepseekV3Config
        module = v2 if model_type == "deepseek_v2" else v3
        self.config = kind(**SIZES | {"rope_parameters": dict(YARN)} | options)
        prefix = "DeepseekV2" if model_type == "deepseek_v2" else "DeepseekV3"
        self.theirs = getattr(module, prefix + "Attention")(self.config, 0).eval()
        self.turn = getattr(module, prefix + "RotaryEmbedding")(self.config)
        for weight in self.theirs.parameters():
            weight.data.normal_(0, 0.3 if weight.dim() > 1 else 1)
        args = parse_checkpoint_config(self.config.to_dict() | {"model_type": model_type})
        small = select_kernels("cpu", "float32")
        kernels = Kernels(choices=small.choices, norm=small.norm, linear=small.linear, latent=kernel)
        params = [param for param in layout(args) if param.name.startswith(AT)]
        build = Build(
            torch.float32,
            torch.device("cpu"),
            kernels,
            {param.name: param for param in params},
            linear_plans(args, params, small.choices),
            groups=groups,
        )
        self.layer = LatentAttention(latent_of(args), AT[:-1], args.norm, build)
        self.layer.most_absorbed = {"absorbed": math.inf, "naive": 0.0}.get(form, self.layer.most_absorbed)
        self.branch = Branch("attention", args.layers[0], structs.replace(args.norm, eps=1e-5), build)
        assert self.branch.before is not None
        self.branch.before.take({"weight": torch.empty(HIDDEN).uniform_(0.5, 1.5)}, 0)
        load(self.layer, self.theirs, params)
        self.rotary = Rotaries(args.rotations, torch.device("cpu"))
        self.args = args

    @torch.no_grad()
    def expected(self, hidden: Tensor) -> Tensor:
        """Return the result for a sequence [n, hidden], all at once."""
        given = self.branch.read(hidden)[None]
        mask = torch.full((1, 1, len(hidden), len(hidden)), float("-inf")).triu(1)
        turn = self.turn(given, torch.arange(len(hidden))[None])
        return hidden + self.theirs(given, position_embeddings=turn, attention_mask=mask)[0][0]


@torch.no_grad()
def load(layer: LatentAttention, theirs: Any, params: list[Param]) -> None:
    """The tensors of a checkpoint, in the rows that the parts name."""
    stored = {f"model.layers.0.self_attn.{name}": weight for name, weight in theirs.named_parameters()}
    owners = {one.at: one for one in layer.modules() if isinstance(one, Loads)}
    for unit in load_units(params):
        owners[unit.module].take(
            {
                raw.name: torch.cat([sliced(part, stored.pop(part.stored)) for part in raw.parts])
                for raw in unit.tensors
            },
            unit.place,
        )
    assert not stored


@torch.inference_mode()
def run(
    case: Case,
    hidden: list[Tensor],
    steps: tuple[tuple[int, ...], ...],
    parts: int = 1,
    rows: bool = False,
    **changes: Any,
) -> list[Tensor]:
    """The layer's answers for every sequence, computed step by step over a cache that is NaN where nobody wrote.

    parts   ranks among which the tokens of a block are divided, BLOCK each
    rows    the cache has FP8 rows (fp8_ds_mla)
    changes   fields of the steps' contexts
    """
    sizes, whole = latent_of(case.args), parts * BLOCK
    drawn = torch.randperm(len(hidden) * 32, generator=torch.Generator().manual_seed(3))
    blocks = drawn.int().view(len(hidden), 32) + 1
    pages = torch.full((int(blocks.max()) + 1, 2, BLOCK, sizes.kv_rank + sizes.rope_dim), float("nan"))
    flat = pages.view(len(pages), 2, -1)
    cut = BLOCK * sizes.kv_rank
    cache = LatentView(
        flat[:, 1, :cut].view(-1, 1, BLOCK, sizes.kv_rank), flat[:, 1, cut:].view(-1, 1, BLOCK, sizes.rope_dim)
    )
    if rows:
        layout = latent_row(sizes.kv_rank, sizes.rope_dim)
        raw = torch.zeros(len(pages), 2, BLOCK, layout.size, dtype=torch.uint8)[:, 1:]
        cache = row_view(raw, sizes.kv_rank, sizes.rope_dim)
    done, answers = [0] * len(hidden), [[] for _ in hidden]  # type: ignore[var-annotated]
    for rows in steps:
        present = [s for s, count in enumerate(rows) if count]
        positions = [torch.arange(done[s], done[s] + rows[s]) for s in present]
        slots = [blocks[s, at // whole].long() * whole + at % whole for s, at in zip(present, positions, strict=True)]
        done = [at + count for at, count in zip(done, rows, strict=True)]
        meta = AttentionMeta(
            query_start=torch.tensor([0, *(rows[s] for s in present)]).cumsum(0).int(),
            seq_lens=torch.tensor([done[s] for s in present], dtype=torch.int32),
            block_tables=blocks[present],
            kv_slots=torch.cat(slots),
        )
        given = torch.cat([hidden[s][at] for s, at in zip(present, positions, strict=True)])
        where = torch.cat(positions)
        ctx = StepContext(where, (meta,), [], **changes)
        out = case.layer(given.clone(), case.branch, case.rotary.rows(where, torch.float32), ctx, cache)
        for s, part in zip(present, out.split([rows[s] for s in present]), strict=True):
            answers[s].append(part)
    return [torch.cat(parts) for parts in answers]


MODELS = (
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v2", {"q_lora_rank": 20}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": PLAIN}),
    ("deepseek_v3", {"q_lora_rank": 20}),
    ("deepseek_v3", {"q_lora_rank": 20, "rope_interleave": False}),
)


@pytest.mark.parametrize("form", ["auto", "absorbed", "naive"])
@pytest.mark.parametrize(("model_type", "options"), MODELS, ids=str)
def test_is_transformers_attention(model_type: str, options: dict[str, Any], form: str) -> None:
    case = Case(model_type, form, **options)
    hidden = [torch.randn(sum(rows), HIDDEN) for rows in zip(*STEPS, strict=True)]
    for actual, given in zip(run(case, hidden, STEPS), hidden, strict=True):
        torch.testing.assert_close(actual, case.expected(given), rtol=0, atol=1e-5)


def test_the_reference_is_too() -> None:
    case = Case("deepseek_v3", kernel=ref, q_lora_rank=20)
    hidden = [torch.randn(sum(rows), HIDDEN) for rows in zip(*STEPS, strict=True)]
    for actual, given in zip(run(case, hidden, STEPS), hidden, strict=True):
        torch.testing.assert_close(actual, case.expected(given), rtol=0, atol=1e-5)


class Joined:
    """A stand-in for `joined.latent_clusters`, which takes steps of single rows."""

    def __init__(self, chosen: JoinedDecodes) -> None:
        self.chosen, self.steps = chosen, 0

    def kernel_of(
        self, decodes: JoinedDecodes, inputs: LatentInputs, norm: Tensor, kv: LatentView, meta: AttentionMeta
    ) -> "Joined | None":
        assert decodes is self.chosen and len(norm) == kv.latent.shape[3]
        return self if len(inputs.q) == len(meta.seq_lens) else None

    def attention(
        self,
        absorbed: Tensor,
        inputs: LatentInputs,
        given: HeadInputs,
        kv: LatentView,
        meta: AttentionMeta,
        scale: float,
    ) -> Tensor:
        assert given.norm is not None and absorbed.is_contiguous()
        self.steps += 1
        angles = given.cos, given.sin
        q = ref.prepare(inputs.q.clone(), inputs.given.clone(), given.norm, given.eps, *angles, kv, meta.kv_slots)
        return ref.absorbed(absorbed, q[..., -given.cos.shape[1] :], kv, meta, scale)


@pytest.mark.parametrize("rank", [None, 20])
def test_a_kernel_between_the_products(rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that it takes are computed by it, with the same result; others by the kernels that there are."""
    case, joined = Case("deepseek_v3", q_lora_rank=rank), Joined(JoinedDecodes(16, "", range(0), "", latent=True))
    monkeypatch.setattr(latent, "latent_kernel", joined.kernel_of)
    case.layer.joined = joined.chosen
    steps = (*STEPS, (1, 0, 1, 1), (1, 1, 0, 0))
    hidden = [torch.randn(sum(rows), HIDDEN) for rows in zip(*steps, strict=True)]
    for actual, given in zip(run(case, hidden, steps), hidden, strict=True):
        torch.testing.assert_close(actual, case.expected(given), rtol=0, atol=1e-5)
    assert joined.steps == 3
    monkeypatch.setattr(AdaptedExpansion, "add_queries", lambda *_: None)
    monkeypatch.setattr(AdaptedExpansion, "add_values", lambda *_: None)
    case.layer.kv_up.adapted = AdaptedExpansion.__new__(AdaptedExpansion)
    for changes in ({"adapters": object()}, {"apart": True}):
        run(case, hidden, steps, **changes)
    assert joined.steps == 3, "rows with adapters, and steps whose operations are traced, have a kernel for each"
    run(case, hidden, steps)
    assert joined.steps == 6, "adapters that no row of the step has change nothing"


@pytest.mark.parametrize(("parts", "form", "kernel"), [(2, "auto", cpu), (3, "auto", ref), (2, "absorbed", cpu)])
def test_contexts_on_several_ranks(parts: int, form: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has all heads here, and its part of the tokens: each has the whole answer."""
    monkeypatch.setattr(divided, "PIECE", 16)
    monkeypatch.setattr(divided, "GATHERED", 80)
    threads = SimulatedRanks(parts)
    cases = [Case("deepseek_v3", form, kernel, RankGroups(dcp=group), q_lora_rank=20) for group in threads.groups]
    hidden = [torch.randn(sum(rows), HIDDEN) for rows in zip(*STEPS, strict=True)]
    for found in threads.run_each([partial(run, case, hidden, STEPS, parts) for case in cases]):
        for actual, given in zip(found, hidden, strict=True):
            torch.testing.assert_close(actual, cases[0].expected(given), rtol=0, atol=1e-5)
    if kernel is cpu and form == "auto":
        expected = run(Case("deepseek_v3", q_lora_rank=20), hidden, STEPS, rows=True)
        for found in threads.run_each([partial(run, case, hidden, STEPS, parts, True) for case in cases]):
            for actual, right in zip(found, expected, strict=True):
                torch.testing.assert_close(actual, right, rtol=0, atol=1e-5)


def test_weights_are_not_kept_twice() -> None:
    layer = Case("deepseek_v3", q_lora_rank=20).layer
    assert layer.kv_up.weight.shape == (HEADS, 28, 24)
    assert not list(layer.named_parameters())


def args_of(**options: Any) -> ModelArgs:
    return Case("deepseek_v3", **options).args


def test_the_form_follows_the_break_even() -> None:
    sizes = latent_of(args_of())
    assert sizes is not None
    large = structs.replace(sizes, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert 170 < large.break_even < 171 and structs.replace(sizes, kv_rank=4).break_even == math.inf


def test_a_step_is_split_at_the_first_long_prompt() -> None:
    meta = AttentionMeta(
        torch.tensor([0, 1, 2, 12, 52, 53, 53]),
        torch.tensor([9, 4, 10, 70, 8, 0]),
        torch.zeros(6, 2),
        torch.zeros(53),
        table_rows=torch.arange(6),
        max_query_len=40,
        shared=object(),  # type: ignore[arg-type]
    )
    few, naive = split(meta, 20)
    assert naive == ((12, 52, 3, 30), (52, 53, 4, 7))
    assert few.query_start.tolist() == [0, 1, 2, 12] and few.seq_lens.tolist() == [9, 4, 10]  # type: ignore[union-attr]
    assert few.max_query_len == 10 and few.shared is meta.shared and few.plans is meta.plans
    assert few.table_rows is not None and few.table_rows.tolist() == [0, 1, 2]
    assert split(meta, 40) == (meta, ())
    told = replace(meta, decode_len=10, prompts=naive)
    assert split(told, 20)[0].max_query_len == 10 and split(told, 40) == (told, ())
    some = replace(told, decode_len=0, row_positions=torch.arange(53))  # nobody has told the rows of decodes
    assert split(some, 20)[0].max_query_len == 40
    none, everything = split(meta, 0)
    assert len(everything) == 5 and none.seq_lens.tolist() == []  # type: ignore[union-attr]
