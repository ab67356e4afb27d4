"""The numbers of one stored tensor for `quire weights MODEL NAME`, dequantized where the checkpoint is quantized."""

from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.params import Param
from quire.explain.describe import plan_engine
from quire.explain.near_names import hint
from quire.explain.verify.dequantized import KeptWeights, numbers, parts_of
from quire.quantization.formats import tensor_names
from quire.quantization.scheme_words import scheme_words
from quire.weights.files import StoredTensor, read_checkpoint
from quire.weights.load import DTYPES, load_weights

BINS = 21  # of a histogram, an odd number: zero has a bin of its own
QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
FAR = 6.0  # standard deviations from the mean, beyond which a number is an outlier
SHOWN = 5  # outliers that are named
MOST = 1 << 24  # numbers whose quantiles are exact; of more, every n-th counts


def tensor_values(config: EngineConfig, folder: Path, name: str) -> dict[str, Any]:
    """Return facts about a stored tensor, and about the matrix that it is a part of, as plain values.

    name   of a stored tensor, or of a module: then of its weight

    stored     name, shape, dtype, bytes and file of each stored tensor of the module, and statistics of those with
               fractions (see `statistics`)
    weight     the module's matrix, dequantized: shape, scheme, statistics; None: it is stored as it is
    Raises ConfigError for a name that no tensor has, with the nearest ones.
    """
    tensors = read_checkpoint(folder).tensors
    module = name.removesuffix(".weight")
    own = [one for one in tensors.values() if one.name == name or one.name.rpartition(".")[0] == module]
    exact = [one for one in own if one.name == name]
    if not own:
        raise ConfigError(f"{folder} has no tensor or module {name!r}.{hint(name, tensors)}")
    found: dict[str, Any] = {"name": name, "stored": [_stored(one) for one in exact or own], "weight": None}
    quantized = any(one.dtype not in ("F32", "BF16", "F16", "F64") for one in own) or len(own) > 1
    if quantized and (read := _param(config, own[0].name)) is not None:
        weight, scheme = _dequantized(*read, folder, own[0].name)
        found["weight"] = {"shape": list(weight.shape), "scheme": scheme, **statistics(weight)}
    return found


def _stored(one: StoredTensor) -> dict[str, Any]:
    facts = {"name": one.name, "shape": list(one.shape), "dtype": one.dtype, "bytes": one.num_bytes}
    known = DTYPES.get(one.dtype)
    values = None
    if known is not None and known.is_floating_point and one.num_bytes:
        values = statistics(torch.frombuffer(one.read(), dtype=known).view(one.shape))
    return facts | {"file": one.file.name, "values": values}


def statistics(values: Tensor) -> dict[str, Any]:
    """Return statistics of the finite numbers of a tensor as plain values.

    count, nan, infinite, zeros   numbers of all, and of these kinds
    least, most, mean, std, norm  None: nothing is finite
    quantiles   [share, number]
    histogram   [first edge, width, counts] of `BINS` bins around zero, whose ends hold all that lies outside
    outliers    number of those `FAR` standard deviations from the mean, and [place, number] of the farthest
    """
    flat = values.reshape(-1).double()
    finite = flat[flat.isfinite()]
    found: dict[str, Any] = {
        "count": len(flat),
        "nan": int(flat.isnan().sum()),
        "infinite": int(flat.isinf().sum()),
        "zeros": int((flat == 0).sum()),
    }
    if not len(finite):
        return found | dict.fromkeys(("least", "most", "mean", "std", "norm")) | {"quantiles": [], "outliers": 0}
    mean, std = float(finite.mean()), float(finite.std(correction=0))
    few = finite[:: -(-len(finite) // MOST)]
    order = few.sort().values
    quantiles = [[share, float(order[round(share * (len(order) - 1))])] for share in QUANTILES]
    half = 4 * std or float(finite.abs().max()) or 1.0
    if not isfinite(half):  # numbers whose squares are none
        half = float(finite.abs().max())
    width = half / BINS * 2
    bins = (finite / width + BINS / 2).floor().clamp(0, BINS - 1).long()
    far = (finite - mean).abs() > FAR * std if std else torch.zeros(len(finite), dtype=torch.bool)
    top = flat.nan_to_num(mean, mean, mean).sub(mean).abs().topk(min(SHOWN, len(flat))).indices.tolist()
    return found | {
        "least": float(finite.min()),
        "most": float(finite.max()),
        "mean": mean,
        "std": std,
        "norm": float(finite.norm()),
        "quantiles": quantiles,
        "histogram": [-half, width, torch.bincount(bins, minlength=BINS).tolist()],
        "outliers": int(far.sum()),
        "farthest": [[_place(at, values.shape), float(flat[at])] for at in top],
    }


def _place(at: int, shape: tuple[int, ...]) -> list[int]:
    found = list[int]()
    for size in reversed(shape):
        at, place = divmod(at, size)
        found.insert(0, place)
    return found


def _param(config: EngineConfig, name: str) -> tuple[Param, ModelArgs] | None:
    """Return the parameter that reads a stored tensor; None: none does, or this model cannot run here."""
    report = plan_engine(config)
    found = next((one for one in report.holdings.layout if name in tensor_names(one)), None)
    return None if found is None else (found, report.plan.args)


def _dequantized(param: Param, args: ModelArgs, folder: Path, name: str) -> tuple[Tensor, str]:
    """Return the matrix of the module of a stored tensor in float32, and its scheme in words."""
    kept = KeptWeights(args, (param,), frozenset(read_checkpoint(folder).tensors))
    load_weights(cast(Any, kept), folder)
    module = name.rpartition(".")[0]
    weights = kept.weights[param.name]
    for place, weight in weights.items():
        rows = parts_of(param, place, len(weights), numbers(weight))
        if (own := next((own for part, own in rows if part.stored.rpartition(".")[0] == module), None)) is not None:
            return own, scheme_words(param.scheme) if param.scheme else "dequantized by the loader"
    raise AssertionError(f"{name} is read by {param.name}")
