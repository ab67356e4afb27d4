"""Whether oneDNN multiplies bfloat16 on this CPU; asked without PyTorch, whose operation raises where it does not."""

from quire.platforms.cpu import read_cpu_flags

X86 = frozenset({"avx512bw", "avx512vl", "avx512dq"})


def missing_bf16(flags: frozenset[str] | None = None) -> str:
    """Why oneDNN cannot pack weights of bfloat16 on a CPU with these flags (None: this one), or ""."""
    flags = read_cpu_flags() if flags is None else flags
    if X86 <= flags or flags & {"avx_ne_convert", "bf16"}:
        return ""
    return f"this CPU has no {min(X86 - flags)}" if "sse2" in flags else "this CPU has no bf16 units"
