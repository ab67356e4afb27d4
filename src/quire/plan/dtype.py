"""The dtype of weights, activations and KV cache, and the reason for it."""

from dataclasses import dataclass

from quire.contracts.errors import ConfigError

ALIASES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class DTypePlan:
    """The dtype of activations and KV cache, and the reason for it.

    weights   dtype of stored matrices that kernels convert as they read them; "": the same dtype
    """

    dtype: str
    reason: str
    weights: str = ""


def resolve_dtype(requested: str, checkpoint: str, has_bf16_units: bool, device: str = "cpu") -> DTypePlan:
    """Return the dtype of weights, activations and KV cache.

    A CPU has no float16, and fast bfloat16 only with bf16 units. There "auto" takes another dtype and gives the reason.
    """
    requested = ALIASES.get(requested, requested)
    if device == "cuda":
        return (
            DTypePlan(dtype=checkpoint, reason="as in the checkpoint")
            if requested == "auto"
            else DTypePlan(dtype=requested, reason="as asked")
        )
    if requested == "float16" or (requested == "auto" and checkpoint == "float16"):
        if requested == "float16":
            raise ConfigError("dtype=float16 is not implemented on a CPU: use dtype=bfloat16 or dtype=float32.")
        target = "bfloat16" if has_bf16_units else "float32"
        return DTypePlan(dtype=target, reason=f"the checkpoint is float16, which has no CPU path; {target} instead")
    if requested != "auto":
        return DTypePlan(dtype=requested, reason="as asked")
    if checkpoint == "bfloat16" and not has_bf16_units:
        return DTypePlan(
            dtype="float32",
            weights="bfloat16",
            reason="float32 arithmetic, weights stay bfloat16: this CPU has no fast bf16 units",
        )
    return DTypePlan(dtype=checkpoint, reason="as in the checkpoint")
