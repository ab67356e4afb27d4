"""Routing of tokens to experts: choice and weight of each token's k experts (formulas: `quire.config.experts.Routing`).

route(logits [T, E], bias [E] float32 or None, routing) -> weights [T, k] float32, ids [T, k] int32
    All arithmetic is float32, for logits of any dtype. The ids of a token are k different numbers in [0, E), even if
    its logits are NaN. Does not wait for the device.
"""

from types import ModuleType

import torch
from torch import Tensor

from quire.config.experts import Routing


def uniform(kernel: ModuleType, routing: Routing, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and ids of k experts that are drawn at random, without repetition, for each row of x [T, .].

    It replaces the router's choice. It uses the default generator of x's device, so a replayed CUDA graph draws anew.
    Weights are 1/k to within 1%.

    kernel   an implementation of `route`
    """
    scores = torch.empty(x.shape[0], routing.num_experts, device=x.device).uniform_(0, 0.01)
    plain = Routing(num_experts=routing.num_experts, top_k=routing.top_k, scoring="softmax", normalize=True)
    weights, ids = kernel.route(scores, None, plain)
    return weights, ids
