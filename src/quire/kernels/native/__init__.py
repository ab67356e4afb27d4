"""Runtime of the C kernels: build, library, memory and recordings. Each kernel's source stands beside its operation.

    all.c                  one translation unit of every operation's C
    parallel.h             threads: shared by the kernels
    vectors.h, tiles.h     vectors of AVX2 or AVX-512, AMX tiles
    build.py               compiles the shared library on first use, into the kernel cache
    library.py             loads the library, or tells why there is none
    memory.py              memory in huge pages
    recording.py, recording.h   recorded CPU steps

Knows no operation. Without a C compiler, a writable cache or a CPU with AVX2, every operation uses PyTorch.
"""
