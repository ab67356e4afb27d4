"""The steps of each kind of layer halves: how to record ours, and where the reference has them.

    grouped.py   latent.py   delta.py   mamba.py   mixers
    dense.py     experts.py  beside.py   feed-forward parts

`MIXERS` and `FEED_FORWARDS` tell the kind of a module of `layers/`.
"""

from collections.abc import Mapping

from torch import nn

from quire.explain.verify.step_kinds.beside import BesideSteps
from quire.explain.verify.step_kinds.delta import DeltaSteps
from quire.explain.verify.step_kinds.dense import DenseSteps
from quire.explain.verify.step_kinds.experts import ExpertSteps
from quire.explain.verify.step_kinds.grouped import GroupedSteps
from quire.explain.verify.step_kinds.interfaces import FeedForwardSteps, HalfSteps
from quire.explain.verify.step_kinds.latent import LatentSteps
from quire.explain.verify.step_kinds.mamba import ScanSteps
from quire.layers.attention import Attention
from quire.layers.beside import MLPBesideExperts
from quire.layers.delta import GatedDelta
from quire.layers.latent import LatentAttention
from quire.layers.mamba import Mamba
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE
from quire.layers.shortconv import ShortConv

MIXERS: Mapping[type[nn.Module], HalfSteps] = {
    Attention: GroupedSteps(),
    LatentAttention: LatentSteps(),
    GatedDelta: DeltaSteps(),
    Mamba: ScanSteps("mamba", "recurrence", "mixer"),
    ShortConv: ScanSteps("conv", "convolution"),
}
FEED_FORWARDS: Mapping[type[nn.Module], FeedForwardSteps] = {
    GatedMLP: DenseSteps(),
    MoE: ExpertSteps(),
    MLPBesideExperts: BesideSteps(),
}
KINDS = (*MIXERS.values(), *FEED_FORWARDS.values())
