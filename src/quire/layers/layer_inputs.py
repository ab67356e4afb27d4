"""Inputs of layers beside the residual stream: embeddings of each token, one for each layer (Gemma 4 E2B and E4B)."""

from torch import Tensor, nn

from quire.args.checkpoint import ModelArgs
from quire.kernels.activation import checked
from quire.layers.context import Build, StepContext
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.norm import LayerFactor, Norm


class LayerInputs(nn.Module):
    """Inputs of all layers from a token's id and embedding x: (embed(id) + norm(project(x) / sqrt(hidden))) / sqrt(2).

    L layers, P numbers of an input; the norm is over the P numbers of a layer.
    """

    def __init__(self, args: ModelArgs, build: Build) -> None:
        super().__init__()
        self.shape = args.num_layers, args.inputs
        self.embed = VocabEmbedding("inputs.embed", None, build, args.inputs**0.5)
        self.project = Linear("inputs.project", build)
        self.norm = Norm("inputs.norm", args.norm, build)
        self.scale = args.hidden_size**-0.5

    def forward(self, token_ids: Tensor, x: Tensor, ctx: StepContext) -> Tensor:
        """Return the inputs [T, L, P] of ids [T] with embeddings x [T, hidden]."""
        projected = (self.project(x, ctx) * self.scale).view(-1, *self.shape)
        return (self.norm(projected) + self.embed(token_ids).view(-1, *self.shape)) * 2**-0.5


class OwnInput(nn.Module):
    """The use of a layer's own input: (x + norm(project(act(gate(x)) * input))) * factor."""

    def __init__(self, args: ModelArgs, layer: int, build: Build, factor: LayerFactor | None) -> None:
        super().__init__()
        at = f"layers.{layer}.input"
        self.number, self.act, self.activation = layer, checked(args.layers[layer].act), build.kernels.activation
        self.gate, self.project = Linear(f"{at}.gate", build), Linear(f"{at}.project", build)
        self.after = Norm(f"{at}_after", args.norm, build)
        self.factor = (factor,)  # in a tuple, so that it stays a child of the layer alone

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """[T, hidden] -> [T, hidden]; it may reuse the memory of x."""
        assert ctx.inputs is not None, "a step of this model has inputs of layers"
        gated = self.activation.gated(self.gate(x, ctx), self.act, ctx.inputs[:, self.number])
        result = self.project(gated, ctx)
        return self.after.added(result, x, None if self.factor[0] is None else self.factor[0].weight)
