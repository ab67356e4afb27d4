"""The layer of an EAGLE head, and its map of token ids."""

import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

from quire.args.checkpoint import ModelArgs
from quire.args.layers import GroupedArgs
from quire.contracts.errors import WeightsError
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.attention import KVView
from quire.kernels.rope.rotary import Turns
from quire.layers.attention import Attention
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm
from quire.layers.read_states import ReadStates


class EagleLayer(nn.Module):
    """A layer that predicts the token after the next from the model's hidden states.

    EAGLE      x = join(embedding, state); attention reads x, without a norm
    EAGLE-3    state = join(states entering several layers of the model), which some heads normalize before; attention
               reads (norm(embedding), norm(state)), twice as wide, and its output is added to the state

    In both the output is the next state.
    """

    def __init__(self, args: ModelArgs, layer: int, build: Build) -> None:
        super().__init__()
        mixer = args.layers[layer].mixer
        assert args.eagle is not None and isinstance(mixer, GroupedArgs), "the layer of a head is that of a Llama"
        at, self.eagle = f"layers.{layer}", args.eagle
        self.join = Linear(f"{at}.join", build)
        own = args.layers[layer]
        self.attention = Attention(mixer, f"{at}.attention", args.norm, build, build.group_of(layer))
        self.attention_branch = Branch(f"{at}.attention", structs.replace(own, norms=""), args.norm, build)
        self.mlp_branch = Branch(f"{at}.mlp", own, args.norm, build)
        self.mlp = GatedMLP(f"{at}.mlp", build)
        self.token_norm: Norm | None = None
        if args.eagle.method == "eagle3":
            self.token_norm = Norm(f"{at}.token_norm", args.norm, build)
            self.state_norm = Norm(f"{at}.state_norm", args.norm, build)
        self.read_norm: Norm | None = None
        if self.eagle.norms:
            self.read_norm = Norm(f"{at}.read_norm", args.norm, build)
        self.reads: ReadStates | None = None  # of the model, which an EAGLE-3 head reads

    def forward(self, tokens: Tensor, states: Tensor, turns: Turns, ctx: StepContext, kv: KVView) -> Tensor:
        """Run the layer on embeddings and the states of the tokens before, both [T, hidden] -> [T, hidden].

        It may reuse the memory of `states`.
        """
        if self.token_norm is None:
            joined = residual = self.join(torch.cat((tokens, states), -1), ctx)
        else:
            normed = self.state_norm(states)
            joined = torch.cat((self.token_norm(tokens), normed), -1)
            residual = normed if self.eagle.norm_residual else states
        hidden = self.attention(joined, self.attention_branch, turns, ctx, kv, residual)
        return self.mlp(hidden, self.mlp_branch, ctx)

    def joined(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """Return the states [T, hidden] of the step's tokens, of an EAGLE-3 head. hidden: output of the last layer."""
        assert self.reads is not None, "the model keeps the states that the head reads"
        seen = self.reads.taken(hidden)
        if self.read_norm is None:
            read = torch.cat(seen, -1)
        elif self.eagle.norms == "joined":
            read = self.read_norm(torch.cat(seen, -1))
        else:
            weights = self.read_norm.weight.chunk(len(seen))
            kernel, eps = self.read_norm.kernel, self.read_norm.eps
            read = torch.cat([kernel.rms_norm(*both, eps) for both in zip(seen, weights, strict=True)], -1)
        states: Tensor = self.join(read, ctx)
        return states


class DraftIds(nn.Module):
    """Token ids of the model for the ids of a head with a smaller vocabulary: id i stands for i + offsets[i]."""

    def __init__(self, at: str, vocab_size: int, build: Build) -> None:
        super().__init__()
        self.at, self.device, self._vocab_size = at, build.device, vocab_size

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Invert the map: `self.sources` [V] has the head's id of each id of the model, or one behind the last."""
        offsets = tensors["offsets"].round().long().to(self.device)
        ids = torch.arange(len(offsets), device=self.device)
        targets = ids + offsets
        if not 0 <= int(targets.min()) <= int(targets.max()) < self._vocab_size:
            raise WeightsError(
                f"d2t of the EAGLE head maps to ids outside of the {self._vocab_size} of the model: use "
                "a head that was made for this model."
            )
        self.sources = torch.full((self._vocab_size,), len(offsets), device=self.device)
        self.sources[targets] = ids

    def spread(self, logits: Tensor, own: VocabularySlice | None) -> Tensor:
        """Return logits [D, V] of the model's ids, or of a rank's slice `own`, from those [D, .] of all of the head's.

        Ids that the head does not know get -inf.
        """
        sources = self.sources if own is None else self.sources[own.first : own.first + own.count]
        return F.pad(logits, (0, 1), value=float("-inf")).index_select(1, sources)
