"""Bytes of a parameter as an engine keeps it; on a CPU with the padding of panels, and in pages. No torch."""

from collections.abc import Mapping
from pathlib import Path

from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, first_expert, num_experts
from quire.kernels.native.library import loaded
from quire.kernels.pack.panel_sizes import kept_bytes, panels_of
from quire.plan.engine import EnginePlan, own_draft
from quire.plan.weight_bytes import ITEM_BYTES
from quire.quantization.formats import FORMATS, num_bytes
from quire.weights.files import StoredTensor, read_checkpoint

EXACT = ("F16", "BF16")  # stored types of scales that float16 holds, as far as scales of weights go


def kept_weights(plan: EnginePlan) -> int:
    """Return the bytes of a rank's weights and of its drafter's, as `quire explain` tells them."""
    packed = plan.machine.device == "cpu" and any(param.scheme is not None for param in plan.params)
    headers = headers_of(plan) if packed else {}  # reading them again takes a second for a large model
    drafter = own_draft(plan)
    own = sum(kept_of(plan, param, headers) for param in plan.params)
    return own + (drafter.weight_bytes if drafter is not None else 0)


def headers_of(plan: EnginePlan) -> Mapping[str, StoredTensor]:
    """Return stored tensor -> its header; {} where the folder has no safetensors files that can be read."""
    folder = Path(plan.folder)
    if plan.config.load.load_format == "dummy" or not any(folder.glob("*.safetensors")):
        return {}
    try:
        return read_checkpoint(folder).tensors
    except WeightsError:
        return {}


def kept_of(plan: EnginePlan, param: Param, headers: Mapping[str, StoredTensor], experts: int = 1) -> int:
    """Return the bytes of a parameter of the model or of a rank, with its scales.

    headers   stored tensor -> its header. Scales have the type of the first expert's; {}: unknown, they are float32
    experts   number of such parameters that are stacked, if `param` is of experts
    Of a quantized matrix that `panels` runs, the bytes are those of the packed matrix; of others those before packing.
    """
    scheme, copies = param.scheme, experts if param.shard == "experts" else 1
    if scheme is None or plan.machine.device != "cpu" or _kernel(plan, param) != "panels":
        return copies * num_bytes(param, ITEM_BYTES[param.dtype or plan.dtype.dtype])
    count, native = num_experts(param), loaded()
    shape, gated = (param.shape[0] // count, param.shape[1]), param.name.endswith(("gate_up.weight", ".gate_up"))
    made = panels_of(shape, scheme, gated=gated, lanes=native.quire_lanes(), quads=bool(native.quire_quads()))
    raws = FORMATS[param.format].tensors(first_expert(param))
    names = [part.stored for raw in raws if raw.name.endswith(".scale") for part in raw.parts]
    exact = bool(names) and all(name in headers and headers[name].dtype in EXACT for name in names)
    return kept_bytes(made, shape, scheme, count * copies, 2 if exact else scheme.scale_bytes)


def _kernel(plan: EnginePlan, param: Param) -> str:
    """Return the kernel of a quantized matrix; "" where none can run it."""
    assert param.scheme is not None
    if param.shard == "experts":
        return plan.experts.of(param.scheme).experts if plan.experts else ""
    weights = tuple(sorted(param.scheme.needs))
    return next((one.name for one in plan.kernels if one.op == "linear" and one.weights == weights), "")
