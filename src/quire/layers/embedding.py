"""Token ids to hidden states, and hidden states to logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.args.layers import EndArgs
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.lora import AdapterRows
from quire.layers.adapters import AdaptedProduct
from quire.layers.context import Build
from quire.layers.linear import PackedLinear, pack_linear


class VocabEmbedding(nn.Module):
    """The embedding table [V, hidden], a row for each token id.

    A tied LM head packs the same weight for its kernel. The embedding reads the packed weight if the kernel can;
    otherwise it keeps an unpacked one, too. With tensor parallelism a rank has some of the rows, and the results of all
    ranks are summed.

    scale   factor on the rows
    """

    def __init__(self, at: str, tied: "LMHead | None", build: Build, scale: float = 1.0) -> None:
        super().__init__()
        self.at, self.device, self.dtype = at, build.device, build.dtype
        self.scale = torch.tensor(scale, dtype=build.dtype).item()  # rounded, as in Hugging Face
        self.slice = build.vocabulary
        plan = build.linears[at]
        self.kernel, self.features = plan.load(), plan.features
        self.tied = (tied,)  # in a tuple, so that the head stays a child of the model alone
        self.weight: Tensor | None = None
        self.packed: PackedLinear | None = None

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        weight, (head,) = tensors["weight"].to(self.device), self.tied
        shared = head is not None and "rows" in self.features
        if head is not None:
            head.take(tensors, place)
        if shared:
            assert head is not None
            self.packed = head.packed
        elif "plain" in self.features:
            self.packed = PackedLinear(weight, None)
        else:
            self.weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of ids [T] int64 in [0, V). For other ids kernels give rows of NaN."""
        if self.slice is None:
            return self._scaled(self._rows(token_ids))
        rows, ours = self.slice.local(token_ids)
        return self._scaled(self.slice.group.all_reduce(self._rows(rows).masked_fill(~ours[:, None], 0)))

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.scale == 1.0 else rows * self.scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self.packed is not None:
            rows: Tensor = self.kernel.rows(self.packed.weight, token_ids)
            return rows.to(self.dtype)
        assert self.weight is not None, "run before its weights were taken"
        return F.embedding(token_ids, self.weight).to(self.dtype)


class LMHead(nn.Module):
    """The projection from hidden states to logits. A tied head loads nothing: the embedding gives it the weight.

    adapted   products of adapters; None: no adapter changes the head
    """

    packed: PackedLinear
    adapted: AdaptedProduct | None = None

    def __init__(self, at: str, ends: EndArgs, build: Build) -> None:
        super().__init__()
        self.ends = ends
        self.at, self.kernel, self.device = at, build.linears[at or "embed"].load(), build.device
        self.slice: VocabularySlice | None = build.vocabulary

    def take(self, tensors: dict[str, Any], place: int) -> None:
        self.packed = pack_linear(self.kernel.pack, tensors, self.device)

    def forward(self, hidden: Tensor, out: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """[R, hidden] -> [R, V] float32 logits of this rank's ids, written to `out` if it is given.

        adapters   of the rows; None: no row has one
        """
        logits: Tensor = self.kernel.run_float(hidden, *self.packed, *(() if out is None else (out,)))
        if adapters is not None and self.adapted is not None:
            self.adapted.add(logits, hidden, adapters)
        if self.ends.logit_scale != 1.0:
            logits.mul_(self.ends.logit_scale)
        if (cap := self.ends.logit_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def whole(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """[R, hidden] -> [R, V] float32 logits of the whole vocabulary."""
        logits = self(hidden, adapters=adapters)
        return logits if self.slice is None else self.slice.whole(logits)
