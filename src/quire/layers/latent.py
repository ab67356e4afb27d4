"""Multi-head latent attention (MLA) over the paged cache, computed in one of two ways.

Absorbed: the up-projection is applied to queries and to attention's sums, so attention reads the cached latents.
Naive: every latent is expanded to keys and values. Absorbed costs less for few query rows, naive for many.
With an indexer, rows of longer sequences read only chosen latents, absorbed; shorter sequences are as without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import torch
from msgspec import structs
from torch import Tensor, nn

from quire.args.latent import LatentArgs
from quire.args.layers import NormArgs
from quire.kernels.attention import AttentionMeta, Prompt, as_list, sequences
from quire.kernels.index import Chosen
from quire.kernels.joined.choice import JoinedDecodes
from quire.kernels.joined.dispatch import latent_kernel
from quire.kernels.joined.inputs import HeadInputs, LatentInputs
from quire.kernels.latent import LatentView
from quire.kernels.lora import AdapterRows
from quire.kernels.rope.rotary import Turns
from quire.layers.adapters import AdaptedExpansion
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.divided import DividedContexts
from quire.layers.indexer import Indexer
from quire.layers.linear import Linear
from quire.layers.norm import Norm


def split(meta: AttentionMeta, most: float) -> tuple[AttentionMeta, tuple[Prompt, ...]]:
    """Return the metadata of a step's absorbed part, and the sequences of its naive part.

    most   query rows of a sequence up to which it is absorbed
    The first sequence with more than `most` rows is naive, and so are all sequences after it: decodes come first, and
    the rows of each part must be contiguous. A step in a CUDA graph has no `meta.prompts` and is absorbed as a whole.
    """
    known = sequences(meta) if meta.prompts is None else meta.prompts
    naive = tuple(itertools.dropwhile(lambda prompt: prompt[1] - prompt[0] <= most, known))
    if not naive:
        return meta, ()
    count, longest = naive[0][2], meta.max_query_len
    if meta.row_positions is None:  # else no number is known of the rows of decodes alone
        longest = max([meta.decode_len, *(last - first for first, last, *_ in known[: -len(naive)])])
    few = replace(
        meta,
        query_start=meta.query_start[: count + 1],
        seq_lens=meta.seq_lens[:count],
        table_rows=None if meta.table_rows is None else meta.table_rows[:count],
        max_query_len=longest,
    )
    return few, naive


def alike(meta: AttentionMeta, most: float, chosen: Chosen) -> Iterator[tuple[str, tuple[Prompt, ...]]]:
    """Yield neighbouring sequences of a step that are computed alike, and how: "absorbed", "naive" or "chosen".

    most   query rows of a sequence up to which it is absorbed. Where the host knows only the prompts, these are naive
    """
    some = {prompt[2] for prompt in chosen.sequences}
    whole = chosen.decodes is None or meta.prompts is None
    known = sequences(meta) if whole else meta.prompts or ()

    def way(prompt: Prompt) -> str:
        if prompt[2] in some:
            return "chosen"
        return "absorbed" if prompt[1] - prompt[0] <= most and whole else "naive"

    for name, found in itertools.groupby(known, way):
        yield name, tuple(found)


def part_of(meta: AttentionMeta, prompts: tuple[Prompt, ...]) -> AttentionMeta:
    """Return the metadata of neighbouring sequences alone. Its rows begin with the first row of these."""
    begin, end, first = prompts[0][2], prompts[-1][2] + 1, prompts[0][0]
    return replace(
        meta,
        query_start=[start - first for start in as_list(meta.query_start)[begin : end + 1]],
        seq_lens=meta.seq_lens[begin:end],
        block_tables=meta.block_tables[begin:end] if meta.table_rows is None else meta.block_tables,
        table_rows=None if meta.table_rows is None else meta.table_rows[begin:end],
        plans={},
    )


class Expansion(nn.Module):
    """The up-projection from a latent to keys and values of every head, [H, P + V, L].

    H: heads of this rank, P: nope_dim, V: v_dim, L: kv_rank.
    adapted   products of adapters; None: no adapter changes it
    """

    weight: Tensor
    adapted: AdaptedExpansion | None = None

    def __init__(self, at: str, width: int, nope_dim: int, device: torch.device) -> None:
        super().__init__()
        self.at, self.nope_dim, self._width, self._device = at, nope_dim, width, device

    def heads(self, rows: int) -> int:
        """Return the number of heads that so many rows of the matrix belong to."""
        return rows // self._width

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the parameters to the layer's device, as a weight [H, P + V, L]. See `Loads`."""
        self.weight = tensors["weight"].to(self._device).unflatten(0, (-1, self._width))


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer, absorbed for sequences of few query rows, else naive.

    Its steps: projection to queries and latents, rotation, write to the KV cache, attention, output projection. `down`
    projects the hidden state to the compressed queries (or to the queries) and to the latent at once.
    """

    def __init__(self, sizes: LatentArgs, at: str, norm: NormArgs, build: Build, group: int = 0, turn: int = 0) -> None:
        super().__init__()
        assert build.window(group) is None, "latent attention sees everything"
        self.group, self.turn = group, turn
        self.sizes, self.kernel = sizes, build.kernels.latent
        self.most_absorbed = sizes.break_even  # query rows of a sequence
        expanded = sizes.nope_dim + sizes.v_dim
        self.num_heads = build.shape(f"{at}.kv_up.weight")[0] // expanded
        self.down = Linear(f"{at}.down", build)
        inner = structs.replace(norm, eps=sizes.norm_eps)
        self.q_norm = Norm(f"{at}.q_norm", inner, build) if sizes.q_rank else None
        self.q = Linear(f"{at}.q", build) if sizes.q_rank else None
        self.kv_norm = Norm(f"{at}.kv_norm", inner, build)
        self.kv_up = Expansion(f"{at}.kv_up", expanded, sizes.nope_dim, build.device)
        self.output = Linear(f"{at}.output", build)
        shares = build.groups.dcp
        self.divided = None if shares is None else DividedContexts(shares, self.kernel)
        own = sizes.index is not None and not sizes.index.shared
        self.indexer = Indexer(sizes.index, f"{at}.index", build) if sizes.index is not None and own else None
        self.joined: JoinedDecodes | None = build.kernels.joined.get(at)  # norm, rotation and attention in one kernel

    def forward(
        self,
        x: Tensor,
        branch: Branch,
        turns: Turns,
        ctx: StepContext,
        kv: LatentView,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + attention(x) by way of `branch`, [T, hidden]; it may reuse the memory of the residual.

        residual   None: x
        Writes the step's latents and rotated keys to `kv` before attention reads them.
        """
        sizes, meta, indexer = self.sizes, ctx.attention[self.group], self.indexer
        scored = () if indexer is None else (indexer.k,) if ctx.reuses else (indexer.k, indexer.heads)
        down, *index = branch.projections((self.down, *scored), x, ctx)
        width = sizes.kv_rank + sizes.rope_dim
        q, latent = down[:, :-width], down[:, -width:]
        if indexer is not None and ctx.reuses:
            assert kv.index is not None, "its layer keeps keys"
            indexer.write(*index, turns[self.turn], meta, kv.index)
            indexer = None
        if indexer is not None and self.q is not None and self.q_norm is not None and kv.index is not None:
            compressed = self.q_norm(q)
            q = self.q(compressed, ctx)
            ctx.chosen = indexer(compressed, index, turns[self.turn], meta, kv.index, ctx)
        elif self.q is not None and self.q_norm is not None:
            q = self.q.normed(q, self.q_norm, ctx)
        out = x.new_empty(len(x), self.num_heads, sizes.v_dim)
        rows = ctx.adapters if self.kv_up.adapted is not None else None
        given = LatentInputs(q.unflatten(1, (self.num_heads, -1)), latent)
        if rows is not None or ctx.apart or not self._attend_joined(given, turns, kv, meta, out):
            self._attend_apart(given, turns, kv, ctx, out, rows)
        return branch.add(self.output, out.flatten(1), x if residual is None else residual, ctx)

    def _attend_joined(
        self, given: LatentInputs, turns: Turns, kv: LatentView, meta: AttentionMeta, out: Tensor
    ) -> bool:
        """Attention of a step of few decodes with one kernel between the products, written to out [T, H, V].

        Return False if none takes the step. Then nothing is written.
        """
        norm, sizes = self.kv_norm.weight, self.sizes
        kernel = None if self.joined is None else latent_kernel(self.joined, given, norm, kv, meta)
        if kernel is None:
            return False
        keys, values = self.kv_up.weight.split([sizes.nope_dim, sizes.v_dim], dim=1)
        queries = given.q.new_empty(len(out), self.num_heads, sizes.kv_rank)
        self.kernel.project(given.q[..., : sizes.nope_dim], keys, queries)
        inputs = HeadInputs(norm, sizes.norm_eps, *turns[self.turn])
        sums = kernel.attention(queries, given, inputs, kv, meta, sizes.scale)
        self.kernel.project(sums, values.transpose(1, 2), out)
        return True

    def _attend_apart(
        self,
        given: LatentInputs,
        turns: Turns,
        kv: LatentView,
        ctx: StepContext,
        out: Tensor,
        adapters: AdapterRows | None,
    ) -> None:
        """Attention with a kernel for norm and rotation, written to out [T, H, V]. adapters: see `_attend`."""
        meta = ctx.attention[self.group]
        q = self.kernel.prepare(
            given.q,
            given.given,
            self.kv_norm.weight,
            self.sizes.norm_eps,
            *turns[self.turn],
            kv,
            meta.kv_slots if self.divided is None else self.divided.slots(meta, kv.block_size),
        )
        if self.sizes.index is None:
            self._attend(q, kv, meta, out, adapters)
        else:
            assert ctx.chosen is not None, "a layer before has an indexer"
            self._attend_chosen(q, kv, meta, ctx.chosen, out, adapters)

    def _attend(
        self, q: Tensor, kv: LatentView, meta: AttentionMeta, out: Tensor, adapters: AdapterRows | None
    ) -> None:
        """Attention of rows q [T, H, P + R] to all tokens before them, written to out [T, H, V].

        adapters   of the rows, if adapters change the up-projection: then all rows are absorbed, since expanded keys
                   and values would be those of one adapter
        """
        few, naive = split(meta, self.most_absorbed if adapters is None else inf)
        rows = naive[0][0] if naive else len(q)
        if rows:
            self._absorb(q[:rows], kv, few, out[:rows], adapters)
        if naive:
            rest = replace(meta, prompts=naive)
            contexts = [(kv, rest)] if self.divided is None else self.divided.whole(kv, rest)
            for view, prompts in contexts:
                self.kernel.expanded(q, self.kv_up.weight, view, prompts, self.sizes.scale, out)

    def _attend_chosen(
        self,
        q: Tensor,
        kv: LatentView,
        meta: AttentionMeta,
        chosen: Chosen,
        out: Tensor,
        adapters: AdapterRows | None,
    ) -> None:
        """As `_attend`; rows of longer sequences, and decodes of a GPU, attend to the chosen tokens alone."""
        done, naive = 0, list[Prompt]()  # rows of `chosen.positions`
        if chosen.decodes:
            done = chosen.decodes
            self._absorb(q[:done], kv, meta, out[:done], adapters, positions=chosen.positions[:done])
        for way, prompts in alike(meta, self.most_absorbed if adapters is None else inf, chosen):
            rows = slice(prompts[0][0], prompts[-1][1])
            if way == "naive":
                naive += prompts
            elif way == "absorbed":
                self._absorb(q[rows], kv, part_of(meta, prompts), out[rows], adapters, first=rows.start)
            else:
                count = rows.stop - rows.start
                positions = chosen.positions[done : done + count]
                self._absorb(q[rows], kv, meta, out[rows], adapters, positions=positions, first=rows.start)
                done += count
        if naive:  # in one call: kernels keep the tiles of a step's prompts for all layers
            meta = replace(meta, prompts=tuple(naive))
            self.kernel.expanded(q, self.kv_up.weight, kv, meta, self.sizes.scale, out)

    def _absorb(
        self,
        q: Tensor,
        kv: LatentView,
        meta: AttentionMeta,
        out: Tensor,
        adapters: AdapterRows | None,
        *,
        positions: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Absorbed attention of rows q [n, H, P + R] to the cached latents, written to out [n, H, V].

        adapters    of the step's rows, of which these are those from `first` on; None: none changes the up-projection
        positions   [n, K] tokens that the step's rows from `first` on attend to; None: all before them
        """
        sizes = self.sizes
        keys, values = self.kv_up.weight.split([sizes.nope_dim, sizes.v_dim], dim=1)
        plain, turned = q.split([sizes.nope_dim, sizes.rope_dim], dim=2)
        latents = q.new_empty(len(q), self.num_heads, sizes.kv_rank)
        self.kernel.project(plain, keys, latents)
        adapted = self.kv_up.adapted
        if adapters is not None and adapted is not None:
            adapted.add_queries(latents, plain, adapters, first)
        if self.divided is not None:
            sums = self.divided.absorbed(latents, turned, kv, meta, sizes.scale)
        elif positions is None:
            sums = self.kernel.absorbed(latents, turned, kv, meta, sizes.scale)
        else:
            sums = self.kernel.chosen(latents, turned, kv, meta, sizes.scale, positions, first)
        self.kernel.project(sums, values.transpose(1, 2), out)
        if adapters is not None and adapted is not None:
            adapted.add_values(out, sums, adapters, first)
