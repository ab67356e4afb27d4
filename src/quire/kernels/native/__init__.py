"""Runtime of the C kernels: build, library, memory and recordings. Each kernel's source stands beside its operation.

    all.c                  one translation unit of every operation's C
    parallel.h             threads: shared by the kernels
    vectors.h, tiles.h     vectors of AVX2 or AVX-512, AMX tiles
    build.py               compiles the shared library on first use, into the kernel cache
    levels.py              libraries that a wheel carries, one for each x86-64 level
    library.py             loads the library, or tells why there is none
    memory.py              memory in huge pages
    recording.py, recording.h   recorded CPU steps

Knows no operation. Every operation uses PyTorch on a CPU without AVX2, and where the library can neither be compiled
(no C compiler, no writable cache) nor is in the wheel.
"""
