"""oneDNN's support of bfloat16 on this CPU, found without PyTorch, whose operation raises if there is none."""

from quire.platforms.cpu import read_cpu_flags

X86 = frozenset({"avx512bw", "avx512vl", "avx512dq"})


def missing_bf16(flags: frozenset[str] | None = None) -> str:
    """Return the reason why oneDNN cannot pack bfloat16 weights on a CPU with `flags` (None: this CPU), or ""."""
    flags = read_cpu_flags() if flags is None else flags
    if X86 <= flags or flags & {"avx_ne_convert", "bf16"}:
        return ""
    return f"this CPU has no {min(X86 - flags)}" if "sse2" in flags else "this CPU has no bf16 units"
