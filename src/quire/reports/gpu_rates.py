"""Rates of GPUs, for floors of steps: measured ones of an H200, published ones of others. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST_GPUS = 8  # of one machine: NVLink joins them, and no more ranks of tensor parallelism are proposed


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """Rates of a GPU.

    memory     bytes per second
    products   operations per second of matrix products of two-byte numbers, with two for a multiplication and a sum
    narrow     values of a weight whose activations are quantized, too ("e4m3", "int8") -> operations per second
    link       bytes per second that a GPU reads from the GPUs of its host
    exchange   seconds of an exchange of few bytes
    source     origin of the numbers
    """

    name: str
    memory: float
    products: float
    narrow: Mapping[str, float] = field(default_factory=dict)
    link: float
    exchange: float
    source: str


SMALL = 6.6e-6  # a sum of 8 KB between two H200 in a CUDA graph
RATES = (
    GpuRates(
        name="H200",
        memory=4.3e12,
        products=780e12,
        narrow={"e4m3": 1000e12, "int8": 1000e12},
        link=380e9,
        exchange=SMALL,
        source="measured",
    ),
    GpuRates(
        name="H100",
        memory=3.35e12,
        products=989e12,
        narrow={"e4m3": 1979e12, "int8": 1979e12},
        link=450e9,
        exchange=SMALL,
        source="published for SXM, which no program reaches; exchanges as on an H200",
    ),
    GpuRates(
        name="A100",
        memory=2.04e12,
        products=312e12,
        narrow={"int8": 624e12},
        link=300e9,
        exchange=SMALL,
        source="published for SXM of 80 GB, which no program reaches; exchanges as on an H200",
    ),
)


def rates_of(words: str) -> GpuRates | None:
    """Return the rates of the GPU that `words` name; None: none are known."""
    return next((one for one in RATES if one.name in words), None)
