"""The type of the KV cache, by the option `kv_cache_dtype` and the quantization of the checkpoint. No torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.contracts.errors import ConfigError
from quire.kernels.latent_rows import DS_MLA
from quire.kernels.latent_rows import FEATURE as ROWS
from quire.plan.dtype import ALIASES

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ASKED = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2, DS_MLA: DS_MLA}
FEATURES = {E4M3: "e4m3 cache", E5M2: "e5m2 cache", DS_MLA: ROWS}  # that kernels must have (`quire.kernels.attention`)


class CacheChoice(NamedTuple):
    """The dtype of the KV cache, and the reason for it.

    scaled   True: the checkpoint's scales of keys and values are used, if it has them. False: all scales are 1
    notes    lines to show the user
    """

    dtype: str
    reason: str
    scaled: bool = False
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> frozenset[str]:
        """Features that an attention kernel must have to read and write this cache."""
        return frozenset({FEATURES[self.dtype]} if self.dtype in FEATURES else ())


def choose_cache(asked: str, dtype: str, quantization: Mapping[str, Any]) -> CacheChoice:
    """Choose the dtype of the KV cache.

    asked   the option `kv_cache_dtype`
    dtype   dtype of the model's computation
    quantization   the checkpoint's quantization_config; {}: unquantized
    Raises ConfigError for an unquantized dtype other than that of the computation.
    """
    scheme = _scheme(quantization)
    other = scheme not in ("", "fp8")
    if asked == "auto":
        if scheme == "fp8":
            return CacheChoice(E4M3, "as in the checkpoint", True)
        note = f"the checkpoint has scales for a KV cache of {scheme}, which is not implemented: the cache is {dtype}."
        return CacheChoice(dtype, "as the computation", notes=(note,) if other else ())
    if asked not in ASKED:
        if ALIASES.get(asked, asked) != dtype:
            raise ConfigError(
                f"kv_cache_dtype={asked}: the model computes in {dtype}, and an unquantized KV cache "
                "has that dtype: use --kv-cache-dtype auto, fp8 or fp8_e5m2, or another --dtype."
            )
        return CacheChoice(dtype, "as asked")
    if scheme and (other or asked in ("fp8_e5m2", DS_MLA)):
        note = f"the checkpoint's scales of the KV cache are for {scheme}: kv_cache_dtype={asked} does not use them."
        return CacheChoice(ASKED[asked], "as asked", notes=(note,))
    return CacheChoice(ASKED[asked], "as asked", ASKED[asked] == E4M3)


def cache_notes(choice: CacheChoice, device: str, dtype: str) -> tuple[str, ...]:
    """Return lines to show the user about the cache of an engine that computes in `dtype` on a device."""
    if device != "cpu" or choice.dtype not in (E4M3, E5M2):
        return choice.notes
    slow = (
        "an 8-bit KV cache saves memory on a CPU, and is slow there: native kernels of attention do not read it. Where "
        f"the memory suffices, --kv-cache-dtype {dtype} is faster."
    )
    return (*choice.notes, slow)


def _scheme(quantization: Mapping[str, Any]) -> str:
    """Return the numbers for which the checkpoint has scales: "fp8" (e4m3, a scale for each tensor), other words, or ""
    for none."""
    if algorithm := quantization.get("kv_cache_quant_algo"):
        return "fp8" if algorithm == "FP8" else str(algorithm)
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, str):
        return "fp8" if scheme == "static" else scheme
    if not isinstance(scheme, dict) or not scheme:
        return ""
    bits, kind, strategy = scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy") or "tensor"
    dynamic = " (dynamic)" if scheme.get("dynamic") else " (asymmetric)" if scheme.get("symmetric") is False else ""
    exact = (bits, kind, strategy, dynamic) == (8, "float", "tensor", "")
    return "fp8" if exact else f"{bits}-bit {kind} per {strategy}{dynamic}"
