"""Token ids to hidden states, and hidden states to logits."""

import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.context import Build
from quire.quantization import unquantized


class VocabEmbedding(nn.Module):
    """A row per token id; the weight is [V, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.kernel, self.features = build.kernels.linear, build.kernels.features("linear")
        self.weight: nn.Parameter | None = build.parameter(vocab_size, hidden_size)
        self.packed: unquantized.PackedLinear | None = None

    def share(self, packed: unquantized.PackedLinear) -> None:
        """Read rows from what a tied head packed, and free the plain ones."""
        self.packed, self.weight = packed, None

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 ids in [0, V) -> [T, hidden]; a kernel's rows are NaN for other ids."""
        if self.packed is not None:
            return unquantized.rows(self.kernel, self.packed, token_ids)
        assert self.weight is not None
        if "plain" in self.features:
            return unquantized.rows(self.kernel, unquantized.PackedLinear(self.weight, None), token_ids)
        return F.embedding(token_ids, self.weight)


class LMHead(nn.Module):
    """Scores of every token id. With `tied` it uses the embedding's rows and has no parameter of its own."""

    def __init__(self, vocab_size: int, hidden_size: int, tied: VocabEmbedding | None, build: Build) -> None:
        super().__init__()
        self.kernel, self.features = build.kernels.linear, build.kernels.features("linear")
        self.weight: nn.Parameter | None = None if tied is not None else build.parameter(vocab_size, hidden_size)
        self.tied = (tied,)  # in a tuple, so that the embedding stays a child of the model alone
        self.packed: unquantized.PackedLinear | None = None

    def pack(self) -> None:
        """Reorder the weights; a tied embedding keeps its plain rows too, unless the kernel can read packed ones."""
        (tied,) = self.tied
        weight = self.weight if tied is None else tied.weight
        assert weight is not None, "packed twice"
        self.packed = unquantized.pack(self.kernel, weight, None)
        self.weight = None
        if tied is not None and "rows" in self.features:
            tied.share(self.packed)

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden] -> [R, V] float32 logits; in the memory of `out` where that is given."""
        assert self.packed is not None, "run before pack()"
        return unquantized.run_float(self.kernel, hidden, self.packed, out)
