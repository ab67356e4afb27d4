"""The kernels written in C: how they are built, loaded and given memory; each one stands beside its operation.

    all.c, parallel.h    one translation unit of every operation's native.c, and what they share
    build.py             sources + compiler + CPU -> a shared library in the kernel cache, compiled on first use
    library.py           the loaded library, or why there is none
    memory.py            memory in huge pages

Knows no operation. Without a compiler, a writable cache or the CPU for it, every operation has its PyTorch version.
"""
