"""Parameters of a decoder of transformers that Quire has no file for, as an inspection of its modules found them.

Names are those of transformers' modules below the layer ("mlp.c_fc"), or below the model for what belongs to no layer.
Stored names have "{i}" in place of the layer's number. `quire.foreign` inspects the modules. No torch.
"""

import msgspec


class ForeignRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a stored matrix, and of its bias, that a part of a linear layer has.

    stored   name of the module in the checkpoint: its tensors have ".weight" and ".bias" behind it
    total    rows of the stored matrix
    starts   first row of each block of rows; a block is a head of attention, or all of the part
    size     rows of a block
    order    order of the rows of a block that the kernels need; (): the checkpoint's
    """

    stored: str
    total: int
    starts: tuple[int, ...]
    size: int
    order: tuple[int, ...] = ()


class ForeignLinear(msgspec.Struct, frozen=True, kw_only=True, tag="linear"):
    """A linear layer.

    parts    name of each part ("q", "gate") and its rows; one part without a name: the layer is not fused
    width    its inputs
    shard    "rows": ranks share its outputs; "columns": its inputs, and its results are summed; "": each rank has all
    """

    name: str
    parts: tuple[tuple[str, ForeignRows], ...]
    width: int
    bias: bool = False
    shard: str = ""


class ForeignNorm(msgspec.Struct, frozen=True, kw_only=True, tag="norm"):
    """A norm over the last dimension. eps, plus_one and centered: see `NormArgs`.

    stored   name of the module in the checkpoint; "": it has no weights
    """

    name: str
    stored: str
    width: int
    eps: float
    plus_one: bool = False
    centered: bool = False
    bias: bool = False


class ForeignTensor(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """A parameter that operations of PyTorch read.

    shard   "rows": ranks share its first dimension (sinks of heads)
    dtype   as of `Param`: "float32" for every dtype of the model; "": the model's
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    shard: str = ""
    dtype: str = ""


ForeignLeaf = ForeignLinear | ForeignNorm | ForeignTensor


class ForeignGate(msgspec.Struct, frozen=True, kw_only=True):
    """An activation between two linear layers that a kernel of Quire computes.

    act      word of `quire.kernels.activation`: of `ACTS`, or of `POINTWISE` where there is no gate
    source   name of the linear layer before it: gate and up, or up alone
    reads    name of the linear layer behind it
    gated    False: there is no gate
    """

    act: str
    source: str
    reads: str
    gated: bool = True


class ForeignEnds(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of a decoder of transformers: its classes, what is before its layers, and behind them.

    module, version    Python module of the model's class; version of transformers
    embed, head        names in the checkpoint of the embedding's module, and of the head's
    head_bias          True: the head has a bias
    entry              parameters that the operations between the embedding and the first layer read
    entry_operations   these operations
    norm               norm behind the last layer
    experts            names of the tensors of experts: (name in the checkpoint, parameter, part), as in `models/`
    unread             patterns of names of stored tensors that nothing reads
    divides            the reason why tensor parallelism cannot divide its layers; "": it can
    """

    module: str
    version: str
    embed: str
    head: str
    norm: ForeignNorm
    head_bias: bool = False
    entry: tuple[ForeignLeaf, ...] = ()
    entry_operations: tuple[str, ...] = ()
    experts: tuple[tuple[str, str, str], ...] = ()
    unread: tuple[str, ...] = ()
    divides: str = ""
