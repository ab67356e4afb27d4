"""Table of all implementations of all operations: devices, dtypes, features and needs. Readable without PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire.contracts.scheme import KINDS, UNQUANTIZED
from quire.kernels.latent_rows import FEATURE

# A need of an implementation -> the function that returns why this process cannot meet it, or "".
NEEDS: Mapping[str, str] = {
    "triton": "quire.kernels.triton_runtime:missing",
    "hopper": "quire.kernels.triton_runtime:missing_hopper",
    "scaled products": "quire.kernels.linear.scaled:unsupported",
    "8-bit numbers": "quire.kernels.triton_runtime:missing_eight_bits",
    "CUDA C++": "quire.kernels.cuda_source:missing",
    "CUDA C++ on Hopper": "quire.kernels.cuda_source:missing_on_hopper",
    "native": "quire.kernels.native.library:missing",
    "native AMX": "quire.kernels.native.library:missing_amx",
    "packed linears": "quire.kernels.linear.cpu:missing",
    "packed bfloat16": "quire.kernels.linear.onednn_support:missing_bf16",
    "flash attention": "quire.kernels.attention.cpu:missing",
}


FIXED_ORDER = "fixed order"  # feature: the bits of a row depend on that row alone, see `kernels/invariant`
INVARIANT = "invariant"  # implementations in `kernels/invariant`: their names begin with it


def module_of(op: str, name: str) -> str:
    """Return the module of the implementation `name` of the operation `op`."""
    if name.startswith(INVARIANT):
        return f"quire.kernels.invariant.{op}{name.removeprefix(INVARIANT)}"
    return f"quire.kernels.{op}.{name}"


@dataclass(frozen=True, kw_only=True)
class Support:
    """Capabilities of an implementation.

    features       features on every machine; the docstring of the operation's package defines them. An implementation
                   that reads weights also names the kinds of weights that it runs: words of `KINDS`, or UNQUANTIZED
    extra          key of `NEEDS` -> features that the implementation has only where this need is met
    max_head_dim   largest size of an attention head; None: any
    lacks          kind of weights that the implementation does not run, although it runs kinds like it -> the reason
    needs          keys of `NEEDS`, which must all be met for the implementation to run
    typed          dtype -> more keys of `NEEDS`, for a model that computes in this dtype
    only_for       features without which it is never chosen unless it is named: it is slower than others
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str] = frozenset()
    extra: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    max_head_dim: int | None = None
    needs: tuple[str, ...] = ()
    typed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only_for: frozenset[str] = frozenset()


_WHOLE = frozenset({"float32", "bfloat16"})
_ALL = _WHOLE | {"float16"}
_SCORES = frozenset({"window", "chunked", "soft_cap", "sinks"})
_CACHES = frozenset({"e4m3 cache", "e5m2 cache"})
_NEW: Mapping[str, frozenset[str]] = {"8-bit numbers": _CACHES}
_CLUSTERS: Mapping[str, frozenset[str]] = {**_NEW, "CUDA C++": frozenset({"clusters"})}
_ROWS: Mapping[str, frozenset[str]] = {"8-bit numbers": _CACHES | {FEATURE}}
REFERENCE = Support(devices=frozenset({"cpu", "cuda"}), dtypes=_ALL)
TRITON = Support(devices=frozenset({"cuda"}), dtypes=_ALL, needs=("triton",))
PLAIN = Support(devices=frozenset({"cpu"}), dtypes=_WHOLE)
HOPPER = replace(TRITON, dtypes=_ALL - {"float32"}, needs=("hopper",))
NATIVE = replace(PLAIN, needs=("native",))
_FIXED = frozenset({FIXED_ORDER})
FIXED_TRITON, FIXED_NATIVE = replace(TRITON, features=_FIXED), replace(NATIVE, features=_FIXED)
_INVARIANT_GPU = replace(FIXED_TRITON, only_for=_FIXED)
_INVARIANT_CPU = replace(PLAIN, features=_FIXED, only_for=_FIXED)
_PLAIN = frozenset({UNQUANTIZED})
_QUANTIZED = frozenset({*KINDS, "ue8m0"})
_EIGHT_BITS = frozenset({"fp8 block", "fp8 channel", "int8", "ue8m0"})
_UNGATED = frozenset({"gated", "ungated"})
_NARROW = frozenset({"w4", "w8", "mxfp4", "add", "exact", "gated", "out"})  # weights alone of a linear layer
_WIDE_GROUPS = {"nvfp4": "its words have scales for 32 inputs or more, not for 16"}
_TRAVELLING = _QUANTIZED | {"quantized rows"}  # quantized experts whose rows may be quantized before
_FORMS = frozenset({"gelu_tanh", "gelu", "swiglu_oai", "bias"})  # of experts, see their form.py
_STACKED = _PLAIN | {"in place"}  # unquantized experts as they are stored
_SMALL: Mapping[str, Support] = {"triton": FIXED_TRITON, "native": FIXED_NATIVE, "cpu": PLAIN, "ref": REFERENCE}

# Operation -> its implementations, best first. The last one is always the reference, which has no needs.
SUPPORTS: dict[str, Mapping[str, Support]] = {
    "norm": _SMALL,
    "heads": {
        "triton": replace(TRITON, extra=_NEW),
        "invariant": _INVARIANT_GPU,
        "native": FIXED_NATIVE,
        "cpu": replace(PLAIN, features=_CACHES),
        "ref": replace(REFERENCE, features=_CACHES),
    },
    "activation": _SMALL,
    "linear": {
        "cuda": Support(devices=frozenset({"cuda"}), dtypes=_ALL, features=_PLAIN | {"add", "exact", "out"},
                        extra={"triton": frozenset({"gated", "norm", "plain", "rows"})}),
        "scaled": replace(TRITON, dtypes=_ALL - {"float32"}, needs=("scaled products",),
                          features=_EIGHT_BITS | _UNGATED | {"add", "exact", "norm", "out"}),
        "weight_only_hopper": replace(HOPPER, dtypes=frozenset({"bfloat16"}), features=_NARROW, lacks=_WIDE_GROUPS,
                                      extra={"CUDA C++": frozenset({"norm of one row"})}),
        "weight_only": replace(TRITON, dtypes=_ALL - {"float32"}, features=_NARROW | _UNGATED | {"nvfp4"}),
        "invariant": replace(_INVARIANT_GPU,
                             features=_PLAIN | _FIXED | {"add", "exact", "gated", "out", "plain", "rows"}),
        "native": Support(devices=frozenset({"cpu"}), dtypes=frozenset({"bfloat16"}),
                          features=_PLAIN | _FIXED | {"add", "exact", "gated", "rows"}, needs=("native AMX",)),
        "panels": replace(NATIVE, features=_PLAIN | _QUANTIZED | _FIXED | _UNGATED
                          | {"add", "exact", "rows", "stored"}),
        "cpu": replace(PLAIN, features=_PLAIN, needs=("packed linears",), typed={"bfloat16": ("packed bfloat16",)}),
        "quantized_ref": replace(REFERENCE, features=_QUANTIZED | {"exact"}),
        "ref": replace(REFERENCE, features=_PLAIN | {"exact"}),
    },
    "attention": {
        "hopper": replace(HOPPER, features=_SCORES | {"rows", "heads"}, extra=_CLUSTERS, max_head_dim=512),
        "triton": replace(TRITON, features=_SCORES | {"rows", "heads"}, extra=_NEW, max_head_dim=512),
        "invariant": replace(_INVARIANT_GPU, features=_SCORES | _FIXED, max_head_dim=256),
        "native": replace(NATIVE, features=_SCORES | {"recording", "rows"}, max_head_dim=512),
        "cpu": replace(PLAIN, features=_CACHES | {"rows"}, needs=("flash attention",)),
        "invariant_cpu": replace(_INVARIANT_CPU, features=_SCORES | _FIXED | {"recording"}, max_head_dim=512,
                                 needs=("native",)),
        "ref": replace(REFERENCE, features=_SCORES | _CACHES | {"rows"}),
    },
    "latent": {
        "hopper": replace(HOPPER, dtypes=frozenset({"bfloat16"}), features=_CACHES | {FEATURE, "rows", "chosen"},
                          extra={"CUDA C++": frozenset({"clusters"})}),
        "triton": replace(TRITON, features=frozenset({"rows", "chosen"}), extra=_ROWS),
        "native": replace(PLAIN, features=_CACHES | {FEATURE, "rows", "chosen"},
                          needs=("native", "flash attention")),
        "cpu": replace(PLAIN, features=_CACHES | {FEATURE, "rows", "chosen"}, needs=("flash attention",)),
        "ref": replace(REFERENCE, features=_CACHES | {FEATURE, "rows", "chosen"}),
    },
    "index": {
        "triton": replace(TRITON, extra=_ROWS),
        "native": replace(NATIVE, features=_CACHES | {FEATURE}),
        "ref": replace(REFERENCE, features=_CACHES | {FEATURE}),
    },
    "delta": {"triton": TRITON, "native": FIXED_NATIVE, "ref": REFERENCE},
    "mamba": {"triton": TRITON, "native": FIXED_NATIVE, "ref": REFERENCE},
    "shortconv": {"triton": TRITON, "native": FIXED_NATIVE, "ref": REFERENCE},
    "blend": {
        "triton": replace(TRITON, extra=_NEW),
        "cpu": replace(PLAIN, features=_CACHES),
        "ref": replace(REFERENCE, features=_CACHES),
    },
    "lora": {"triton": TRITON, "native": NATIVE, "ref": REFERENCE},
    "step": {"triton": TRITON, "ref": REFERENCE},
    "sampling": {"triton": TRITON, "ref": REFERENCE},
    "routing": {
        "triton": replace(FIXED_TRITON, extra={"CUDA C++ on Hopper": frozenset({"norm of few rows"})}),
        "invariant_cpu": _INVARIANT_CPU,
        "ref": REFERENCE,
    },
    "quantize": {"ref": REFERENCE},
    "experts": {
        "hopper": replace(HOPPER, features=_STACKED | _FORMS | {"join", "adapters"}),
        "triton": replace(TRITON, features=_STACKED | _FORMS | {"join", "relu2", "adapters"}),
        "scaled": replace(TRITON, dtypes=frozenset({"bfloat16"}), needs=("scaled products",),
                          features=_EIGHT_BITS | _FORMS | {"join", "quantized rows", "adapters"}),
        "weight_only_hopper": replace(HOPPER, dtypes=frozenset({"bfloat16"}), features=_FORMS | {"mxfp4", "join"},
                                      lacks=_WIDE_GROUPS),
        "weight_only": replace(TRITON, dtypes=_ALL - {"float32"},
                               features=_FORMS | {"w4", "w8", "mxfp4", "nvfp4", "join", "adapters"}),
        "grouped": Support(devices=frozenset({"cuda"}), dtypes=frozenset({"bfloat16"}), features=_STACKED | _FORMS),
        "invariant": replace(_INVARIANT_GPU, features=_STACKED | _FORMS | _FIXED | {"join", "relu2"}),
        "native": replace(PLAIN, dtypes=frozenset({"bfloat16"}), features=_PLAIN | _FORMS, needs=("native AMX",)),
        "panels": replace(NATIVE, features=_PLAIN | _TRAVELLING | _FORMS | {"stored", "adapters"}),
        "invariant_cpu": replace(NATIVE, features=_PLAIN | _QUANTIZED | _FORMS | _FIXED | {"stored"}, only_for=_FIXED),
        "cpu": replace(PLAIN, features=_STACKED | _TRAVELLING | _FORMS | {"relu2", "adapters"}),
        "ref": replace(REFERENCE, features=_STACKED | _TRAVELLING | _FORMS | {"relu2", "adapters"}),
    },
}  # fmt: skip
DENSE = ("norm", "heads", "activation", "linear", "attention")  # operations of a dense model
