"""Rates of GPUs, for floors of steps: measured ones of an H200, published ones of others. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST_GPUS = 8  # of one machine: NVLink joins them, and no more ranks of tensor parallelism are proposed


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Shares of a GPU's rates that kernels reach, beside their gaps.

    few, some, many     products of decodes, of up to 16 and 128 rows and of more
    packed              weights of 4 bits in these, times the share above
    prompts             products of prompts
    experts             routed experts of decodes
    prompt_experts      of prompts; narrow_experts: those whose activations are quantized
    attention           of decodes, over the KV cache
    prompt_attention    of prompts
    """

    few: float = 1.0
    some: float = 0.8
    many: float = 0.85
    packed: float = 0.7
    prompts: float = 0.92
    experts: float = 1.0
    prompt_experts: float = 0.65
    narrow_experts: float = 0.85
    attention: float = 0.9
    prompt_attention: float = 0.75


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """Rates of a GPU.

    memory     bytes per second
    products   operations per second of matrix products of two-byte numbers, with two for a multiplication and a sum
    narrow     values of a weight whose activations are quantized, too ("e4m3", "int8") -> operations per second
    link       bytes per second that a GPU reads from the GPUs of its host
    host       bytes per second that a GPU copies from host memory
    exchange   seconds of an exchange of few bytes
    gap        seconds of a kernel that waits for the one before it, beside its bytes and operations
    reached    shares of these rates in a step
    source     origin of the numbers
    """

    name: str
    memory: float
    products: float
    narrow: Mapping[str, float] = field(default_factory=dict)
    link: float
    host: float
    exchange: float
    gap: float = 3e-6
    reached: Reached = Reached()
    source: str


# Gap and shares are fitted to 28 cells of docs/performance.md (seven models, four kinds of work, one H200), of which a
# test compares each with its prediction.
SMALL = 6.6e-6  # a sum of 8 KB between two H200 in a CUDA graph
RATES = (
    GpuRates(
        name="H200",
        memory=4.3e12,
        products=780e12,
        narrow={"e4m3": 1000e12, "int8": 1000e12},
        link=380e9,
        host=55.5e9,
        exchange=SMALL,
        source="measured",
    ),
    GpuRates(
        name="H100",
        memory=3.35e12,
        products=989e12,
        narrow={"e4m3": 1979e12, "int8": 1979e12},
        link=450e9,
        host=55.5e9,
        exchange=SMALL,
        source="published for SXM, which no program reaches; exchanges and copies from host memory as on an H200",
    ),
    GpuRates(
        name="A100",
        memory=2.04e12,
        products=312e12,
        narrow={"int8": 624e12},
        link=300e9,
        host=25e9,
        exchange=SMALL,
        source="published for SXM of 80 GB, which no program reaches; exchanges as on an H200",
    ),
)


def rates_of(words: str) -> GpuRates | None:
    """Return the rates of the GPU that `words` name; None: none are known."""
    return next((one for one in RATES if one.name in words), None)
