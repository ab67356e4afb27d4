"""Which experts compute a token, and how much each one counts (`quire.config.experts.Routing` has the formulas).

route(logits [T, E], bias [E] float32 or None, routing) -> weights [T, k] float32, ids [T, k] int32
    All arithmetic is float32, whatever type the logits have. A token's ids are k different numbers in [0, E), also
    where its logits are not numbers. Nothing is read from the device.
"""

from types import ModuleType

import torch
from torch import Tensor

from quire.config.experts import Routing


def uniform(kernel: ModuleType, routing: Routing, x: Tensor) -> tuple[Tensor, Tensor]:
    """In the router's place: k of E experts for each of the T rows of x, drawn at random without repetition.

    Drawn on x's device by its default generator, so that graphs which captured it draw anew. Weights are 1/k to 1%.
    """
    scores = torch.empty(x.shape[0], routing.num_experts, device=x.device).uniform_(0, 0.01)
    plain = Routing(num_experts=routing.num_experts, top_k=routing.top_k, scoring="softmax", normalize=True)
    weights, ids = kernel.route(scores, None, plain)
    return weights, ids
